"""What may be wrong between a server and a remote store: for each fault what calls end with, what
comes of a load, what is counted, and what the operator reads. HTTP and S3, real servers."""

import asyncio
import itertools
from array import array
from dataclasses import dataclass

import pytest
from filestore import closing
from http_servers import OurServer, own_token
from moto_process import moto
from test_s3 import credentials  # noqa: F401 - a fixture

from benchmarks.harness.fault_proxy import FAULTS, READ_METHODS, FaultProxy
from sglang_cake.core.buffers import Buffer, BufferPool, on_page
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockMissing, StoreError, StoreUnavailable
from sglang_cake.core.keys import KeyChain, KeySeed
from sglang_cake.core.threads import IoThread
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.loader import Fetched, Loader, LoadRequest, LookedUp, Lost
from sglang_cake.stores.circuit_breaker import (
    FAILURES,
    FIRST_S,
    LAST_S,
    AdaptiveTimeout,
    Fault,
    TimeoutLimits,
)
from sglang_cake.stores.http.http_store import HttpStore
from sglang_cake.stores.http.http_transport import Endpoint
from sglang_cake.stores.s3.bucket import S3Place
from sglang_cake.stores.s3.s3_store import S3Store
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read

BLOCKS = 12
TOKENS = array("q", range(BLOCKS * LAYOUT.block_tokens))
KEYS = KeyChain(KeySeed(FRAME.digest), LAYOUT.block_tokens).of(TOKENS)
WAIT_S = 60.0
PATIENT = TimeoutLimits(WAIT_S, WAIT_S)
IMPATIENT = TimeoutLimits(0.1, 0.1, 0.2)  # where the fault is that a call takes too long

# What a fault of every read is counted as, and called in the log.
READS = {
    "refused": Fault.DISCONNECTS,
    "reset": Fault.DISCONNECTS,
    "reset halfway": Fault.DISCONNECTS,
    "truncated": Fault.DISCONNECTS,
    "silent": Fault.TIMEOUTS,
    "stalled": Fault.TIMEOUTS,
    "trickling": Fault.TIMEOUTS,
    "late": Fault.TIMEOUTS,
    "slow headers": Fault.TIMEOUTS,
    "endless headers": Fault.DISCONNECTS,
    "endless body": Fault.CORRUPT,
    "500, endless body": Fault.STATUSES,
    "length of 100 GiB": Fault.CORRUPT,
    "a byte too long": Fault.CORRUPT,
    "a byte too short": Fault.CORRUPT,
    "a flipped bit": Fault.CORRUPT,
    "another block": Fault.CORRUPT,
    "500": Fault.STATUSES,
    "503": Fault.STATUSES,
    "503, Retry-After 3600": Fault.STATUSES,
    "403": Fault.FORBIDDEN,
    "no such bucket": Fault.STATUSES,
    "redirect": Fault.REDIRECTS,
}
# Of those, the ones that a put can tell apart: its answer has no body that is read.
PUTS = (
    *("refused", "reset", "silent", "late", "slow headers", "endless headers", "a flipped bit"),
    *("500", "503, Retry-After 3600", "403", "no such bucket", "redirect"),
)
# And those that a prompt can tell apart, whose loads they end midway.
MIDWAY = (
    *("refused", "reset halfway", "truncated", "stalled", "late", "endless body"),
    *("a byte too short", "a flipped bit", "another block", "503", "403", "redirect"),
)
# Every fault of HTTP, and those of S3 that boto3 handles, one of each kind.
OF_S3 = {*PUTS} - {"late", "slow headers", "500"}
CASES, PUT_CASES = (
    [("http", fault) for fault in faults]
    + [
        pytest.param("s3", fault, marks=[pytest.mark.breadth] * (fault not in OF_S3))
        for fault in faults
    ]
    for faults in (READS, PUTS)
)
MIDWAY_CASES = [("http", fault) for fault in MIDWAY] + [
    pytest.param("s3", fault, marks=[pytest.mark.breadth] * (fault in PUTS)) for fault in MIDWAY
]
# HTTP has a 404 for a block that is not there; S3 reads nothing without a length.
OF_KIND = {
    ("http", "no such bucket"): None,
    ("s3", "endless body"): Fault.ERRORS,
    ("s3", "500, endless body"): Fault.ERRORS,
}


def test_remote_fault_table_covers_every_fault():
    assert {*READS} == {*FAULTS}


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@dataclass
class StoreBehindProxy:
    """A store with BLOCKS blocks, behind a proxy."""

    kind: str
    proxy: FaultProxy
    bucket: str
    is_spoiled: bool = False

    def opened(self, clock, patience=PATIENT):
        """A client."""
        base = f"http://127.0.0.1:{self.proxy.port}"
        if self.kind == "http":
            endpoint = Endpoint(base, own_token())
            return HttpStore(lambda: endpoint, FRAME, depth=2, limits=patience, clock=clock)
        place = S3Place(self.bucket, endpoint=base, region="us-east-1")
        return S3Store(place, FRAME, depth=2, limits=patience, clock=clock)

    def patience(self, fault):
        return IMPATIENT if READS[fault] is Fault.TIMEOUTS else PATIENT

    def expected(self, fault):
        return OF_KIND.get((self.kind, fault), READS[fault])

    def begin(self, fault, methods=READ_METHODS, spare=0):
        self.is_spoiled = True
        self.proxy.spoil(FAULTS[fault], methods=methods, spare=spare)

    def end(self):
        self.proxy.spoil(None)
        self.is_spoiled = False


@pytest.fixture(scope="module")
def http_server(tmp_path_factory):
    with OurServer(tmp_path_factory.mktemp("faults") / "root") as server:
        yield server.port, lambda: ""


@pytest.fixture(scope="module")
def s3_server():
    with moto() as server:
        yield server.port, server.make_bucket


# A fixture that is parametrized together with a plain argument lives for one test, whatever its
# scope: so this one, and not the servers.
@pytest.fixture(params=["http", "s3"])
def served(request, http_server, s3_server):
    """The kind of a server, its port, and what makes a bucket."""
    return request.param, *(http_server if request.param == "http" else s3_server)


@pytest.fixture
async def remote(served, monkeypatch):
    kind, port, make_bucket = served
    # Waits before a request is tried again are nobody's outcome. Only the server says how long.
    monkeypatch.setattr("sglang_cake.stores.http.http_transport.MAX_RETRY_AFTER_S", 0.0)
    backoff = "botocore.retries.standard.ExponentialBackoff.delay_amount"
    monkeypatch.setattr(backoff, lambda self, context: 0.0)
    proxy = FaultProxy(port, trickle_s=0.01)
    remote = StoreBehindProxy(kind, proxy, make_bucket())
    usual = AdaptiveTimeout.timeout_s

    def timeout_s(limit, size_bytes):
        """Only a fault is to be too late for IMPATIENT: a busy machine may be as well."""
        return usual(limit, size_bytes) if remote.is_spoiled else WAIT_S

    monkeypatch.setattr(AdaptiveTimeout, "timeout_s", timeout_s)
    async with closing(remote.opened(Clock())) as store:
        for number, key in enumerate(KEYS):
            await store.put(key, block_of(number))
        assert await read(store, KEYS[0]) == block_of(0)  # comes in the place of another block
    try:
        yield remote
    finally:
        proxy.close()


async def outcome(call):
    try:
        return await call
    except StoreError as error:
        return error


def lines_in(caplog):
    return [record.message for record in caplog.records if record.name.endswith("circuit_breaker")]


@pytest.mark.parametrize(("served", "fault"), CASES, indirect=["served"])
async def test_remote_store_reads_under_a_fault_are_errors_and_logged(remote, fault, caplog):
    expected, clock = remote.expected(fault), Clock()
    async with closing(remote.opened(clock, remote.patience(fault))) as store:
        remote.begin(fault)
        for number in range(1, FAILURES + 3):
            assert isinstance(await outcome(read(store, KEYS[number])), StoreError)
        events = store.events()
        remote.end()
        # S3 deletes what came corrupt.
        until_right = await outcome(store.put(KEYS[2], block_of(2)))
        while until_right != block_of(2):
            clock.now_s += LAST_S
            await outcome(store.put(KEYS[2], block_of(2)))
            until_right = await outcome(read(store, KEYS[2]))
    lines = lines_in(caplog)
    assert "secret" not in caplog.text
    assert "signature" not in caplog.text
    assert {kind for kind in Fault if events[kind.name.lower()]} == {expected} - {None}
    if expected in (None, Fault.FORBIDDEN):
        assert events["breaker_openings"] == events["failures"] == events["refused"] == 0
        assert ["reads are forbidden" in line for line in lines] == [True] * (expected is not None)
        return
    assert events["breaker_openings"] == 1
    assert events["failures"] == FAILURES
    assert events["refused"] >= 2
    began, ended = lines
    assert f"reads fail ({expected}: " in began
    assert f"one is tried every {FIRST_S:.0f} to {LAST_S:.0f} s" in began
    assert "reads work again after" in ended
    for line in lines:
        assert f"127.0.0.1:{remote.proxy.port}" in line


@pytest.mark.parametrize("fault", ["reset", "silent", "503"])
async def test_remote_store_lookup_behind_an_open_breaker_is_its_probe(remote, fault):
    """Of the requests of a lookup one is the probe, and the others fail at once."""
    clock = Clock()
    async with closing(remote.opened(clock, remote.patience(fault))) as store:
        remote.begin(fault, methods=None)
        for _ in range(FAILURES):
            assert isinstance(await outcome(store.contains(KEYS)), StoreUnavailable)
        assert store.events()["breaker_openings"] == 1
        assert isinstance(await outcome(store.contains(KEYS)), StoreUnavailable)
        remote.end()
        while await outcome(store.contains(KEYS)) != [True] * BLOCKS:
            clock.now_s += LAST_S
            assert clock.now_s < 20 * LAST_S


@pytest.mark.parametrize(("served", "fault"), MIDWAY_CASES, indirect=["served"])
def test_loader_remote_fault_midway_lands_only_right_blocks(remote, fault):
    clock = Clock()
    store = remote.opened(clock, remote.patience(fault))
    io, counters = IoThread(), Counters()
    pool = BufferPool([Buffer(on_page(LAYOUT.block_bytes)) for _ in range(BLOCKS)])
    prior = LoadCost(0.0, 1.0, depth=2)
    loader = Loader(store, pool, io, counters, depths=[2], prior=prior, least_limit_s=WAIT_S)

    def worth(stored, cost):
        assert all(stored)
        remote.begin(fault, spare=BLOCKS // 2)
        return True

    chain = KeyChain(KeySeed(FRAME.digest), LAYOUT.block_tokens)

    def loaded(rid):
        """Events of a load; None: the lookup was not answered in time."""
        loader.begin(LoadRequest(rid, chain, TOKENS, BLOCKS, 0, worth))
        events = []
        while sum(isinstance(event, Fetched | Lost) for event in events) < BLOCKS:
            events += loader.drain()
            if any(isinstance(event, LookedUp) and not any(event.stored) for event in events):
                loader.cancel(rid)
                return None
            io.run(asyncio.sleep(0.001), WAIT_S)
        return events

    try:
        tries = itertools.count()
        while (events := loaded(f"rid{next(tries)}")) is None:
            clock.now_s += LAST_S
        landed = [event for event in events if isinstance(event, Fetched)]
        lost = [event for event in events if isinstance(event, Lost)]
        for event in landed:
            assert event.host_block.buffer.view == block_of(event.block)
        assert {event.block for event in (*landed, *lost)} == set(range(BLOCKS))
        # What comes in place of all others is block 0 itself.
        assert len(landed) <= BLOCKS // 2 + (fault == "another block")
        if remote.patience(fault) is PATIENT:
            # A fault of the connection may hit the block before, too.
            assert len(landed) >= BLOCKS // 2 - 1
        expected = remote.expected(fault)
        # Once the breaker is open, nothing is asked any more.
        reasons = {Fault.CORRUPT: {"corrupt", "unavailable"}, None: {"missing"}}
        # One read that is late gives up all that the prompt had still to load.
        reasons[Fault.TIMEOUTS] = {"late"}
        assert {event.reason for event in lost} <= reasons.get(expected, {"unavailable"})
        failures = {
            label: n
            for (name, label), n in counters.snapshot().items()
            if name == "load_failures" and label != "lookup"
        }
        assert 0 < sum(failures.values()) <= len(lost)
        for event in landed:
            event.host_block.release(used=True)
    finally:
        loader.close()
        io.run(store.close(), WAIT_S)
        io.close()
    assert pool.free == BLOCKS


@pytest.mark.parametrize(("served", "fault"), PUT_CASES, indirect=["served"])
async def test_remote_store_puts_under_a_fault_store_whole_blocks_or_none(remote, fault, caplog):
    names = [f"{fault} {n}" for n in range(2 * FAILURES)]
    more = {key_of(name): block_of(name) for name in names}
    async with closing(remote.opened(Clock(), IMPATIENT)) as store:
        remote.begin(fault, methods=None)
        asked = await outcome(store.contains([*KEYS[:2], *more]))
        puts = [await outcome(store.put(key, block)) for key, block in more.items()]
        remote.end()
        assert isinstance(asked, list | StoreUnavailable)
        assert all(isinstance(put, bool | StoreUnavailable) for put in puts)
    async with closing(remote.opened(Clock())) as store:
        for (key, block), put in zip(more.items(), puts, strict=True):
            got = await outcome(read(store, key))
            assert got == block or isinstance(got, BlockMissing)
            assert put is not True or got == block
    # An answer to a put has nothing in it that could be corrupt.
    if remote.expected(fault) not in (None, Fault.CORRUPT):
        assert all(isinstance(put, StoreUnavailable) for put in puts)
        words = ("lookups fail", "writes fail", "descriptions fail", "forbidden")
        assert any(word in line for line in lines_in(caplog) for word in words)
