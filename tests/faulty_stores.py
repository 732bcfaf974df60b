"""Test doubles around a real store. None of them ever sleeps."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import BlockMissing, StoreError
from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.base import BlockInfo, Store, StoreStats, WrapperStore


class SlowStore(WrapperStore):
    """Every read waits until the test releases it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.waiting: list[BlockKey] = []  # reads that were not released, oldest first
        self._gates: dict[BlockKey, asyncio.Event] = {}
        self._changed = asyncio.Event()

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """A cancelled read is removed from `waiting`."""
        self.waiting.append(key)
        self._changed.set()
        try:
            await self._gate(key).wait()
        finally:
            self.waiting.remove(key)
        return await self.inner.get_into(key, out, progress)

    async def until_waiting(self, count: int) -> None:
        """Return once at least `count` reads wait."""
        while len(self.waiting) < count:
            self._changed.clear()
            await self._changed.wait()

    def release(self, *keys: BlockKey) -> None:
        """Release all waiting and all later reads of `keys`."""
        for key in keys:
            self._gate(key).set()

    def _gate(self, key: BlockKey) -> asyncio.Event:
        return self._gates.setdefault(key, asyncio.Event())


class HeldDeletes(WrapperStore):
    """Every delete waits until the test sets `go`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def delete(self, key: BlockKey) -> None:
        self.begun.set()
        await self.go.wait()
        await self.inner.delete(key)


class FaultyStore(WrapperStore):
    """Fails for chosen keys."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._errors: dict[BlockKey, StoreError] = {}
        self._flipped: set[BlockKey] = set()
        self._lost: set[BlockKey] = set()

    def fail(self, key: BlockKey, error: StoreError) -> None:
        """Let reads and puts of `key` raise `error`; a failed read leaves garbage in `out`."""
        self._errors[key] = error

    def lose(self, key: BlockKey) -> None:
        """Let reads of `key` raise BlockMissing, as after an eviction; `contains` stays true."""
        self._lost.add(key)

    def flip(self, key: BlockKey) -> None:
        """Let reads of `key` return with one wrong bit, without an error.

        No store may do that. A test uses it to show that it would notice.
        """
        self._flipped.add(key)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        view = out.cast("B")
        error = BlockMissing(key.hex()) if key in self._lost else self._errors.get(key)
        if error is not None:
            view[:] = b"\xa5" * len(view)  # `out` is undefined after an error
            raise error
        size_bytes = await self.inner.get_into(key, out, progress)
        if key in self._flipped:
            view[size_bytes // 2] ^= 1
        return size_bytes

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        if key in self._errors:
            raise self._errors[key]
        return await self.inner.put(key, data)


class RecordingStore(WrapperStore):
    """Records every call, in order."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, BlockKey]] = []  # ("contains" | "get" | "put" | "delete", key)

    def keys_of(self, call: str) -> list[BlockKey]:
        """The keys of all calls of that name, in order."""
        return [key for name, key in self.calls if name == call]

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.calls += [("contains", key) for key in keys]
        return await super().contains(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        self.calls.append(("get", key))
        return await super().get_into(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        self.calls.append(("put", key))
        return await super().put(key, data)

    async def delete(self, key: BlockKey) -> None:
        self.calls.append(("delete", key))
        await super().delete(key)


class OutageStore(WrapperStore):
    """Every call fails while `error` is set, and never returns while `hangs` is true."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.error: Exception | None = None
        self.hangs = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        await self._outage()
        return await super().contains(keys)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        await self._outage()
        return await super().get_into(key, out, progress)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        await self._outage()
        return await super().put(key, data)

    async def delete(self, key: BlockKey) -> None:
        await self._outage()
        await super().delete(key)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        await self._outage()
        async for block in self.inner.list_blocks():
            yield block

    async def stats(self) -> StoreStats:
        await self._outage()
        return await super().stats()

    async def _outage(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # each raise adds to it, and logs print it all
        if self.hangs:
            await asyncio.get_running_loop().create_future()
