"""Whose bytes end up in the caller's memory, when reads are hedged, cancelled or many."""

import asyncio
import contextlib
import itertools

import pytest
from bad_server import bad_server
from http_servers import FRAMED_BYTES, A, framed, opened_client
from polling import async_until

from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.buffers import Buffer, on_page
from sglang_cake.core.errors import BlockCorrupt, StoreUnavailable
from sglang_cake.loading.loader import BlockRead
from sglang_cake.stores.http.http_transport import HEDGE_FLOOR_S, Hedging
from sglang_cake.testing.store_contract import LAYOUT, ProgressRecord, block_of, read

GOOD = framed("a")
BAD = GOOD[:-100] + bytes(100)


@contextlib.asynccontextmanager
async def client_and_server(answer, **kwargs):
    async with bad_server(answer) as server, opened_client(server.base, **kwargs) as store:
        yield store, server


def ready_to_hedge():
    """As after many reads that were answered at once."""
    hedging = Hedging(floor_s=HEDGE_FLOOR_S)
    for _ in range(2 * Hedging.ENOUGH):
        hedging.answered(0.0)
    return hedging


async def test_http_store_hedge_that_wins_discards_the_late_answer():
    async def answer(asked):
        first.append(asked)
        if len(first) > 1:
            asked.answer(200, GOOD)

    first = []
    async with client_and_server(answer, hedging=ready_to_hedge()) as (store, server):
        out = bytearray(LAYOUT.block_bytes)
        await store.get_into(A, memoryview(out))
        assert out == block_of("a")
        assert (store.counters.hedges, store.counters.hedges_won) == (1, 1)
        assert len(server.asked) == 2
        out[:] = bytes(len(out))
        first[0].answer(200, BAD)  # late, and wrong
        await first[0].client_gone.wait()
        assert await read(store, A) == block_of("a")
        assert out == bytes(len(out))


async def test_http_store_first_answer_before_the_hedge_is_used():
    async def answer(asked):
        first.append(asked)
        if len(first) == 2:  # the hedge is never answered
            first[0].answer(200, GOOD)

    first = []
    async with client_and_server(answer, hedging=ready_to_hedge()) as (store, _):
        assert await read(store, A) == block_of("a")
        assert (store.counters.hedges, store.counters.hedges_won) == (1, 0)


@pytest.mark.parametrize("bad", [0, 1])
async def test_http_store_hedged_read_survives_one_failed_request(bad):
    async def answer(asked):
        both.append(asked)
        if len(both) == 2:
            both[bad].reset()
            await asyncio.sleep(0)
            both[1 - bad].answer(200, GOOD)

    both = []
    async with client_and_server(answer, hedging=ready_to_hedge()) as (store, _):
        assert await read(store, A) == block_of("a")
        assert store.counters.retries == 0


async def test_http_store_hedged_read_with_two_failures_counts_one():
    async def answer(asked):
        both.append(asked)
        if len(both) == 2:
            for one in both:
                one.send(b"no HTTP\r\n\r\n")
        elif len(both) > 2:
            asked.answer(200, GOOD)

    both = []
    async with client_and_server(answer, hedging=ready_to_hedge()) as (store, _):
        assert await read(store, A) == block_of("a")
        assert store.counters.failures == 1
        assert store.counters.retries == 1


async def test_http_store_cancelled_hedged_read_closes_both_requests():
    async def answer(asked):
        both.append(asked)
        if len(both) == 2:
            asked_twice.set()

    both, asked_twice = [], asyncio.Event()
    async with client_and_server(answer, hedging=ready_to_hedge()) as (store, _):
        out = bytearray(LAYOUT.block_bytes)
        task = asyncio.create_task(store.get_into(A, memoryview(out)))
        await asked_twice.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for one in both:
            await one.client_gone.wait()
        assert out == bytes(len(out))
        assert store.counters.failures == 0


async def test_http_store_cancelled_read_returns_and_leaves_its_buffer_alone():
    async def answer(asked):
        asked.answer(200, GOOD[:-100], length=FRAMED_BYTES)
        half_sent.append(asked)

    half_sent = []
    async with client_and_server(answer) as (store, _):
        out = bytearray(LAYOUT.block_bytes)
        task = asyncio.create_task(store.get_into(A, memoryview(out)))
        await async_until(lambda: any(out))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        out[:] = bytes(len(out))
        (asked,) = half_sent
        asked.send(GOOD[-100:])
        await asked.client_gone.wait()
        assert out == bytes(len(out))
        assert store.counters.failures == 0


async def test_http_store_reads_are_bounded_by_depth_and_delay_no_lookup():
    async def answer(asked):
        if asked.method == "POST":
            asked.answer(200, b"\1")
        else:
            waiting.append(asked)

    waiting = []
    async with client_and_server(answer, depth=3) as (store, server):
        tasks = [asyncio.create_task(read(store, A)) for _ in range(10)]
        await async_until(lambda: len(waiting) == 3)
        assert await store.contains([A]) == [True]
        for turn in range(10):
            await async_until(lambda turn=turn: len(waiting) > turn)
            assert len(waiting) <= turn + 3
            waiting[turn].answer(200, GOOD)
        assert await asyncio.gather(*tasks) == [block_of("a")] * 10
        assert server.connections <= 4


async def test_http_store_close_fails_a_running_read():
    async def answer(asked):
        seen.set()

    seen = asyncio.Event()
    async with client_and_server(answer) as (store, _):
        task = asyncio.create_task(read(store, A))
        await seen.wait()
        await store.close()
        with pytest.raises(StoreUnavailable):
            await task


async def test_http_store_progress_is_reported_while_bytes_arrive():
    async def answer(asked):
        asked.answer(200, GOOD[:100], length=FRAMED_BYTES)
        for begin, end in itertools.pairwise((100, *parts)):
            await async_until(
                lambda begin=begin: told.counts[-1:] == [max(0, begin - HEADER_BYTES)]
            )
            asked.send(GOOD[begin:end])

    parts = (HEADER_BYTES + 1, HEADER_BYTES + 2, HEADER_BYTES + 700, FRAMED_BYTES)
    out = bytearray(LAYOUT.block_bytes)
    told = ProgressRecord(out, block_of("a"))
    async with client_and_server(answer) as (store, _):
        await store.get_into(A, memoryview(out), told)
        assert told.wrong == []
        assert told.grew
        assert {part - HEADER_BYTES for part in parts} <= set(told.counts)


@pytest.mark.parametrize("used", [True, False])
async def test_http_store_retried_read_restarts_its_progress(used):
    async def answer(asked):
        tries.append(asked)
        if len(tries) > 1:
            asked.answer(200, GOOD)
            return
        asked.answer(200, BAD[:-50], length=FRAMED_BYTES)
        await async_until(lambda: reading.has(LAYOUT.block_bytes - 50))
        assert not used or reading.wait(LAYOUT.block_bytes - 50, 0.0)
        asked.reset()

    tries, counts, buffer = [], [], Buffer(on_page(LAYOUT.block_bytes))
    reading = BlockRead(buffer)
    async with client_and_server(answer) as (store, _):

        def came(count):
            counts.append(count)
            reading.received(count)

        await store.get_into(A, buffer.view, came)
        reading.end(whole=True)
        assert store.counters.retries == 1
        assert buffer.view == block_of("a")
        second = counts.index(0, 1)
        for tried in (counts[:second], counts[second:]):
            assert tried == sorted(set(tried))
        assert counts[second - 1] == LAYOUT.block_bytes - 50
        assert counts[-1] == LAYOUT.block_bytes
        assert reading.wait_whole(0.0) is not used


async def test_http_store_wrong_header_reports_no_payload():
    async def answer(asked):
        asked.answer(200, framed("b"))

    async with client_and_server(answer) as (store, _):
        counts = []
        with pytest.raises(BlockCorrupt):
            await store.get_into(A, memoryview(bytearray(LAYOUT.block_bytes)), counts.append)
        assert counts == [0]


async def test_http_store_corrupt_last_bytes_raise_after_full_progress():
    """The last byte decides: all that came before it was in `out` already."""

    async def answer(asked):
        asked.answer(200, BAD)

    async with client_and_server(answer) as (store, _):
        out = bytearray(LAYOUT.block_bytes)
        counts = []
        with pytest.raises(BlockCorrupt):
            await store.get_into(A, memoryview(out), counts.append)
        assert any(out)
        assert counts[-1] == LAYOUT.block_bytes
