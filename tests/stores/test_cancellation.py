"""A cancelled call never leaves a thread behind that touches the caller's memory."""

import asyncio
import contextlib
import functools
import gc
import os
import threading
import weakref
from concurrent.futures import wait

import pytest
from system_calls import Held

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import DaemonPool, LimitedThreads, run_stoppable
from sglang_cake.stores.file.block_files import IO_BYTES, FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.testing import store_contract
from sglang_cake.testing.store_contract import key_of

A, B = key_of("a"), key_of("b")


LAYOUT = BlockLayout.plain(1, (("kv", (4 * IO_BYTES,)),), "uint8", 1)  # of several pieces
FRAME = BlockFrame(Namespace((("layout", LAYOUT.describe()),)), LAYOUT)


def block_of(name):
    return store_contract.block_of(name, LAYOUT)


async def read(store, key):
    return await store_contract.read(store, key, LAYOUT)


@contextlib.asynccontextmanager
async def store_with_a(root):
    store = FileStore(BlockFolder(FolderSettings(root, min_free_bytes=0)), FRAME, threads=1)
    await store.put(A, block_of("a"))
    try:
        yield store
    finally:
        await store.close()


async def ticks(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_file_store_cancelled_read_waits_for_its_thread_and_stops_early(
    tmp_path, monkeypatch
):
    async with store_with_a(tmp_path) as store:
        held = Held(os.preadv)
        monkeypatch.setattr(os, "preadv", held)
        out = bytearray(LAYOUT.block_bytes)
        task = asyncio.create_task(store.get_into(A, memoryview(out)))
        await asyncio.to_thread(held.entered.wait)
        for _ in range(3):  # impatient callers change nothing
            task.cancel()
            await ticks()
            assert not task.done(), "returned while its thread could still write"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.calls == 1, "the thread went on reading"
        out[:] = bytes(len(out))
        assert await read(store, A) == block_of("a")
        assert out == bytes(len(out))


async def test_file_store_cancelled_put_stops_early_and_stores_no_block(tmp_path, monkeypatch):
    async with store_with_a(tmp_path) as store:
        held = Held(os.writev)
        monkeypatch.setattr(os, "writev", held)
        data = bytearray(block_of("b"))
        task = asyncio.create_task(store.put(B, memoryview(data)))
        await asyncio.to_thread(held.entered.wait)
        task.cancel()
        await ticks()
        assert not task.done()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.calls == 1
        data[:] = bytes(len(data))
        assert await store.contains([B]) == [False]
        assert not list(tmp_path.rglob(".tmp-*"))


async def test_file_store_put_cancelled_during_its_rename_stores_the_block(tmp_path, monkeypatch):
    async with store_with_a(tmp_path) as store:
        held = Held(os.replace)
        monkeypatch.setattr(os, "replace", held)
        task = asyncio.create_task(store.put(B, block_of("b")))
        await asyncio.to_thread(held.entered.wait)
        task.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await read(store, B) == block_of("b")


async def test_file_store_queued_read_cancelled_returns_at_once_and_never_runs(
    tmp_path, monkeypatch
):
    async with store_with_a(tmp_path) as store:
        held = Held(os.preadv)
        monkeypatch.setattr(os, "preadv", held)
        first = asyncio.create_task(read(store, A))
        await asyncio.to_thread(held.entered.wait)
        out = bytearray(LAYOUT.block_bytes)
        second = asyncio.create_task(store.get_into(A, memoryview(out)))
        await ticks()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        held.go.set()
        assert await first == block_of("a")
        await read(store, A)
        assert out == bytes(len(out))


async def test_file_store_read_during_a_blocked_write_completes(tmp_path, monkeypatch):
    async with store_with_a(tmp_path) as store:
        held = Held(os.writev)
        monkeypatch.setattr(os, "writev", held)
        put = asyncio.create_task(store.put(B, block_of("b")))
        await asyncio.to_thread(held.entered.wait)
        assert await read(store, A) == block_of("a")
        held.go.set()
        assert await put is True


async def test_file_store_close_fails_queued_reads_and_waits_for_the_running(tmp_path, monkeypatch):
    async with store_with_a(tmp_path) as store:
        held = Held(os.preadv)
        monkeypatch.setattr(os, "preadv", held)
        first = asyncio.create_task(read(store, A))
        await asyncio.to_thread(held.entered.wait)
        second = asyncio.create_task(read(store, A))
        await ticks()
        closing = asyncio.create_task(store.close())
        with pytest.raises(StoreUnavailable):
            await second
        assert not closing.done()
        held.go.set()
        assert await first == block_of("a")
        await closing


async def test_run_stoppable_error_after_cancellation_is_not_logged(caplog):
    started, go = threading.Event(), threading.Event()

    def work(stop):
        started.set()
        go.wait(60)
        assert stop.is_set()
        raise RuntimeError("too late for anybody")

    with DaemonPool(1, "test") as pool:
        task = asyncio.create_task(run_stoppable(pool, work))
        await asyncio.to_thread(started.wait)
        task.cancel()
        await ticks(2)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert caplog.records == []


async def test_run_stoppable_work_cancelled_in_the_queue_of_a_hanging_thread_is_dropped():
    started, go = threading.Event(), threading.Event()

    def hold(stop):
        started.set()
        go.wait(60)

    with DaemonPool(1, "test") as pool:
        running = asyncio.create_task(run_stoppable(pool, hold))
        await asyncio.to_thread(started.wait)
        ran = []
        work = functools.partial(ran.append)
        dropped = weakref.ref(work)
        waiting = asyncio.create_task(run_stoppable(pool, work))
        del work
        await ticks(2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        await ticks()  # the event loop lets go of the error
        gc.collect()
        assert dropped() is None
        go.set()
        await running
    assert ran == []


async def test_run_stoppable_work_that_is_refused_a_thread_never_runs(monkeypatch):
    started, go = threading.Event(), threading.Event()
    ran = []

    def hold(stop):
        started.set()
        go.wait(60)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pool = DaemonPool(2, "test")
    running = asyncio.create_task(run_stoppable(pool, hold))
    await asyncio.to_thread(started.wait)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreUnavailable):
            await run_stoppable(pool, ran.append)
    go.set()
    await running
    await asyncio.to_thread(pool.shutdown)  # after all that is queued
    assert ran == []


def test_daemon_pool_shutdown_ends_the_wait_for_cancelled_work():
    started, go = threading.Event(), threading.Event()
    with DaemonPool(1, "test") as pool:
        pool.submit(lambda: started.set() or go.wait(60))
        assert started.wait(60)
        waiting = pool.submit(lambda: 7)
        pool.shutdown(wait=False, cancel_futures=True)
        assert wait((waiting,), 60).done == {waiting}
        go.set()


async def test_limited_threads_work_cancelled_while_it_waits_is_forgotten():
    started, go = threading.Event(), threading.Event()

    def hold(stop):
        started.set()
        go.wait(60)

    def never(stop):
        raise AssertionError("it ran")

    threads = LimitedThreads(1, "test")
    running = asyncio.create_task(threads.run(hold))
    await asyncio.to_thread(started.wait)
    waiting = asyncio.create_task(threads.run(never))
    await ticks()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    forgotten = weakref.ref(never)
    del waiting, never
    await ticks()  # the event loop lets go of the error
    gc.collect()
    assert forgotten() is None
    go.set()
    await running
    assert await threads.run(lambda stop: 7) == 7
    threads.close()
