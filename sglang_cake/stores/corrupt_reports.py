"""Reports of corrupt blocks to a store below, which go on while the reader computes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreError
from sglang_cake.core.keys import BlockKey

MOST_REPORTS = 16  # under way; the next reader finds any further corrupt block again
REPORT_S = 5.0  # time limit of a report


class CorruptReports:
    """Reports of one store. For one event loop."""

    def __init__(self, report: Callable[[BlockKey], Awaitable[None]]) -> None:
        """Args: report: one block, or deletes it; a StoreError is ignored."""
        self._report = report
        self._under_way: dict[BlockKey, asyncio.Task[None]] = {}

    def among(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """The keys of `keys` that are being reported."""
        return frozenset(keys) & self._under_way.keys()

    @contextlib.contextmanager
    def reading(self, key: BlockKey) -> Iterator[None]:
        """A context for a read. A block that is found corrupt in it is reported.

        Raises: BlockMissing while the block is being reported.
        """
        if key in self._under_way:
            raise BlockMissing(key.hex())
        try:
            yield
        except BlockCorrupt:
            self.begin(key)
            raise

    def begin(self, key: BlockKey) -> None:
        """Report a block in the background, unless MOST_REPORTS are under way."""
        if key not in self._under_way and len(self._under_way) < MOST_REPORTS:
            task = asyncio.ensure_future(self._limited(key))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))

    async def end(self, *keys: BlockKey) -> None:
        """Return when no block of `keys` is being reported, so that a put of it is not undone."""
        if tasks := [self._under_way[key] for key in keys if key in self._under_way]:
            await asyncio.wait(tasks)

    async def end_all(self) -> None:
        """Return when no report is under way, within REPORT_S."""
        await self.end(*self._under_way)

    async def _limited(self, key: BlockKey) -> None:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._report(key)
