"""`mooncake://host:50051?segment=4GB&protocol=tcp`: blocks in the memory of many machines."""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_cake.codecs.frame import HEADER_BYTES, BlockFrame, IncomingBlock
from sglang_cake.core.buffers import BufferPool, HostArena, TellBytes
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import (
    DaemonPool,
    Stopped,
    run_in_own_thread,
    submit,
    wait_uncancelled,
)
from sglang_cake.stores.base import BlockInfo, Store, StoredNamespace, StoreLayer, StoreStats
from sglang_cake.stores.corrupt_reports import CorruptReports
from sglang_cake.stores.mooncake.mooncake_client import MooncakeClient, MooncakePlace
from sglang_cake.stores.url import StoreUrl, matching, one_of, parse_size, redacted

T = TypeVar("T")

PATIENCE_S = 5.0  # limit for a call; the library itself waits for about 30 s
RETRY_S = 5.0  # between two attempts to join the store
HASH_BYTES = 2**18  # copied and hashed at once, while in the CPU's cache
DEFAULT_SEGMENT_BYTES = 4 * 10**9
MIN_SEGMENT_BYTES = 2**24  # limit of the library
_MASTER = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})")
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|etcd|redis)://[^\s@]+")
_DEVICES = re.compile(r"[\w.-]+(,[\w.-]+)*")
_HOSTNAME = re.compile(r"[A-Za-z0-9.:\[\]-]+")


class Hold:
    """A lock on the caller's memory: a thread uses the memory only inside of `with hold:`.

    The caller may leave while no thread is inside. Then none can enter again.
    """

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self._left = False

    def __enter__(self) -> None:
        """Raises: Stopped if the caller has left."""
        self._inside.acquire()
        if self._left:
            self._inside.release()
            raise Stopped

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises: Stopped if the caller has tried to leave meanwhile."""
        self._inside.release()
        if self._left and error is None:
            raise Stopped

    def leave(self) -> bool:
        """True if the caller may go now; else the caller must wait for the end of the thread."""
        self._left = True
        return not self._inside.locked()


class CallThreads:
    """Threads for blocking calls that cannot be interrupted, with a time limit.

    A call that exceeds the limit is abandoned, and keeps its thread until it returns. While all
    threads are in late calls, further calls fail at once.

    Attributes:
        patience_s: limit for a call.
    """

    def __init__(self, name: str, threads: int, *, patience_s: float) -> None:
        self._pool = DaemonPool(threads, name)
        self._threads = threads
        self.patience_s = patience_s
        self._abandoned: dict[Future[Any], float] = {}  # start of each call; at most `threads`

    @property
    def abandoned(self) -> int:
        """Number of abandoned calls that have not returned."""
        return len(self._abandoned)

    async def call(self, work: Callable[[Hold], T]) -> T:
        """Run `work(hold)` in a thread and return what it returns.

        Raises: the errors of `work`; StoreUnavailable when it takes too long, or after `shut`.
        Cancellation: returns at once, or once the thread has left its `with hold:`.
        """
        now_s = time.monotonic()
        late = sum(now_s >= since_s + self.patience_s for since_s in self._abandoned.values())
        if late >= self._threads:
            raise StoreUnavailable(f"{late} calls wait for an answer that does not come")
        hold = Hold()
        queued = submit(self._pool, work, hold)
        running = asyncio.wrap_future(queued)
        try:
            await asyncio.wait((running,), timeout=self.patience_s)
        except asyncio.CancelledError:
            await self._abandon(queued, running, hold, now_s)
            raise
        if not running.done():
            await self._abandon(queued, running, hold, now_s)
            raise StoreUnavailable(f"no answer within {self.patience_s:g} s")
        return running.result()

    def shut(self) -> None:
        """Queued and further calls fail."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Block until all calls have returned, abandoned ones included."""
        self._pool.shutdown()

    async def _abandon(
        self, queued: "Future[Any]", running: "asyncio.Future[Any]", hold: Hold, since_s: float
    ) -> None:
        if not hold.leave():
            await wait_uncancelled(running)
        if queued.cancel():  # it had not started
            return
        self._abandoned[queued] = since_s
        running.add_done_callback(lambda done: self._came_back(queued, done))

    def _came_back(self, queued: "Future[Any]", running: "asyncio.Future[Any]") -> None:
        del self._abandoned[queued]
        if not running.cancelled():
            running.exception()  # retrieved, since asyncio would log it otherwise


class MooncakeStore(Store):
    """Implements `Store`: one object per block, framed as in a file.

    The library reads and writes registered memory, a buffer per concurrent read or write. So a
    block is copied once in this process, and hashed during the copy. A call ends after `patience_s`
    at the latest. A call that hangs holds a buffer, never the caller's memory. A lookup is one
    round trip. A reader removes an object with wrong bytes.

    Attributes:
        reads: threads of reads.
    """

    def __init__(
        self,
        place: MooncakePlace,
        frame: BlockFrame,
        *,
        depth: int,
        patience_s: float = PATIENCE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Joins the store with the first call.

        Args:
            depth: concurrent reads, and concurrent writes.
            patience_s: limit for a call.
            retry_s: time between two attempts to join.
        """
        self._place = place
        self._frame = frame
        self._patience_s = patience_s
        self._memory = HostArena([frame.framed_bytes] * (2 * depth), prefault=False)
        self._buffers = BufferPool(self._memory.buffers)
        self.reads = CallThreads("cake-mooncake-read", depth, patience_s=patience_s)
        self._writes = CallThreads("cake-mooncake-write", depth, patience_s=patience_s)
        self._asks = CallThreads("cake-mooncake-ask", 1, patience_s=patience_s)
        self._reports = CorruptReports(self.delete)
        self._joining: asyncio.Task[MooncakeClient] | None = None
        self._joining_since_s = 0.0
        self._retry_s = retry_s
        self._closed = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        names = [self._name(key) for key in keys]
        return await self._call(self._asks, lambda client, hold: client.exist(names))

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        with self._reports.reading(key):
            return await self._call(
                self.reads, lambda client, hold: self._get(client, key, out, progress, hold)
            )

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        assert self._frame.takes(data.nbytes), data.nbytes
        view = data.cast("B")
        await self._reports.end(key)
        return await self._call(
            self._writes, lambda client, hold: self._put(client, key, view, hold)
        )

    async def delete(self, key: BlockKey) -> None:
        name = self._name(key)
        await self._call(self._writes, lambda client, hold: client.remove(name))

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """Raises: StoreUnavailable, always."""
        raise StoreUnavailable("Mooncake Store cannot list what it holds")
        yield  # makes it an iterator

    async def stats(self) -> StoreStats:
        """Empty: the library has no totals."""
        self._check_open()
        return StoreStats()

    async def close(self) -> None:
        """Waits for calls in flight, for about 30 s if a peer hangs, and for `patience_s` at most
        to leave the store. If it is being joined, it is left once that has ended.

        The memory that this process lent to the store is taken back, with the blocks in it.
        """
        await self._reports.end_all()
        self._closed = True
        for threads in (self.reads, self._writes, self._asks):
            threads.shut()
        for threads in (self.reads, self._writes, self._asks):
            await run_in_own_thread(threads.wait)
        joining = self._joining
        self._joining = None
        if joining is not None:
            leaving = asyncio.create_task(self._leave(joining))
            await asyncio.wait((leaving,), timeout=self._patience_s)

    async def _leave(self, joining: asyncio.Task[MooncakeClient]) -> None:
        with contextlib.suppress(StoreUnavailable):
            await run_in_own_thread((await joining).close)

    async def _call(self, threads: CallThreads, work: Callable[[MooncakeClient, Hold], T]) -> T:
        client = await self._joined()
        return await threads.call(lambda hold: work(client, hold))

    async def _joined(self) -> MooncakeClient:
        """Raises: StoreUnavailable, at the latest `patience_s` after the attempt has started."""
        self._check_open()
        now_s = time.monotonic()
        failed = self._joining is not None and self._joining.done() and self._joining.exception()
        if self._joining is None or (failed and now_s >= self._joining_since_s + self._retry_s):
            self._joining_since_s = now_s
            joining = run_in_own_thread(MooncakeClient, self._place, self._memory)
            self._joining = asyncio.create_task(joining)
        if not self._joining.done():
            left_s = max(0.0, self._joining_since_s + self._patience_s - now_s)
            await asyncio.wait((self._joining,), timeout=left_s)
            self._check_open()
        if not self._joining.done():
            raise StoreUnavailable(f"Mooncake's master at {self._place.host} does not answer")
        return self._joining.result()

    def _name(self, key: BlockKey) -> str:
        return f"{self._frame.digest.hex()}/{key.hex()}"

    # ---- in the threads ----

    def _get(
        self,
        client: MooncakeClient,
        key: BlockKey,
        out: memoryview,
        progress: TellBytes | None,
        hold: Hold,
    ) -> int:
        with self._buffer() as view:
            count = client.get_into(self._name(key), view)
            with hold:
                block = IncomingBlock(self._frame, key, out, progress)
                for start in range(0, count, HASH_BYTES):
                    block.feed(view[start : min(start + HASH_BYTES, count)])
                return block.finish()

    def _put(self, client: MooncakeClient, key: BlockKey, data: memoryview, hold: Hold) -> bool:
        # The library reports a second put of a name as a success.
        if client.exist([self._name(key)])[0]:
            return False
        with self._buffer() as view:
            framed = view[: HEADER_BYTES + len(data)]
            with hold:
                framed[:HEADER_BYTES] = self._frame.header(key, data)
                framed[HEADER_BYTES:] = data
            return client.put_new(self._name(key), framed)

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        buffer = self._buffers.take()
        assert buffer is not None  # there is one for each thread
        try:
            yield buffer.view
        finally:
            self._buffers.give(buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")


@dataclass(frozen=True, slots=True)
class MooncakeSource:
    """Implements `StoreSource`."""

    place: MooncakePlace
    patience_s: float = PATIENCE_S
    retry_s: float = RETRY_S

    def check(self) -> None:
        """Checks nothing: the library is loaded already, and the master may start later."""

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return MooncakeStore(
            self.place, frame, depth=depth, patience_s=self.patience_s, retry_s=self.retry_s
        )

    async def namespaces(self) -> list[StoredNamespace]:
        """Raises: StoreUnavailable, always."""
        raise StoreUnavailable("Mooncake Store cannot list what it holds")

    def describe(self) -> StoreLayer:
        settings = {
            "master": f"{self.place.host}:{self.place.port}",
            "segment_bytes": self.place.segment_bytes,
            "protocol": self.place.protocol,
            "device": self.place.device,
            "metadata": redacted(self.place.metadata),
            "local_hostname": self.place.local_hostname,
        }
        return StoreLayer("MooncakeStore", settings)


def parse(url: StoreUrl) -> MooncakeSource:
    """Raises: ConfigError."""
    master = _MASTER.fullmatch(url.place)
    if not master or not 0 < int(master[2]) < 2**16:
        raise url.error(f"{url.place!r} is not a master, write mooncake://host:50051")
    segment_bytes = url.option("segment", _segment, DEFAULT_SEGMENT_BYTES)
    metadata = url.option("metadata", matching(_METADATA, "not possible"), "P2PHANDSHAKE")
    protocol = url.option("protocol", one_of("tcp", "rdma"), "tcp")
    device = url.option("device", matching(_DEVICES, "not possible"), "")
    local_hostname = url.option("local_hostname", matching(_HOSTNAME, "not possible"), "") or None
    return MooncakeSource(
        MooncakePlace(
            host=master[1].strip("[]"),
            port=int(master[2]),
            segment_bytes=segment_bytes,
            metadata=metadata,
            protocol=protocol,
            device=device,
            local_hostname=local_hostname,
        )
    )


def _segment(text: str) -> int:
    size_bytes = parse_size(text)
    if 0 < size_bytes < MIN_SEGMENT_BYTES:
        raise ConfigError(f"{text!r} is too little: lend at least 16MiB, or 0 for nothing")
    return size_bytes
