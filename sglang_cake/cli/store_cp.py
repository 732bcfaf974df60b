"""`sglang-cake store cp`: copy the blocks that another store lacks."""

import argparse
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_cake.cli.named_stores import (
    BESIDE_ALL_BYTES,
    BESIDE_BLOCK_BYTES,
    DEFAULT_DEPTH,
    SHORT_DIGEST,
    NamedStore,
    blocks_in,
    complain,
    depth,
    for_each,
    one_store,
    opened,
    progress,
    readable,
    refuse_memory,
    run_tool,
    unused_bytes,
    whole_digest,
    with_buffers,
)
from sglang_cake.cli.text_tables import count_text, size_text, table
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, StoreFull
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import run_in_own_thread
from sglang_cake.stores.base import BlockInfo, Store
from sglang_cake.stores.lookup_rounds import EXACT_KEYS

ASK_AT_ONCE = EXACT_KEYS  # for more keys, a store may answer approximately


@dataclass(slots=True)
class Copied:
    """Results of `cp`."""

    copied: int = 0
    copied_bytes: int = 0
    there_already: int = 0
    missing: int = 0  # deleted from the source between listing and reading
    corrupt: int = 0  # in the source, and not copied
    full: bool = False  # the destination would evict blocks for more, or refused a block
    unreadable_namespaces: dict[str, str] = field(default_factory=dict)


def add_cp(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cp",
        help="copy what another store lacks",
        description="Copy every block of FROM that TO lacks. Stopped, it goes on where it was when "
        "it is started again. No block of TO is evicted for that: name a folder with the capacity= "
        "and min_free= that servers give it. `sglang-cake store serve` tells how much room it has. "
        "Exit status 1 if something could not be copied, also if a namespace "
        "could not be read.",
    )
    parser.add_argument("url", metavar="FROM", help="the store to copy from")
    parser.add_argument("to", metavar="TO", help="the store to copy to")
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one")
    parser.add_argument("--depth", type=depth, default=DEFAULT_DEPTH, help="blocks at once")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run_tool(_cp))


async def _cp(args: argparse.Namespace) -> int:
    source, destination = one_store(args.url), one_store(args.to, must_exist=False)
    refuse_memory(destination)
    await run_in_own_thread(destination.source.check)  # makes a missing folder
    result = Copied()
    digest = await whole_digest([source], args.namespace)
    good, result.unreadable_namespaces = await readable(source, digest)
    complain(source, result.unreadable_namespaces)
    for frame, buffers in with_buffers(source, good, args.depth, result.unreadable_namespaces):
        try:
            await _copy(source, destination, frame, buffers, result)
        except StoreFull as error:
            complain(destination, {frame.digest.hex(): str(error)})
            result.full = True
            break
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        heads = ["COPIED", "BYTES", "THERE ALREADY", "MISSING", "CORRUPT"]
        counts = (result.there_already, result.missing, result.corrupt)
        row = [count_text(result.copied), size_text(result.copied_bytes), *map(count_text, counts)]
        print(table(heads, [row], right=range(5)))
    return 1 if result.full or result.corrupt or result.unreadable_namespaces else 0


async def _copy(
    source: NamedStore,
    destination: NamedStore,
    frame: BlockFrame,
    buffers: list[memoryview],
    result: Copied,
) -> None:
    at_once = len(buffers)
    async with (
        opened(source.source, frame, at_once) as origin,
        opened(destination.source, frame, at_once) as there,
    ):
        with progress(f"copying {frame.digest.hex()[:SHORT_DIGEST]}") as bar:

            async def copy(key: BlockKey, worker: int) -> None:
                try:
                    size_bytes = await origin.get_into(key, buffers[worker])
                    fresh = await there.put(key, buffers[worker][:size_bytes])
                except BlockMissing:
                    result.missing += 1
                except BlockCorrupt:
                    result.corrupt += 1
                else:
                    result.copied += fresh
                    result.copied_bytes += HEADER_BYTES + size_bytes if fresh else 0
                    result.there_already += not fresh
                bar.update(1)

            def passed(blocks: int) -> None:
                result.there_already += blocks
                bar.update(blocks)

            async def with_room() -> AsyncIterator[BlockKey]:
                """The blocks to copy, while the destination has room for them."""
                blocks = 0
                async for key in lacking(blocks_in(source, frame), there, passed):
                    if not blocks:
                        unused = unused_bytes(destination, await there.stats()) - BESIDE_ALL_BYTES
                        # Less what other workers may be copying now.
                        fitting = unused / (frame.payload_bytes + BESIDE_BLOCK_BYTES) - at_once + 1
                        if fitting < 1:
                            result.full = True
                            return
                        blocks = int(min(fitting, ASK_AT_ONCE))
                    blocks -= 1
                    yield key

            await for_each(with_room(), copy, at_once)
            if result.full:
                raise StoreFull("no room: more would evict blocks (`store gc --to` makes room)")


async def lacking(
    blocks: AsyncIterator[BlockInfo], destination: Store, passed: Callable[[int], None]
) -> AsyncIterator[BlockKey]:
    """The blocks that `destination` lacks. Args: passed: gets how many it has."""
    batch: list[BlockKey] = []
    async for block in blocks:
        batch.append(block.key)
        if len(batch) == ASK_AT_ONCE:
            for key in await _not_there(destination, batch, passed):
                yield key
            batch = []
    for key in await _not_there(destination, batch, passed):
        yield key


async def _not_there(
    destination: Store, keys: list[BlockKey], passed: Callable[[int], None]
) -> list[BlockKey]:
    there = await destination.contains(keys)
    passed(sum(there))
    return [key for key, found in zip(keys, there, strict=True) if not found]
