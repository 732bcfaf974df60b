"""Helpers of the `sglang-cake store` tools: they parse store URLs, list namespaces and blocks, and
run several calls at a time.
"""

import argparse
import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_cake.cli.text_tables import exact_size_text
from sglang_cake.codecs import frame as frames
from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame
from sglang_cake.core.buffers import HostArena
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import Digest, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import DaemonPool, run_in_own_thread, submit
from sglang_cake.stores.base import BlockInfo, Store, StoredNamespace, StoreSource, StoreStats
from sglang_cake.stores.encrypted import EncryptedSource
from sglang_cake.stores.file.disk import FOLDER_BYTES, free_bytes
from sglang_cake.stores.file.evictor import ahead_bytes
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.throttled import ThrottledSource
from sglang_cake.stores.url import redacted, split_urls

T = TypeVar("T")
DEFAULT_DEPTH = 8
SHORT_DIGEST = 12  # hex digits of a namespace in tables; as a prefix, they select it again
BESIDE_BLOCK_BYTES = HEADER_BYTES + 4 * FOLDER_BYTES  # at most, with what rounding up takes
BESIDE_ALL_BYTES = 1 << 20  # the description of the namespace, and the growth of the index

STEP_S = 0.1  # in which a signal takes effect
LOOP_S = 2.0  # in which the event loop of a tool runs, unless a call hangs in it
NOTICE_S = 5.0  # after an interrupt, until a line says how to end without waiting


class FullStore(ConfigError):
    """A tool would evict blocks of the store."""


@dataclass(frozen=True, slots=True)
class NamedStore:
    """One store of the command line. The tiers of `A,B` are separate stores here, since an operator
    wants to know what each of them holds."""

    url: str
    source: StoreSource

    @property
    def files(self) -> FileSource | None:
        """The folder behind it, if it is a file store."""
        source = self.source
        while isinstance(source, EncryptedSource | ThrottledSource):
            source = source.inner
        return source if isinstance(source, FileSource) else None

    @property
    def seals(self) -> bool:
        """Whether it seals blocks. Its folder may have namespaces of others then."""
        return isinstance(self.source, EncryptedSource)

    def stored(self, frame: BlockFrame) -> BlockFrame:
        """How the store frames blocks of `frame`: sealed, if it seals them. Raises: ConfigError."""
        source = self.source
        return source.stored_frame(frame) if isinstance(source, EncryptedSource) else frame


def named_stores(text: str, *, must_exist: bool = True) -> list[NamedStore]:
    """The stores that `URL[,URL...]` names.

    Args: must_exist: a missing folder is an error: a tool that created it would hide a typing
        error.
    Raises: ConfigError.
    """
    sources = parse_sources(text, reads_count=False)  # reads of tools must not count as use
    found = [
        NamedStore(url.shown, source) for url, source in zip(split_urls(text), sources, strict=True)
    ]
    for named in found:
        if not must_exist or named.files is None:
            continue
        try:
            is_folder = named.files.path.is_dir()
        except OSError as error:  # as of a folder above that may not be entered
            raise ConfigError(f"store URL {named.url!r}: {error.strerror}") from None
        if not is_folder:
            raise ConfigError(f"store URL {named.url!r}: there is no such folder")
    return found


def one_store(text: str, *, must_exist: bool = True) -> NamedStore:
    """The store that a single URL names, as for `named_stores`. Raises: ConfigError."""
    found = named_stores(text, must_exist=must_exist)
    if len(found) > 1:
        raise ConfigError(f"{redacted(text)!r} names {len(found)} stores, write one")
    return found[0]


def frame_of_stored(stored: StoredNamespace) -> BlockFrame:
    """How the blocks of a stored namespace are framed. Its description is not trusted.

    Raises: ValueError, one line that says why it cannot be read.
    """
    fields: dict[str, Any] = stored.fields
    if not fields:
        raise ValueError("it has no description")
    if not all(isinstance(part, str) for field in fields.items() for part in field):
        raise ValueError("its description holds more than text")
    layout = BlockLayout.parse(fields.get("layout", ""))
    namespace = Namespace(tuple(fields.items()))
    if namespace.digest() != stored.digest:
        raise ValueError("its description is of another namespace")
    return frames.frame_of(namespace, layout)


async def namespaces_of(named: NamedStore, digest: Digest | None = None) -> list[StoredNamespace]:
    """The namespace with this digest, if the store has it; None: all namespaces.

    Raises: StoreUnavailable; ConfigError for `memory://`.
    """
    refuse_memory(named)
    stored = await named.source.namespaces()
    return [each for each in stored if digest in (None, each.digest)]


async def whole_digest(stores: list[NamedStore], prefix: str | None) -> Digest | None:
    """The digest of the one namespace, in any of the stores, whose digest starts with `prefix`
    (hex). None: `prefix` is None.

    Raises: StoreUnavailable; ConfigError if none or several start with that prefix, if it is empty,
        or for `memory://`.
    """
    if prefix is None:
        return None
    if not prefix:
        raise ConfigError("the digest of the namespace is empty")
    digests = {each.digest for named in stores for each in await namespaces_of(named)}
    chosen = [each for each in digests if each.hex().startswith(prefix.lower())]
    if len(chosen) != 1:
        start = f"{len(chosen)} namespaces start" if chosen else "no namespace starts"
        raise ConfigError(f"{', '.join(each.url for each in stores)}: {start} with {prefix!r}")
    return chosen[0]


def refuse_memory(named: NamedStore) -> None:
    """Refuse `memory://`: it would be memory of this process, empty and soon gone.

    Raises: ConfigError.
    """
    if named.url.startswith("memory://"):
        raise ConfigError(f"{named.url} is memory of the server: other processes cannot see it")


async def readable(
    named: NamedStore, digest: Digest | None = None
) -> tuple[list[tuple[StoredNamespace, BlockFrame]], dict[str, str]]:
    """Of `namespaces_of`, those that can be read, and for the others why not (by digest, in hex).

    Raises: StoreUnavailable, ConfigError.
    """
    good, bad = [], {}
    for stored in await namespaces_of(named, digest):
        try:
            good.append((stored, frame_of_stored(stored)))
        except ValueError as error:
            bad[stored.digest.hex()] = str(error)
    return good, bad


def complain(named: NamedStore, unreadable: dict[str, str]) -> None:
    """Print the skipped namespaces on stderr."""
    for digest, why in unreadable.items():
        print(f"{named.url}: namespace {digest[:SHORT_DIGEST]}: {why}", file=sys.stderr)


def with_buffers(
    named: NamedStore,
    good: list[tuple[StoredNamespace, BlockFrame]],
    count: int,
    unreadable: dict[str, str],
) -> Iterator[tuple[BlockFrame, list[memoryview]]]:
    """The namespaces that `readable` gave, each with `count` buffers of one block.

    The size of a block is that of an untrusted description. So a page is allocated when bytes come
    there. A namespace whose buffers the system does not map is printed, and added to `unreadable`.
    """
    for _, frame in good:
        try:
            arena = HostArena([frame.payload_bytes] * count, prefault=False)
        except OSError:
            size = exact_size_text(frame.payload_bytes)
            why = {frame.digest.hex(): f"no memory for {count} blocks of {size}: lower --depth"}
            complain(named, why)
            unreadable |= why
        else:
            yield frame, [buffer.view for buffer in arena.buffers]


@asynccontextmanager
async def opened(source: StoreSource, frame: BlockFrame, depth: int) -> AsyncIterator[Store]:
    """One namespace of a store, open. Raises: StoreUnavailable; ConfigError."""
    store = await run_in_own_thread(source.open, frame, depth=depth)
    try:
        yield store
    finally:
        await store.close()


async def blocks_in(named: NamedStore, frame: BlockFrame) -> AsyncIterator[BlockInfo]:
    """The blocks of one namespace. A folder is not changed.

    Raises: StoreUnavailable; ConfigError.
    """
    if named.files is not None:
        for block in named.files.blocks_in(named.stored(frame).digest):
            yield block
        return
    async with opened(named.source, frame, 1) as store:
        async for block in store.list_blocks():
            yield block


async def stats_of(named: NamedStore, frames: list[BlockFrame]) -> StoreStats:
    """How full a store is. A folder is not changed. Raises: StoreUnavailable."""
    if named.files is not None:
        return named.files.stats()
    for frame in frames:  # the stats of one namespace are those of the whole store
        async with opened(named.source, frame, 1) as store:
            return await store.stats()
    return StoreStats()


def unused_bytes(named: NamedStore, stats: StoreStats) -> float:
    """Bytes that a store takes before it evicts blocks; infinite if it evicts none.

    Raises: StoreUnavailable if it has a limit, and does not know how full it is; FullStore if it
        evicts blocks, and does not tell when.
    """
    unused = math.inf
    if named.files is not None:
        free = free_bytes(os.statvfs(named.files.path))
        if free is not None:
            unused = free - named.files.min_free_bytes
    elif stats.unused_bytes is not None:
        unused = stats.unused_bytes
    elif stats.policy and stats.capacity_bytes is None:  # `store serve` of an older version
        text = "it does not tell how much room it has, and more could evict blocks of the store"
        raise FullStore(f"{named.url}: {text}: run a newer `sglang-cake store serve` there")
    if stats.capacity_bytes is not None:
        if stats.used_bytes is None:
            text = "the store does not know yet how full it is: try again later"
            raise StoreUnavailable(f"{named.url}: {text}")
        capacity_bytes = stats.capacity_bytes - ahead_bytes(stats.capacity_bytes)
        unused = min(unused, capacity_bytes - stats.used_bytes)
    return unused


async def for_each(
    items: AsyncIterator[T], work: Callable[[T, int], Awaitable[object]], at_once: int
) -> None:
    """Run `work(item, worker)` for every item, `at_once` at a time; `worker` counts from 0.

    Raises: the first error of `work` or `items`. No more work is begun after it.
    """
    next_item = asyncio.Lock()

    async def run(worker: int) -> None:
        while True:
            async with next_item:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(item, worker)

    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(at_once):
                group.create_task(run(worker))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def add_url_and_json(parser: argparse.ArgumentParser, run: Any) -> None:
    """The arguments of every command on the stores that a URL names. Args: run: the command."""
    parser.add_argument("url", metavar="URL", help="the store, for example file:///nvme/kv")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run_tool(tool: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]) -> Any:
    """A `run` for argparse from a coroutine function. SIGTERM interrupts it as Ctrl-C does.

    An interrupt cancels the tool, and waits until it has cleaned up. It does not wait for a tool
    that hangs in a call of its event loop, nor for threads. A second interrupt waits for nothing.
    """

    def run(args: argparse.Namespace) -> int:
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            return asyncio.run(tool(args))
        started: Future[Callable[[], object]] = Future()  # cancels the tool
        cancelling, ended, closed = threading.Event(), threading.Event(), threading.Event()

        async def cancellable() -> int:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None

            def cancel() -> None:
                cancelling.set()
                task.cancel()

            started.set_result(lambda: loop.call_soon_threadsafe(cancel))
            try:
                return await tool(args)
            finally:
                ended.set()

        former = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            # This thread stays free: a signal has no effect in a system call that a disk holds up.
            pool = DaemonPool(1, "cake-tool")
            called = submit(pool, lambda: asyncio.run(cancellable()))
            pool.shutdown(wait=False)
            called.add_done_callback(lambda _: closed.set())
            _wait(closed)
            return called.result()
        except KeyboardInterrupt:
            with suppress(RuntimeError, TimeoutError):  # the loop is closed, or has not begun
                started.result(LOOP_S)()
            if _wait(cancelling, LOOP_S) and not _wait(ended, NOTICE_S):
                text = "calls to the store have not ended: Ctrl-C ends without them"
                with suppress(OSError):  # the reader of stderr has ended
                    print(text, file=sys.stderr, flush=True)
                _wait(ended)
            raise
        finally:
            signal.signal(signal.SIGTERM, former)

    return run


def _wait(event: threading.Event, at_most_s: float = math.inf) -> bool:
    """As `event.wait`, in steps: the system may give a signal to any thread, and it interrupts no
    wait of the others."""
    end_s = time.monotonic() + at_most_s
    while not event.wait(STEP_S):
        if time.monotonic() >= end_s:
            return False
    return True


@contextmanager
def progress(what: str, *, total: int | None = None, unit: str = "block") -> Iterator[Any]:
    """A progress bar on stderr, if that is a terminal; its `update(n)` advances it."""
    from tqdm import tqdm

    with tqdm(desc=what, total=total, unit=unit, unit_scale=True, disable=None, leave=False) as bar:
        yield bar


def depth(text: str) -> int:
    """Type of an argument: a number of calls at once."""
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 256")
    return int(text)


def checked(flag: str, text: str, read: Callable[[str], int]) -> int:
    """The value of a flag. Raises: ConfigError, which names the flag."""
    try:
        return read(text)
    except (ConfigError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{flag}: {error}") from None
