"""Random calls: a store answers as a dict would."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_cake.core.errors import BlockMissing
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

NAMES = st.integers(0, 5)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = self.open()
        self.model = {}

    def call(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    @rule(name=NAMES)
    def put(self, name):
        fresh = self.call(self.store.put(key_of(name), block_of(name)))
        assert fresh == (name not in self.model)
        self.model[name] = bytes(block_of(name))

    @rule(name=NAMES)
    def get(self, name):
        if name in self.model:
            assert self.call(read(self.store, key_of(name))) == self.model[name]
        else:
            with pytest.raises(BlockMissing):
                self.call(read(self.store, key_of(name)))

    @rule(name=NAMES)
    def delete(self, name):
        self.call(self.store.delete(key_of(name)))
        self.model.pop(name, None)

    @rule(name=NAMES, ticks=st.integers(0, 3))
    def cancelled_put(self, name, ticks):
        async def start_and_cancel():
            task = asyncio.create_task(self.store.put(key_of(name), block_of(name)))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return (await self.store.contains([key_of(name)]))[0]

        if self.call(start_and_cancel()):  # the whole block, which later reads check, or nothing
            self.model[name] = bytes(block_of(name))
        else:
            assert name not in self.model

    @rule()
    def reopen(self):
        self.store = self.reopened()

    @invariant()
    def contains_what_the_model_has(self):
        keys = [key_of(name) for name in range(6)]
        assert self.call(self.store.contains(keys)) == [name in self.model for name in range(6)]

    def teardown(self):
        self.call(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class MemoryMachine(Machine):
    def open(self):
        return MemoryStore()

    def reopened(self):
        return self.store


class FileMachine(Machine):
    def open(self):
        if not hasattr(self, "folder"):
            self.folder = tempfile.TemporaryDirectory()
        folder = BlockFolder(FolderSettings(Path(self.folder.name), min_free_bytes=0))
        return FileStore(folder, FRAME, threads=1)

    def reopened(self):
        self.call(self.store.close())
        return self.open()

    def teardown(self):
        super().teardown()
        self.folder.cleanup()


class HostMemoryMachine(Machine):
    """Opened again while it is open, it is the same memory; closed, it is gone."""

    def open(self):
        (source,) = parse_sources("memory://1MB")
        return source.open(FRAME, depth=1)

    def reopened(self):
        store = self.open()
        self.call(self.store.close())
        return store

    @rule()
    def close_and_open(self):
        self.call(self.store.close())
        self.model = {}
        self.store = self.open()


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = SETTINGS
TestHostMemoryMachine = HostMemoryMachine.TestCase
TestHostMemoryMachine.settings = SETTINGS
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = SETTINGS
