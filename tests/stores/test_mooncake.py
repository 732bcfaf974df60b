"""The Mooncake store against a real master and real clients, each a process of its own."""

import asyncio
import dataclasses
import json
import threading

import pytest

try:
    import mooncake.store
except (ImportError, OSError) as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

from filestore import closing
from mooncake_process import FRAME as LARGE_FRAME
from mooncake_process import LAYOUT as LARGE
from mooncake_process import Client, Master, free_ports, how_it_ends
from polling import PATIENCE_S, async_answer, async_until, until
from storetools import refusal_in_new_process, refusal_of, write_key_file
from system_calls import stop_child

from sglang_cake.cli import main
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    StoreFull,
    StoreUnavailable,
)
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.mooncake import mooncake_store
from sglang_cake.stores.mooncake.mooncake_store import HASH_BYTES
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import (
    FRAME,
    NAMESPACE,
    ProgressRecord,
    StoreContract,
    block_of,
    key_of,
    read,
)

A, B = key_of("a"), key_of("b")
# The library is not ours: should it hang, this test fails and not the whole run.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def master():
    master = Master(free_ports(2))
    yield master
    master.kill()


@pytest.fixture
def own_master(request):
    """Believes in a client that hangs for longer than a test of it takes; else a test says for how
    many seconds."""
    master = Master(free_ports(2), client_ttl_s=getattr(request, "param", 15))
    yield master
    master.kill()


@pytest.fixture
def clients():
    started = []
    yield lambda *args: started.append(Client(*args)) or started[-1]
    for client in started:
        client.kill()


def ends(store, name):
    return how_it_ends(store, key_of(name), block_of(name, LARGE))


def name_of(key, frame=FRAME):
    return f"{frame.digest.hex()}/{key.hex()}"


def raw_client(master):
    """What wrote before us may have been anything."""
    client = mooncake.store.MooncakeDistributedStore()
    address = f"127.0.0.1:{master.ports[0]}"
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 2**26, 2**24, "tcp", "", address) == 0
    return client


class Shared:
    """One store for many tests, emptied before each: leaving Mooncake takes it two seconds."""

    def __init__(self, master, options=""):
        self.master, self.store, self.options = master, None, options
        self.frame = FRAME
        self.cleaner = raw_client(master)
        self.runner = asyncio.Runner()

    def run(self, test, frame=FRAME):
        if self.store is not None and frame != self.frame:
            self.close()
        if self.store is None:
            self.store, self.frame = self.master.open(frame, options=self.options), frame
        self.cleaner.remove_all(True)
        self.runner.run(test(self.store))

    def close(self):
        self.runner.run(self.store.close())
        self.store = None


@pytest.fixture(scope="module")
def shared(master):
    shared = Shared(master)
    yield shared
    shared.close()
    shared.cleaner.close()


@pytest.fixture(scope="module")
def sealed(master, tmp_path_factory):
    key_file = write_key_file(tmp_path_factory.mktemp("key"))
    shared = Shared(master, f"&key_file={key_file}")
    yield shared
    shared.close()
    shared.cleaner.close()


class TestMooncakeStore(StoreContract):
    can_list = False

    @pytest.fixture(autouse=True)
    def served(self, shared):
        self.shared = shared

    def run(self, folder, test):
        self.shared.run(test, self.frame)

    def test_store_closed_raises_store_unavailable_on_every_call(self, tmp_path):
        try:
            super().test_store_closed_raises_store_unavailable_on_every_call(tmp_path)
        finally:
            self.shared.close()
            self.shared.run(lambda store: store.contains([]))


class TestSealedMooncakeStore(TestMooncakeStore):
    """With `key_file=`: encrypted before they leave this process."""

    tells_progress = False

    @pytest.fixture(autouse=True)
    def served(self, sealed):
        self.shared = sealed


def test_store_progress_of_a_large_read_grows_piece_by_piece(shared):
    layout = BlockLayout.plain(1, (("kv", (4 * HASH_BYTES,)),), "uint8", 1)

    async def test(store):
        data, out = block_of("a", layout), bytearray(layout.block_bytes)
        await store.put(A, data)
        told = ProgressRecord(out, data)
        await store.get_into(A, memoryview(out), told)
        assert told.wrong == []
        assert told.grew
        assert len(told.counts) >= 4
        assert told.counts[-1] == layout.block_bytes

    shared.run(test, BlockFrame(NAMESPACE, layout))


DAMAGE = {
    "a flipped bit": lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:],
    "cut off": lambda raw: raw[:-1],
    "too long": lambda raw: raw + b"\0",
    "zeros": lambda raw: bytes(len(raw)),
    "another block": lambda raw: FRAME.header(B, block_of("b")) + bytes(block_of("b")),
}


def test_mooncake_store_damaged_block_is_removed_and_can_be_put_again(shared):
    raw, client = FRAME.header(A, block_of("a")) + bytes(block_of("a")), shared.cleaner

    async def test(store):
        for damage in DAMAGE.values():
            assert client.put(name_of(A), damage(raw)) == 0
            with pytest.raises(BlockCorrupt):
                await read(store, A)
            assert await store.put(A, block_of("a")) is True
            assert await read(store, A) == block_of("a")
            assert client.get(name_of(A)) == raw
            await store.delete(A)

    shared.run(test)


async def test_mooncake_store_full_raises_store_full_and_goes_on_reading(own_master):
    patience_s = 60.0  # also for the last one in the queue
    store = own_master.open(LARGE_FRAME, segment="16MiB", depth=2, patience_s=patience_s)
    async with closing(store):
        data, names = block_of("large", LARGE), range(600)  # 150 MiB into 16 MiB
        puts = await asyncio.gather(
            *(store.put(key_of(name), data) for name in names), return_exceptions=True
        )
        assert {type(answer) for answer in puts} == {bool, StoreFull}
        reads = [await how_it_ends(store, key_of(name), data) for name in names]
        assert set(reads) <= {"right", "BlockMissing"}


@pytest.mark.parametrize("own_master", [5], indirect=True)
def test_mooncake_store_blocks_of_a_killed_writer_become_missing(own_master, clients):
    writer = clients(own_master)
    reader = clients(own_master, "0")
    assert writer.ask("put 12") == ["True"] * 12
    assert writer.ask("put 12") == ["False"] * 12
    assert reader.ask("read 12") == ["right"] * 12
    writer.kill()
    assert set(reader.ask("read 12")) <= {"BlockMissing", "StoreUnavailable"}
    until(lambda: reader.ask("read 12") == ["BlockMissing"] * 12, "the master notices")
    assert clients(own_master).ask("put 12") == ["True"] * 12
    assert reader.ask("read 12") == ["right"] * 12


async def test_mooncake_store_peer_killed_during_reads_gives_misses_or_errors(own_master, clients):
    writer = clients(own_master)
    assert writer.ask("put 40") == ["True"] * 40
    async with closing(own_master.open(LARGE_FRAME, segment="0", patience_s=60.0)) as store:
        right = 0

        async def read_until_it_fails(name):
            nonlocal right
            while (end := await ends(store, name % 40)) == "right":
                right, name = right + 1, name + 1
            return end

        readers = [asyncio.create_task(read_until_it_fails(10 * n)) for n in range(4)]
        while right < 40:  # all are well under way
            await asyncio.wait(readers, timeout=0.01)
        writer.kill()
        assert set(await asyncio.gather(*readers)) <= {"BlockMissing", "StoreUnavailable"}


async def test_mooncake_store_hung_peer_times_out_and_the_loop_runs_on(own_master, clients):
    writer = clients(own_master)
    assert writer.ask("put 4") == ["True"] * 4
    patience_s = 60.0  # to join and to read once
    store = own_master.open(LARGE_FRAME, segment="0", depth=2, patience_s=patience_s)
    async with closing(store):
        assert await ends(store, 0) == "right"
        store.reads.patience_s = 1.0
        stop_child(writer.process.pid)
        out = bytearray(LARGE.block_bytes)
        hanging = asyncio.create_task(store.get_into(key_of(1), memoryview(out)))
        ticks = 0
        while not hanging.done():  # the library lets go of the GIL, or this would not get far
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
            await hanging
        assert ticks > 3
        store.reads.patience_s = 60.0  # it is to be cancelled, not late
        while store.reads.abandoned < 2:  # one is not, if it is cancelled before it has a thread
            cancelled = asyncio.create_task(store.get_into(key_of(2), memoryview(out)))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.wait((cancelled,))
            assert cancelled.cancelled()
        store.reads.patience_s = 1.0
        # Both threads hang: soon no further call waits for them, and other things go on.
        # The first one may wait until the second thread is late as well.
        for said in ("no answer within 1 s|2 calls wait", "2 calls wait"):
            with pytest.raises(StoreUnavailable, match=said):
                await read(store, key_of(3), LARGE)
        assert await store.contains([key_of("never")]) == [False]
        writer.kill()  # lets the threads go
        await async_until(lambda: not store.reads.abandoned)
        assert not any(out), "written after the call had returned"


async def test_mooncake_store_killed_master_is_unavailable_until_restarted(own_master):
    async with closing(own_master.open(LARGE_FRAME)) as store:
        await store.put(A, block_of("a", LARGE))
        own_master.kill()
        calls = (
            store.contains([A]),
            read(store, A, LARGE),
            store.put(B, block_of("b", LARGE)),
            store.delete(A),
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        own_master.__init__(own_master.ports)

        async def put_and_read():
            await store.put(A, block_of("a", LARGE))  # it is full without the segment it lends
            return await read(store, A, LARGE)

        assert await async_answer(put_and_read) == block_of("a", LARGE)


async def test_mooncake_store_absent_master_is_unavailable_until_started():
    ports = free_ports(2)
    (source,) = parse_sources(f"mooncake://127.0.0.1:{ports[0]}?segment=64MB")
    source.check()
    async with closing(dataclasses.replace(source, retry_s=0.0).open(FRAME, depth=1)) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=f"master at 127.0.0.1:{ports[0]}"):
                await store.contains([A])
        master = Master(ports)
        try:
            assert await store.put(A, block_of("a")) is True
            assert await read(store, A) == block_of("a")
            await store.close()
        finally:
            master.kill()


async def test_mooncake_store_close_does_not_wait_for_a_setup_that_hangs(monkeypatch):
    go, left = threading.Event(), threading.Event()

    class HungClient:
        def __init__(self, place, memory):
            go.wait(PATIENCE_S)

        def close(self):
            left.set()

    monkeypatch.setattr(mooncake_store, "MooncakeClient", HungClient)
    (source,) = parse_sources("mooncake://127.0.0.1:1")
    store = dataclasses.replace(source, patience_s=0.01).open(FRAME, depth=1)
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.contains([A])
        closing = asyncio.create_task(store.close())
        await asyncio.wait((closing,), timeout=30)
        assert closing.done()
        assert not left.is_set()
    finally:
        go.set()
    await async_until(left.is_set)


async def test_mooncake_store_cancelled_call_leaves_its_buffers_alone(master):
    async def how_it_is(store, key):
        try:
            return await read(store, key, LARGE)
        except BlockMissing:
            return None

    async with closing(master.open(LARGE_FRAME)) as store:
        data = block_of("large", LARGE)
        await store.put(A, data)
        for turns in range(12):
            key, out, given = key_of(turns), bytearray(LARGE.block_bytes), bytearray(data)
            calls = [
                asyncio.create_task(store.get_into(A, memoryview(out))),
                asyncio.create_task(store.put(key, memoryview(given))),
            ]
            await asyncio.sleep(turns * 0.0002)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            out[:], given[:] = bytes(len(out)), bytes(len(given))
            assert await read(store, A, LARGE) == data
            assert await how_it_is(store, key) in (data, None)
            assert not any(out)


def test_store_bench_of_a_mooncake_store_measures_without_listing(master, capfd):
    command = ["store", "bench", master.url(), "--sizes", "64KiB", "--depths", "4"]
    assert main([*command, "--bytes", "512KiB", "--json"]) == 0
    runs = json.loads(capfd.readouterr().out.splitlines()[-1])["runs"]
    assert [run["depth"] for run in runs] == [4]
    assert all(run["read_bytes_per_s"] > 0 for run in runs)


async def test_mooncake_store_listing_raises_store_unavailable(master):
    async with closing(master.open(FRAME)) as store:
        with pytest.raises(StoreUnavailable, match="cannot list"):
            await anext(store.list_blocks())
    (source,) = parse_sources(master.url())
    with pytest.raises(StoreUnavailable, match="cannot list"):
        await source.namespaces()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            "sys.modules['mooncake'] = None",
            "needs mooncake-transfer-engine: pip install 'sglang-cake[mooncake]'",
        ),
        (
            "import importlib.abc\n"
            "class NoLibrary(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            "        if name == 'mooncake.store':\n"
            "            raise ImportError('libibverbs.so.1: cannot open shared object file')\n"
            "sys.meta_path.insert(0, NoLibrary())",
            "Mooncake cannot be loaded (libibverbs.so.1: cannot open shared object file); "
            "on Debian or Ubuntu: apt-get install libibverbs1 libnuma1",
        ),
    ],
)
def test_mooncake_url_without_its_library_is_one_error_line(broken, said):
    url = "mooncake://host:50051"
    assert refusal_in_new_process(url, broken) == f"store URL '{url}': {said}\n"


def test_store_url_valid_text_is_parsed_into_its_source():
    (source,) = parse_sources("mooncake://kv-master:50051")
    place = source.place
    assert (place.host, place.port, place.segment_bytes) == ("kv-master", 50051, 4 * 10**9)
    assert (place.protocol, place.device, place.metadata) == ("tcp", "", "P2PHANDSHAKE")
    assert place.local_hostname is None
    (source,) = parse_sources(
        "mooncake://[::1]:1?segment=0&protocol=rdma&device=mlx5_0%2Cmlx5_1"
        "&local_hostname=10.0.0.7&metadata=http://10.0.0.1:8080/metadata"
    )
    place = source.place
    assert (place.host, place.port, place.segment_bytes) == ("::1", 1, 0)
    assert (place.protocol, place.device) == ("rdma", "mlx5_0,mlx5_1")
    assert (place.local_hostname, place.metadata) == ("10.0.0.7", "http://10.0.0.1:8080/metadata")


BAD_URLS = {
    "mooncake://": "'' is not a master, write mooncake://host:50051",
    "mooncake://host": "'host' is not a master",
    "mooncake://host:0": "'host:0' is not a master",
    "mooncake://host:65536": "'host:65536' is not a master",
    "mooncake://host:50051/kv": "'host:50051/kv' is not a master",
    "mooncake://host:50051?segment=4": "'segment': '4' is too little: lend at least 16MiB",
    "mooncake://host:50051?segment=lots": "'segment': 'lots' is not a size",
    "mooncake://host:50051?protocol=udp": "'protocol': 'udp' is not possible, allowed: tcp, rdma",
    "mooncake://host:50051?metadata=here": "'metadata': 'here' is not possible",
    "mooncake://host:50051?device=a b": "'device': 'a b' is not possible",
    "mooncake://host:50051?capacity=1GB": "'capacity': unknown key",
}


@pytest.mark.parametrize("text", BAD_URLS)
def test_store_url_invalid_text_is_one_config_error_line(text):
    assert BAD_URLS[text] in refusal_of(text)
