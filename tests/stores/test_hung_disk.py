"""A disk that never answers again: what does not need it goes on, and the process can end."""

import subprocess
import sys
import threading

import pytest
from filestore import folder_of

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.threads import DaemonPool
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.stores.file.index_supervisor import CLOSE_S
from sglang_cake.testing.store_contract import FRAME

HANGS = """
import asyncio, os, sys, threading
from pathlib import Path
sys.path[:0] = {path!r}
from filestore import A, opened, put_a, read_a
from sglang_cake.core.threads import IoThread
from sglang_cake.stores.file import file_store as stores, index_supervisor

index_supervisor.CLOSE_S = stores.CLOSE_S = 0.1
store = opened(Path({root!r}), threads=2)
io = IoThread()
io.run(put_a(store), 60)
hangs = threading.Event()

def preadv(*args):
    hangs.set()
    threading.Event().wait()

os.preadv = preadv
reading = asyncio.run_coroutine_threadsafe(read_a(store), io.loop)
assert hangs.wait(60)
assert io.run(store.contains([A]), 60) == [True]
if sys.argv[1] == "closed":
    io.run(store.close(), 60)
print("ends")
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_file_store_read_that_hangs_does_not_keep_the_process_alive(tmp_path, how):
    program = HANGS.format(path=sys.path, root=str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", program, how], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


async def test_file_store_close_on_a_disk_that_hangs_waits_once_for_all_calls(
    tmp_path, monkeypatch, caplog
):
    folder = folder_of(tmp_path)
    store = FileStore(folder, FRAME, threads=1)
    now_s, waits_s = 100.0, []

    def hangs(pool, at_most_s):
        nonlocal now_s
        waits_s.append(at_most_s)
        now_s += at_most_s
        return False

    with monkeypatch.context() as patch:
        patch.setattr(DaemonPool, "join", hangs)
        patch.setattr("time.monotonic", lambda: now_s)
        await store.close()
    folder.close()
    assert len(waits_s) > 1
    assert sum(waits_s) == CLOSE_S
    assert caplog.text.count("a disk did not answer within 10 s") == 1


OPENING_HANGS = """
import asyncio, sys, threading
sys.path[:0] = {path!r}
from sglang_cake.core.threads import IoThread
from sglang_cake.stores.base import LazyStore
from sglang_cake.testing.store_contract import FRAME

class Source:
    def open(self, frame, *, depth):
        hangs.set()
        threading.Event().wait()

hangs = threading.Event()
store = LazyStore(Source(), FRAME, depth=1, close_s=0.1)
io = IoThread()
asking = asyncio.run_coroutine_threadsafe(store.contains([]), io.loop)
assert hangs.wait(60)
if sys.argv[1] == "closed":
    io.run(store.close(), 60)
io.close()
print("ends")
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_lazy_store_opening_that_hangs_does_not_keep_the_process_alive(how):
    program = OPENING_HANGS.format(path=sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", program, how], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


def test_daemon_pool_at_its_limit_queues_work_and_reuses_threads():
    pool, go, both = DaemonPool(2, "test"), threading.Event(), threading.Barrier(3)

    def work():
        both.wait(60)
        go.wait(60)
        return threading.current_thread().name

    first = [pool.submit(work) for _ in range(2)]
    both.wait(60)
    third = pool.submit(lambda: threading.current_thread().name)
    assert not third.done()
    go.set()
    names = {one.result(60) for one in first}
    assert names == {"test_0", "test_1"}
    assert third.result(60) in names
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(60)
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(work)


def test_daemon_pool_refused_a_thread_goes_on_and_shuts_down(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pool = DaemonPool(1, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            pool.submit(int)
    assert pool.submit(lambda: 7).result(60) == 7
    pool.shutdown()


def test_daemon_pool_shutdown_fails_queued_work_on_request():
    pool, go, begun = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def work():
        begun.set()
        go.wait(60)

    running, waiting = pool.submit(work), pool.submit(work)
    assert begun.wait(60)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(StoreUnavailable):
        waiting.result(0)
    assert not pool.join(0.0)
    go.set()
    pool.shutdown()
    assert running.result(60) is None
