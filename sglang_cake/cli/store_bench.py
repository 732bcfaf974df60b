"""`sglang-cake store bench`: speed of a store, and of a model that loads from it."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_cake.cli.named_stores import (
    BESIDE_ALL_BYTES,
    BESIDE_BLOCK_BYTES,
    FullStore,
    NamedStore,
    add_url_and_json,
    checked,
    depth,
    for_each,
    one_store,
    opened,
    progress,
    run_tool,
    unused_bytes,
)
from sglang_cake.cli.text_tables import count_text, exact_size_text, size_text, table
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import BlockMissing, ConfigError, StoreError, StoreFull
from sglang_cake.core.keys import LABEL, BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import run_in_own_thread
from sglang_cake.simulator.shapes import find_shape
from sglang_cake.stores.base import Store, StoreStats
from sglang_cake.stores.file.block_files import block_names
from sglang_cake.stores.url import parse_size

DEFAULT_SIZES = "256KiB,1MiB,4MiB,16MiB"
DEFAULT_DEPTHS = "1,4,16"
DEFAULT_BYTES = "256MiB"
MAX_SIZE_BYTES = 2**30
MIN_BLOCKS = 2
FROM_DISK = 0.9  # if a smaller share of the bytes came from the disk, the page cache served them


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one block size at one depth. Latencies are those of single calls."""

    block_bytes: int
    depth: int
    blocks: int
    write_bytes_per_s: float
    write_p50_s: float
    write_p99_s: float
    read_bytes_per_s: float
    read_p50_s: float
    read_p99_s: float
    from_cache: bool | None  # whether the page cache served reads; None: unknown


def add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a store, and say what that means for a model",
        description="Write and read blocks in a namespace of its own, which is deleted at the end. "
        "A store in use is disturbed like by another server. No block is evicted for that: a store "
        "with too little room is refused, unless you say --evict. Name a folder with the capacity= "
        "and min_free= that servers give it.",
    )
    add_url_and_json(parser, run_tool(_bench))
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="of blocks (%(default)s)")
    parser.add_argument("--depths", default=DEFAULT_DEPTHS, help="calls at once (%(default)s)")
    parser.add_argument(
        "--bytes",
        default=DEFAULT_BYTES,
        help="to write for each size and depth (%(default)s), at least two blocks for each call",
    )
    parser.add_argument(
        "--evict", action="store_true", help="evict blocks of a full store, as a server would"
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--kv-bytes-per-token", type=int, metavar="N", help="of the model")
    model.add_argument("--model-config", type=Path, metavar="FILE", help="its config.json")
    parser.add_argument("--block-tokens", type=int, default=128, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--prefill-tokens-per-s", type=float, metavar="N", help="what the GPU computes"
    )


async def _bench(args: argparse.Namespace) -> int:
    named = one_store(args.url)
    kv_bytes = _kv_bytes(args)
    sizes = _list(args.sizes, "--sizes", _block_size)
    if kv_bytes is not None:
        sizes = sorted({*sizes, _in_bounds(kv_bytes * args.block_tokens, "a block of this model")})
    depths = _list(args.depths, "--depths", depth)
    budget_bytes = checked("--bytes", args.bytes, parse_size)
    found: list[Measured] = []
    with progress("measuring", total=2 * len(sizes) * len(depths), unit="run") as bar:
        for size in reversed(sizes):  # the largest may be refused
            found[:0] = await measure_size(
                named, size, depths, budget_bytes, bar, may_evict=args.evict
            )
    model_speed = None
    if kv_bytes is not None:
        of_model = [m for m in found if m.block_bytes == kv_bytes * args.block_tokens]
        model_speed = speed_of_model(
            kv_bytes_per_token=kv_bytes,
            block_tokens=args.block_tokens,
            read_bytes_per_s=max(m.read_bytes_per_s for m in of_model),
            prefill_tokens_per_s=args.prefill_tokens_per_s,
        )
    if args.json:
        runs = [asdict(m) for m in found]
        print(json.dumps({"url": named.url, "runs": runs, "model": model_speed}))
        return 0
    print(_table(found))
    if any(m.from_cache for m in found):
        print("warning: blocks were read from the page cache: a disk is slower than this")
    if model_speed is not None:
        print("\n".join(["", *lines_of(model_speed)]))
    return 0


def _table(found: list[Measured]) -> str:
    heads = ["BLOCK", "DEPTH", "WRITE", "P50", "P99", "READ", "P50", "P99"]
    rows = [
        [
            exact_size_text(m.block_bytes),
            str(m.depth),
            f"{size_text(m.write_bytes_per_s)}/s",
            f"{m.write_p50_s * 1e3:.1f} ms",
            f"{m.write_p99_s * 1e3:.1f} ms",
            f"{size_text(m.read_bytes_per_s)}/s" + ("*" if m.from_cache else ""),
            f"{m.read_p50_s * 1e3:.1f} ms",
            f"{m.read_p99_s * 1e3:.1f} ms",
        ]
        for m in found
    ]
    return table(heads, rows, right=range(8))


# ---- measuring ----


async def measure_size(
    named: NamedStore,
    size_bytes: int,
    depths: list[int],
    budget_bytes: int,
    bar: Any,
    *,
    may_evict: bool = False,
) -> list[Measured]:
    """Write and read blocks of one size in a namespace of its own, and delete them.

    Args:
        depths: calls at once; each is measured by itself.
        budget_bytes: written for each of them, but at least MIN_BLOCKS blocks a call, and no more
            than there is room for.
        bar: its `update(1)` is called after each write and each read.
        may_evict: write also if the store evicts blocks for that.

    Raises: StoreError; FullStore; ConfigError.
    """
    layout = BlockLayout.plain(1, (("bench", (size_bytes,)),), "uint8", 1)
    fields = {LABEL: "sglang-cake store bench", "run": secrets.token_hex(8)}
    namespace = Namespace((*fields.items(), ("layout", layout.describe())))
    frame = BlockFrame(namespace, layout)
    found: list[Measured] = []
    for at_once in reversed(depths):  # the largest may be refused
        async with opened(named.source, frame, at_once) as store:
            most_blocks = math.inf
            if not may_evict:
                most_blocks = _unused_blocks(named, frame, at_once, await store.stats())
            wanted = max(MIN_BLOCKS * at_once, budget_bytes // size_bytes)
            keys = _keys(at_once, int(min(wanted, most_blocks)))
            try:
                found.insert(0, await _measure(named, store, frame, at_once, keys, bar))
                await _delete(store, keys)
            except BaseException:  # an interrupt, also of the deletes
                with contextlib.suppress(StoreError):  # the first error says more
                    await _delete(store, keys)
                raise
    return found


def _unused_blocks(named: NamedStore, frame: BlockFrame, at_once: int, stats: StoreStats) -> float:
    """How many blocks may be written before the store evicts others; infinite if it tells no limit.

    Raises: FullStore, if less than MIN_BLOCKS for each of `at_once` calls, or unknown; ConfigError
    if so in an empty store; StoreUnavailable.
    """
    unused = unused_bytes(named, stats)
    block_bytes = frame.payload_bytes + BESIDE_BLOCK_BYTES
    needed_bytes = MIN_BLOCKS * at_once * block_bytes + BESIDE_ALL_BYTES
    if unused >= needed_bytes:
        return (unused - BESIDE_ALL_BYTES) / block_bytes
    text = f"{named.url}: no room to measure: {size_text(max(0, unused))} are free, and "
    text += f"{size_text(needed_bytes)} are needed"
    if stats.blocks == 0:
        raise ConfigError(text)
    raise FullStore(f"{text}: more would evict blocks of the store")


async def _measure(
    named: NamedStore, store: Store, frame: BlockFrame, at_once: int, keys: list[BlockKey], bar: Any
) -> Measured:
    size_bytes, blocks = frame.payload_bytes, len(keys)
    # Incompressible bytes, different in every block.
    buffers = [memoryview(bytearray(os.urandom(size_bytes))) for _ in range(at_once)]
    written: list[float] = []
    read: list[float] = []

    async def write(number: int, worker: int) -> None:
        buffers[worker][:8] = number.to_bytes(8, "little")
        began_s = time.perf_counter()
        if not await store.put(keys[number], buffers[worker]):
            raise ConfigError("the store has blocks that were not written")
        written.append(time.perf_counter() - began_s)

    async def get(number: int, worker: int) -> None:
        began_s = time.perf_counter()
        try:
            await store.get_into(keys[number], buffers[worker])
        except BlockMissing:
            text = "a block that was measured was evicted before it was read: write fewer bytes"
            raise ConfigError(f"{named.url}: {text}") from None
        read.append(time.perf_counter() - began_s)

    try:
        write_s = await _timed(blocks, write, at_once)
    except StoreFull as error:
        raise ConfigError(f"{named.url}: no room to measure: {error}") from None
    bar.update(1)
    await run_in_own_thread(_drop_cache, named, frame, keys)
    before = fetched_bytes()
    read_s = await _timed(blocks, get, at_once)
    bar.update(1)
    fetched = None if before is None else (fetched_bytes() or 0) - before
    files = named.files is not None and fetched is not None
    return Measured(
        block_bytes=size_bytes,
        depth=at_once,
        blocks=blocks,
        write_bytes_per_s=blocks * size_bytes / write_s,
        write_p50_s=statistics.median(written),
        write_p99_s=_p99(written),
        read_bytes_per_s=blocks * size_bytes / read_s,
        read_p50_s=statistics.median(read),
        read_p99_s=_p99(read),
        from_cache=(fetched or 0) < FROM_DISK * blocks * size_bytes if files else None,
    )


async def _timed(blocks: int, work: Callable[[int, int], Any], at_once: int) -> float:
    async def numbers() -> AsyncIterator[int]:
        for number in range(blocks):
            yield number

    began_s = time.perf_counter()
    await for_each(numbers(), work, at_once)
    return time.perf_counter() - began_s


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _drop_cache(named: NamedStore, frame: BlockFrame, keys: list[BlockKey]) -> None:
    """Drop the blocks of a file store from the page cache. On a file system in memory that does
    not work: `from_cache` will tell."""
    if named.files is None:
        return
    digest = named.stored(frame).digest
    for key in keys:
        try:
            fd = os.open(named.files.path.joinpath(*block_names(digest, key)), os.O_RDONLY)
        except FileNotFoundError:  # evicted by a server; reading it says so
            continue
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fetched_bytes() -> int | None:
    """Bytes that the system has fetched from disks for this process; None if it does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _keys(at_once: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{at_once} {i}".encode()).digest()) for i in range(blocks)]


async def _delete(store: Store, keys: list[BlockKey]) -> None:
    """Delete the written blocks. They are not listed, since not every store can list."""

    async def delete(number: int, worker: int) -> None:
        await store.delete(keys[number])

    await _timed(len(keys), delete, 4)
    await store.remove_description()


# ---- for a model ----


def speed_of_model(
    *,
    kv_bytes_per_token: int,
    block_tokens: int,
    read_bytes_per_s: float,
    prefill_tokens_per_s: float | None,
) -> dict[str, Any]:
    """The speed of a model that loads from a store, as `--json` prints it.

    The rates of computing and loading add up: `n` tokens take `n / (loaded_tokens_per_s +
    prefill_tokens_per_s)` seconds, if a prompt's later tokens cost as much as its first ones. They
    cost more, and loading takes them first.
    """
    loaded, prefill = read_bytes_per_s / kv_bytes_per_token, prefill_tokens_per_s
    return {
        "kv_bytes_per_token": kv_bytes_per_token,
        "block_tokens": block_tokens,
        "read_bytes_per_s": read_bytes_per_s,
        "loaded_tokens_per_s": loaded,
        "prefill_tokens_per_s": prefill,
        "load_speedup": loaded / prefill if prefill else None,  # against computing alone
        "both_speedup": 1 + loaded / prefill if prefill else None,  # at best
        # Where loading takes as long as computing:
        "break_even_bytes_per_s": prefill * kv_bytes_per_token if prefill else None,
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    """The same as text, one fact a line."""
    kv_bytes, block_tokens = found["kv_bytes_per_token"], found["block_tokens"]
    lines = [
        f"a token's KV is {exact_size_text(kv_bytes)}, "
        f"a block of {block_tokens} tokens {exact_size_text(kv_bytes * block_tokens)}",
        f"this store loads at best {count_text(found['loaded_tokens_per_s'])} tokens/s "
        f"({size_text(found['read_bytes_per_s'])}/s)",
    ]
    if found["prefill_tokens_per_s"] is not None:
        lines += [
            f"against a prefill of {count_text(found['prefill_tokens_per_s'])} tokens/s: "
            f"loading alone is {found['load_speedup']:.2f} times as fast, "
            f"both at once up to {found['both_speedup']:.2f} times",
            f"loading alone breaks even at {size_text(found['break_even_bytes_per_s'])}/s",
        ]
    return lines


# ---- arguments ----


def _kv_bytes(args: argparse.Namespace) -> int | None:
    if args.block_tokens <= 0:
        raise ConfigError("--block-tokens: write a number of tokens")
    if args.prefill_tokens_per_s is not None and not args.prefill_tokens_per_s > 0:
        raise ConfigError("--prefill-tokens-per-s: write a number of tokens")
    if args.model_config is not None:
        return _model_kv_bytes(args.model_config)
    if args.kv_bytes_per_token is not None and args.kv_bytes_per_token <= 0:
        raise ConfigError("--kv-bytes-per-token: write a number of bytes")
    kv_bytes: int | None = args.kv_bytes_per_token
    if kv_bytes is None and args.prefill_tokens_per_s is not None:
        raise ConfigError("--prefill-tokens-per-s: of which model? give --kv-bytes-per-token too")
    return kv_bytes


def _model_kv_bytes(path: Path) -> int:
    """KV of a token over all ranks, as `sglang-cake plan` counts it."""
    try:
        shape = find_shape(str(path))
    except ConfigError as error:
        raise ConfigError(f"--model-config: {path} describes no model: {error}") from None
    if shape.unmodelled is not None:
        raise ConfigError(f"--model-config: {shape.unmodelled}: give --kv-bytes-per-token")
    return shape.stored_bytes(1)


def _list(text: str, flag: str, read: Callable[[str], int]) -> list[int]:
    return sorted({checked(flag, part.strip(), read) for part in text.split(",")})


def _block_size(text: str) -> int:
    return _in_bounds(parse_size(text), text)


def _in_bounds(size_bytes: int, what: str) -> int:
    if not 4096 <= size_bytes <= MAX_SIZE_BYTES:
        raise ConfigError(f"{what}: blocks are measured from 4 KiB to 1 GiB")
    return size_bytes
