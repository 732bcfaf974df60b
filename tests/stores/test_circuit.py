"""Time limits of calls to a remote store that never answers, on a clock of its own."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from sglang_cake.core.errors import BlockCorrupt, StoreUnavailable
from sglang_cake.stores.base import read_until_s
from sglang_cake.stores.circuit_breaker import (
    FAILURES,
    FIRST_S,
    LAST_S,
    LATE_S,
    READ_SHARE,
    READS,
    SLACK,
    Circuits,
    Fault,
    RemoteCounters,
    RemoteError,
    TimeoutLimits,
)
from sglang_cake.stores.http.http_store import HttpStore
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.s3 import bucket
from sglang_cake.stores.s3.bucket import S3Place
from sglang_cake.stores.s3.s3_store import S3Store
from sglang_cake.testing.store_contract import FRAME, block_of, key_of
from sglang_cake.testing.virtual_time import in_virtual_time

AFTER_S = 1e-6  # so that a pause is over, however seconds are rounded


async def call_in_vain(circuit):
    """Seconds that a call takes which is never answered."""
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    with pytest.raises(RemoteError) as error:
        async with circuit.call(1):
            await asyncio.Event().wait()
    assert error.value.fault is Fault.TIMEOUTS
    return now_s() - began_s


def reads(at_once=4, looks_for_corrupt=False, **limits):
    clock = asyncio.get_running_loop().time
    server = Circuits(
        "the store",
        RemoteCounters(),
        redial=lambda: None,
        clock=clock,
        looks_for_corrupt=looks_for_corrupt,
    )
    return server.add(READS, TimeoutLimits(**limits), at_once)


def test_circuit_read_whose_caller_is_less_patient_counts_as_late():
    """However much later the limit would end it: cancelled calls would never open the breaker."""

    async def main():
        circuit = reads(first_s=20.0)
        for _ in range(FAILURES):
            read_until_s.set(asyncio.get_running_loop().time() + 5.0)
            async with asyncio.timeout(5.0):
                assert await call_in_vain(circuit) == pytest.approx(5.0 * READ_SHARE)
        with pytest.raises(StoreUnavailable, match="left alone since timed out"):
            async with circuit.call(1):
                pass

    in_virtual_time(main())


async def answer(circuit, took_s):
    async with circuit.call(1):
        await asyncio.sleep(took_s)


async def give_up(circuit, after_s, size_bytes=1):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s), circuit.call(size_bytes):
            await asyncio.Event().wait()


@pytest.mark.parametrize("at_once", [4, 16])
@pytest.mark.parametrize("usual_s", [0.001, 0.1])
def test_circuit_reads_given_up_later_than_usual_open_the_breaker(usual_s, at_once):
    """Prompts are computed, and their reads cancelled, long before any limit ends a read."""

    async def main():
        circuit = reads(at_once)
        for _ in range(50):
            await answer(circuit, usual_s)
        late_s = max(LATE_S, SLACK * usual_s) * 1.01
        for _ in range(FAILURES - 1):
            await asyncio.gather(*(give_up(circuit, late_s) for _ in range(8)))  # of one prompt
            await give_up(circuit, 0.9 * late_s)
        await answer(circuit, usual_s)
        for _ in range(FAILURES):
            await give_up(circuit, late_s)
        with pytest.raises(StoreUnavailable, match="left alone since timed out: given up after"):
            await answer(circuit, 0.0)

    in_virtual_time(main())


def test_circuit_reads_of_a_server_that_never_answered_open_the_breaker():
    async def main():
        circuit = reads(first_s=20.0, floor_s=2.0)
        for _ in range(FAILURES):
            await give_up(circuit, 1.9)
            await give_up(circuit, 2.1)
        with pytest.raises(StoreUnavailable, match="left alone since timed out: given up after"):
            await answer(circuit, 0.0)

    in_virtual_time(main())


def test_circuit_large_calls_given_up_after_a_small_one_open_the_breaker():
    """As the lookup of a long prompt, after one without keys that took 50 ms."""

    async def main():
        circuit = reads()
        await answer(circuit, 0.05)
        for _ in range(FAILURES):
            await give_up(circuit, 1.9, size_bytes=64_000)
        with pytest.raises(StoreUnavailable, match="left alone since timed out: given up after"):
            await answer(circuit, 0.0)

    in_virtual_time(main())


def test_circuit_read_that_gets_little_of_its_callers_time_counts_as_nothing():
    """The rest of it was spent on another server."""

    async def main():
        circuit = reads(first_s=20.0, floor_s=2.0)
        for _ in range(2 * FAILURES):
            read_until_s.set(asyncio.get_running_loop().time() + 1.0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0), circuit.call(1):
                    await asyncio.Event().wait()
        async with circuit.call(1):
            pass

    in_virtual_time(main())


@pytest.mark.parametrize(("looks_for_corrupt", "opens"), [(True, False), (False, True)])
def test_circuit_corrupt_blocks_in_a_row_open_the_breaker_unless_they_are_looked_for(
    looks_for_corrupt, opens
):
    async def main():
        circuit = reads(looks_for_corrupt=looks_for_corrupt)
        for _ in range(FAILURES):
            with pytest.raises(BlockCorrupt):
                async with circuit.call(1):
                    raise BlockCorrupt("a bit is wrong")
        assert circuit.breaker.is_closed is not opens

    in_virtual_time(main())


def test_circuit_calls_that_transferred_nothing_neither_shorten_nor_reset_its_limits():
    """As puts of blocks that are there, on a link that has become slow."""

    async def main():
        circuit, size_bytes = reads(first_s=20.0), 16 << 20

        async def take(took_s, *, transferred=True):
            async with circuit.call(size_bytes) as call:
                call.transferred = transferred
                await asyncio.sleep(took_s)

        async def find_there():
            for _ in range(40):
                await take(0.001, transferred=False)

        for _ in range(50):
            await take(4.0)
        await find_there()
        await take(4.0)
        lost = 0
        for _ in range(FAILURES):
            await find_there()
            try:
                await take(100.0)
            except RemoteError:
                lost += 1
        assert lost == 2

    in_virtual_time(main())


def test_circuit_probe_without_an_answer_ends_after_the_longest_pause():
    """However long ordinary calls would be waited for by then."""

    async def main():
        circuit = reads(first_s=20.0)
        limits_s = [await call_in_vain(circuit) for _ in range(FAILURES)]
        assert limits_s == pytest.approx([20.0, 40.0, 80.0, 160.0, 320.0])
        pause_s = FIRST_S
        for _ in range(10):
            await asyncio.sleep(pause_s - AFTER_S)
            with pytest.raises(StoreUnavailable, match="left alone"):
                async with circuit.call(1):
                    pass
            await asyncio.sleep(2 * AFTER_S)
            assert await call_in_vain(circuit) == pytest.approx(LAST_S)
            pause_s = min(2 * pause_s, LAST_S)

    assert LAST_S == 60.0
    in_virtual_time(main())


DEPTH = 16


def s3_reads(monkeypatch, clock, waited):
    """A function that reads a block through a store."""
    key, data = key_of("a"), block_of("a")
    framed = bytes(FRAME.header(key, data)) + bytes(data)

    class Body:
        def __init__(self):
            self.rest = framed

        async def read(self, at_most):
            got, self.rest = self.rest[:at_most], self.rest[at_most:]
            return got

        def close(self):
            pass

    class Client:
        meta = SimpleNamespace(events=SimpleNamespace(register=lambda *_: None))

        async def get_object(self, **_):
            await waited()
            return {"Body": Body(), "ContentLength": len(framed)}

    session = SimpleNamespace(create_client=lambda *_, **__: contextlib.nullcontext(Client()))
    monkeypatch.setattr(bucket, "get_session", lambda: session)  # of aiobotocore
    place = S3Place("bucket", endpoint="http://127.0.0.1:1", region="us-east-1")
    store = S3Store(place, FRAME, depth=DEPTH, limits=TimeoutLimits(), clock=clock)
    return lambda: store.get_into(key, memoryview(bytearray(FRAME.payload_bytes)))


def http_reads(monkeypatch, clock, waited):
    store = HttpStore(lambda: Endpoint("http://127.0.0.1:1"), FRAME, depth=DEPTH, clock=clock)
    transport = store.transport
    return lambda: transport.call(transport.reads, FRAME.framed_bytes, waited)


@pytest.mark.parametrize("kind", [s3_reads, http_reads])
def test_reads_that_share_a_slow_link_are_not_late_after_reads_one_by_one(kind, monkeypatch):
    async def main():
        link = SimpleNamespace(s=0.3)

        async def waited():
            await asyncio.sleep(link.s)

        read = kind(monkeypatch, asyncio.get_running_loop().time, waited)
        for _ in range(50):
            await read()
        link.s *= DEPTH
        await asyncio.gather(*(read() for _ in range(DEPTH)))

    in_virtual_time(main())
