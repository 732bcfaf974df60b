"""Every store passes the shipped contract, alone and under the shipped fakes."""

from faulty_stores import FaultyStore, RecordingStore

from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.stores.throttled import ThrottledStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, StoreContract, block_of, key_of


class TestMemoryStore(StoreContract):
    def open(self, folder):
        return MemoryStore()


class TestFileStore(StoreContract):
    options = ""
    depth = 2

    def open(self, folder):
        sources = parse_sources(f"file://{folder}/kv?min_free=0{self.options}")
        return sources[0].open(self.frame, depth=self.depth)


class TestFileStoreSyncedOneThread(TestFileStore):
    options = "&fsync=data"
    depth = 1


class TestPacedFileStore(TestFileStore):
    options = "&bandwidth=100GB/s"

    def open(self, folder):
        store = super().open(folder)
        assert isinstance(store, ThrottledStore)
        return store


class TestHostMemoryStore(StoreContract):
    options = ""

    def open(self, folder):
        sources = parse_sources(f"memory://1MB{self.options}")
        return open_store(sources, self.frame, depth=2)


class TestPacedHostMemoryStore(TestHostMemoryStore):
    options = "?bandwidth=100GB/s"


class TestFaultyStoreWithoutFaults(StoreContract):
    def open(self, folder):
        return FaultyStore(MemoryStore())


class TestRecordingStore(StoreContract):
    def open(self, folder):
        return RecordingStore(MemoryStore())


async def test_recording_store_names_calls_in_order():
    store = RecordingStore(MemoryStore())
    await store.put(key_of("a"), block_of("a"))
    await store.contains([key_of("a"), key_of("b")])
    await store.get_into(key_of("a"), memoryview(bytearray(LAYOUT.block_bytes)))
    await store.delete(key_of("a"))
    assert [call for call, _ in store.calls] == ["put", "contains", "contains", "get", "delete"]
    assert store.keys_of("contains") == [key_of("a"), key_of("b")]


async def test_open_store_without_bandwidth_is_the_bare_file_store(tmp_path):
    (source,) = parse_sources(f"file://{tmp_path}/kv")
    store = source.open(FRAME, depth=1)
    assert isinstance(store, FileStore)
    await store.close()
