"""`sglang-cake store verify`, `gc` and `clear`: maintenance of a store, also while it is used."""

import argparse
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_cake.cli.named_stores import (
    DEFAULT_DEPTH,
    NamedStore,
    add_url_and_json,
    blocks_in,
    checked,
    complain,
    depth,
    for_each,
    named_stores,
    opened,
    progress,
    readable,
    run_tool,
    stats_of,
    whole_digest,
    with_buffers,
)
from sglang_cake.cli.text_tables import count_text, size_text, table
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, ConfigError, StoreUnavailable
from sglang_cake.core.keys import Digest
from sglang_cake.core.threads import run_in_own_thread
from sglang_cake.stores.base import BlockInfo
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.url import parse_size

MAX_CORRUPT_NAMED = 100  # keys in a report
MOST_HELD = 500_000  # blocks that `gc` holds in memory, about 240 bytes each, and twice so many


@dataclass(slots=True)
class Verified:
    """Results of `verify` for one store."""

    url: str
    ok: int = 0
    ok_bytes: int = 0
    missing: int = 0  # evicted or deleted between listing and reading
    corrupt: int = 0
    unanswered: int = 0
    corrupt_blocks: list[str] = field(default_factory=list)  # NAMESPACE/KEY
    unreadable_namespaces: dict[str, str] = field(default_factory=dict)


def add_verify(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="read and check every block",
        description="Read and check every block. Corrupt ones are set aside, as when a server "
        "finds them. Exit status 1 if there was one, or if a block or a namespace could not be "
        "read.",
    )
    add_url_and_json(parser, run_tool(_verify))
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one")
    parser.add_argument("--depth", type=depth, default=DEFAULT_DEPTH, help="reads at once")


def add_gc(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "gc",
        help="remove what is of no use, and shrink a store",
        description="Remove what killed writers left behind and what was set aside as corrupt "
        "(file stores), and with --to the least recently used blocks. Exit status 1 if more than "
        "that is used at the end, or if a namespace could not be read.",
    )
    add_url_and_json(parser, run_tool(_gc))
    parser.add_argument("--to", metavar="SIZE", help="evict until no more is used, e.g. 100GB")


def add_clear(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "clear",
        help="delete all blocks",
        description="Delete all blocks of a store, in a file store also corrupt ones that were set "
        "aside, and namespaces that cannot be read. Exit status 1 if a namespace could not be "
        "deleted since it cannot be read.",
    )
    add_url_and_json(parser, run_tool(_clear))
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one")
    parser.add_argument("--yes", action="store_true", help="do not ask")


# ---- verify ----


async def _verify(args: argparse.Namespace) -> int:
    results = []
    stores = named_stores(args.url)
    digest = await whole_digest(stores, args.namespace)
    for named in stores:
        result = Verified(named.url)
        good, result.unreadable_namespaces = await readable(named, digest)
        complain(named, result.unreadable_namespaces)
        with progress("verifying") as bar:
            unreadable = result.unreadable_namespaces
            for frame, buffers in with_buffers(named, good, args.depth, unreadable):
                await _verify_namespace(named, frame, buffers, result, bar)
        results.append(result)
    if args.json:
        print(json.dumps({"stores": [asdict(result) for result in results]}))
    else:
        heads = ["STORE", "OK", "BYTES", "MISSING", "CORRUPT", "UNANSWERED"]
        rows = [
            [
                r.url,
                count_text(r.ok),
                size_text(r.ok_bytes),
                count_text(r.missing),
                count_text(r.corrupt),
                count_text(r.unanswered),
            ]
            for r in results
        ]
        print(table(heads, rows, right=range(1, 6)))
        for result in results:
            for name in result.corrupt_blocks:
                print(f"corrupt: {name}")
    bad = (r.corrupt or r.unanswered or r.unreadable_namespaces for r in results)
    return 1 if any(bad) else 0


async def _verify_namespace(
    named: NamedStore, frame: BlockFrame, buffers: list[memoryview], result: Verified, bar: Any
) -> None:
    async with opened(named.source, frame, len(buffers)) as store:

        async def check(block: BlockInfo, worker: int) -> None:
            try:
                await store.get_into(block.key, buffers[worker])
            except BlockMissing:
                result.missing += 1
            except BlockCorrupt:
                result.corrupt += 1
                if len(result.corrupt_blocks) < MAX_CORRUPT_NAMED:
                    result.corrupt_blocks.append(f"{frame.digest.hex()}/{block.key.hex()}")
            except StoreUnavailable:
                result.unanswered += 1
            else:
                result.ok += 1
                result.ok_bytes += block.stored_bytes
            bar.update(1)

        await for_each(blocks_in(named, frame), check, len(buffers))


# ---- gc ----


async def _gc(args: argparse.Namespace) -> int:
    keep_bytes = None if args.to is None else checked("--to", args.to, parse_size)
    results = []
    for named in named_stores(args.url):
        if named.files is None and keep_bytes is None:
            raise ConfigError(f"{named.url}: only file stores need it; to shrink it, give --to")
        result: dict[str, Any] = {"url": named.url, "temporary_files": 0, "corrupt_files": 0}
        if named.files is not None:
            result |= await run_in_own_thread(_tidy, named.files)
        result |= await _shrink(named, keep_bytes)
        results.append(result)
    if args.json:
        print(json.dumps({"stores": results}))
    else:
        heads = ["STORE", "TEMPORARY FILES", "CORRUPT FILES", "EVICTED BLOCKS", "BYTES"]
        rows = [
            [
                str(r["url"]),
                *(str(r[name]) for name in ("temporary_files", "corrupt_files", "evicted_blocks")),
                size_text(r["evicted_bytes"]),
            ]
            for r in results
        ]
        print(table(heads, rows, right=range(1, 5)))
    return 1 if any(r["excess_bytes"] or r["unreadable_namespaces"] for r in results) else 0


def _tidy(source: FileSource) -> dict[str, int]:
    with contextlib.closing(source.folder()) as folder:
        return {
            "temporary_files": folder.remove_stale(),
            "corrupt_files": folder.remove_set_aside(),
        }


async def _shrink(named: NamedStore, keep_bytes: int | None) -> dict[str, Any]:
    """Evict until no more than `keep_bytes` are used, by the measure of `stat`."""
    result: dict[str, Any] = {"evicted_blocks": 0, "evicted_bytes": 0, "excess_bytes": 0}
    result["unreadable_namespaces"] = {}
    if keep_bytes is None:
        return result
    good, bad = await readable(named)
    complain(named, bad)
    result["unreadable_namespaces"] = bad
    frames = [frame for _, frame in good]
    left_bytes, blocks = await _least_used(named, frames)
    while True:
        used_bytes = (await stats_of(named, frames)).used_bytes or left_bytes
        if used_bytes <= keep_bytes:
            break
        if left_bytes and not blocks:  # there were more than MOST_HELD
            left_bytes, blocks = await _least_used(named, frames)
        if not blocks:
            result["excess_bytes"] = used_bytes - keep_bytes
            text = f"{size_text(used_bytes)} are used, and no block is left to evict"
            print(f"{named.url}: {text}", file=sys.stderr)
            break
        # Deleting blocks also removes folders, but not the index. So one pass may evict slightly
        # too little; the loop then runs again.
        wanted_bytes = (used_bytes - keep_bytes) * left_bytes / used_bytes
        wanted_bytes = max(1.0, wanted_bytes)  # so that blocks of 0 bytes are evicted, too
        victims: list[list[BlockInfo]] = [[] for _ in frames]
        while blocks and wanted_bytes > 0:
            index, block = blocks.popleft()
            victims[index].append(block)
            wanted_bytes -= block.stored_bytes
            left_bytes -= block.stored_bytes
        for frame, evicted in zip(frames, victims, strict=True):
            if evicted:
                await _delete(named, frame, evicted)
                result["evicted_blocks"] += len(evicted)
                result["evicted_bytes"] += sum(block.stored_bytes for block in evicted)
    return result


async def _least_used(
    named: NamedStore, frames: list[BlockFrame]
) -> tuple[int, deque[tuple[int, BlockInfo]]]:
    """The bytes of all blocks, and at most MOST_HELD blocks with the number of their namespace: the
    least recently used first, and before them those without a time of use."""
    all_bytes = 0
    found: list[tuple[int, BlockInfo]] = []

    def keep_least_used() -> None:
        found.sort(key=lambda entry: entry[1].used_s or 0.0)
        del found[MOST_HELD:]

    with progress("looking") as bar:
        for index, frame in enumerate(frames):
            async for block in blocks_in(named, frame):
                all_bytes += block.stored_bytes
                found.append((index, block))
                if len(found) == 2 * MOST_HELD:
                    keep_least_used()
                bar.update(1)
    keep_least_used()
    return all_bytes, deque(found)


async def _each(blocks: list[BlockInfo]) -> AsyncIterator[BlockInfo]:
    for block in blocks:
        yield block


# ---- clear ----


async def _clear(args: argparse.Namespace) -> int:
    stores = named_stores(args.url)
    digest = await whole_digest(stores, args.namespace)
    found = [(named, *await readable(named, digest)) for named in stores]
    count = sum(len(good) + len(bad) for _, good, bad in found)
    if not args.yes:
        question = f"Delete all blocks of {count} namespaces in {args.url}?"
        await run_in_own_thread(_ask, question)
    results = []
    for named, good, bad in found:
        deleted = 0
        for _, frame in good:
            deleted += await _delete(named, frame, None)
        if named.files is not None:
            digests = [named.stored(frame).digest for _, frame in good]
            deleted += await run_in_own_thread(_remove_rest, named, digests, bad)
        complain(named, bad)
        results.append({"url": named.url, "deleted_blocks": deleted, "unreadable_namespaces": bad})
        if not args.json:
            print(f"{named.url}: {count_text(deleted)} blocks deleted")
    if args.json:
        print(json.dumps({"stores": results}))
    return 1 if any(result["unreadable_namespaces"] for result in results) else 0


def _remove_rest(named: NamedStore, good: list[Digest], bad: dict[str, str]) -> int:
    """Remove what the interface of stores does not reach in a file store; returns the number of
    blocks. Namespaces that are removed are deleted from `bad`."""
    removed = 0
    assert named.files is not None
    with contextlib.closing(named.files.folder()) as folder:
        for digest in good:
            removed += folder.clear_namespace(digest)
        # Where blocks are sealed, it may be one of another key.
        for name in [] if named.seals else list(bad):
            removed += folder.clear_namespace(Digest(bytes.fromhex(name)), even_if_foreign=True)
            if not os.path.lexists(named.files.path / name):
                del bad[name]
    return removed


async def _delete(named: NamedStore, frame: BlockFrame, blocks: list[BlockInfo] | None) -> int:
    """Delete `blocks` (None: all), and the namespace if it is empty then; returns their number.

    Raises: StoreUnavailable.
    """
    deleted = 0
    async with opened(named.source, frame, DEFAULT_DEPTH) as store:
        with progress("deleting", total=None if blocks is None else len(blocks)) as bar:

            async def delete(block: BlockInfo, worker: int) -> None:
                nonlocal deleted
                await store.delete(block.key)
                deleted += 1
                bar.update(1)

            found = store.list_blocks() if blocks is None else _each(blocks)
            await for_each(found, delete, DEFAULT_DEPTH)
        await store.remove_description()
    return deleted


def _ask(question: str) -> None:
    """Ask for confirmation. Raises: ConfigError unless a person agrees."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{question} Say so with --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was deleted")
