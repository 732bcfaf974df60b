"""`http://host:8700`, `https://host/prefix?token_file=/path&ca=/path`: blocks on a server, which is
`sglang-cake store serve` or a plain server of files.

A plain server has GET, HEAD, PUT and DELETE, as nginx with its WebDAV module.
"""

import asyncio
import contextlib
import json
import logging
import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from sglang_cake.codecs.frame import BlockFrame, IncomingBlock
from sglang_cake.core.backoff import Backoff
from sglang_cake.core.buffers import TellBytes
from sglang_cake.core.errors import (
    BlockCorrupt,
    BlockMissing,
    ConfigError,
    StoreUnavailable,
    one_line,
)
from sglang_cake.core.keys import BlockKey, digest_of, read_fields
from sglang_cake.core.threads import IoThread
from sglang_cake.stores.base import (
    BlockInfo,
    EvictionCounts,
    RequestFacts,
    Store,
    StoredNamespace,
    StoreLayer,
    StoreStats,
)
from sglang_cake.stores.circuit_breaker import Circuit, RemoteError, TimeoutLimits
from sglang_cake.stores.corrupt_reports import CorruptReports
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.auth import is_loopback, load_tokens, own_token_path
from sglang_cake.stores.http.http_transport import (
    Endpoint,
    Hedging,
    HttpTransport,
    read_whole,
    refuse,
)
from sglang_cake.stores.lookup_rounds import EXACT_KEYS, look_up_in_rounds
from sglang_cake.stores.url import StoreUrl, absolute_path

T = TypeVar("T")

logger = logging.getLogger(__name__)
CHECK_S = 8.0  # limit for the check at start
HEADS_AT_ONCE = EXACT_KEYS  # HEAD requests in flight, on a plain server
HEAD_ROUNDS = 3  # of HEADs for one lookup; enough for a stored prefix of 4,000 blocks
LIST_MEMORY_BYTES = 16 << 20  # a longer list is kept on a disk
# A longer list is an error: of 100 million blocks, whose order of eviction takes a server 80 GB of
# memory. A server that does not end its list would fill the disk.
MAX_LIST_BYTES = 13 * 10**9
MAX_NAMESPACES_BYTES = 1 << 28  # a longer list of namespaces is an error
SEND_BYTES = 1 << 18  # of a block, copied and sent at a time
NOT_OURS = (404, 405, 501)  # statuses of `contains` on a plain server
MISSING = (404, 410)
WRITTEN = (200, 201, 204)
DELETED = (200, 202, 204, *MISSING)
# A proxy may have answered so while the server restarted, which mostly takes some seconds. A plain
# server gets one request more in 5 minutes.
ASK_AGAIN_FIRST_S = 10.0
ASK_AGAIN_LAST_S = 300.0


class HttpStore(Store):
    """Implements `Store`. Sends nothing before its first call; belongs to that call's event loop.

    The answer to `contains` shows whether the server is a plain one. After an outage `contains` is
    asked again, because another server may have taken the address. A plain server is asked again
    after pauses.

    Attributes:
        transport: sends its requests.
        counters: of the requests.
    """

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        frame: BlockFrame,
        *,
        depth: int,
        limits: TimeoutLimits | None = None,
        hedging: Hedging | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_list_bytes: int = MAX_LIST_BYTES,
    ) -> None:
        """Args:
        locate, hedging: as in `HttpTransport`.
        depth: largest number of reads in flight, and of writes.
        limits: bounds of the time limits; the defaults if None.
        clock: as in `Circuits`.
        max_list_bytes: a longer list is an error.

        Raises: ConfigError, from `locate`.
        """
        self._frame = frame
        self._max_list_bytes = max_list_bytes
        self._limits = limits or TimeoutLimits()
        self.transport = HttpTransport(
            locate, self._limits, hedging, self._forget_server, clock, depth=depth
        )
        self.counters = self.transport.counters
        self._reading = asyncio.Semaphore(depth)
        self._writing = asyncio.Semaphore(depth)
        self._asking = asyncio.Semaphore(HEADS_AT_ONCE)
        self._reports = CorruptReports(self._report)
        self._clock = clock
        self._is_plain: bool | None = None  # None: not known yet
        self._was_plain = False  # by the last answer, also before an outage
        self._ask_again = Backoff(ASK_AGAIN_FIRST_S, ASK_AGAIN_LAST_S)  # while it is plain
        self._is_claimed = False  # whether the server has the namespace's description

    def events(self) -> dict[str, int]:
        return self.counters.events()

    def _forget_server(self) -> None:
        self._is_plain = None
        self._is_claimed = False

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As in `Store`, in one round trip.

        On a plain server, HEAD_ROUNDS rounds of HEAD requests for some of the keys (see
        `lookup_rounds`).
        """
        # Before the request: its answer may be older than the end of a report.
        reported = self._reports.among(keys)
        found: list[bool] = []
        for start in range(0, max(1, len(keys)), protocol.MAX_CONTAINS_KEYS):
            some = keys[start : start + protocol.MAX_CONTAINS_KEYS]
            if not self._is_plain or not self._ask_again.left_s(self._clock()):
                answers = await self._ask(some)
                if answers is not None:
                    found += answers
                    continue
            found += await look_up_in_rounds(
                some, self._has, at_once=HEADS_AT_ONCE, rounds=HEAD_ROUNDS
            )
        return [there and key not in reported for key, there in zip(keys, found, strict=True)]

    async def on_access(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """As in `Store`, for MAX_CONTAINS_KEYS keys at most; nothing on a plain server."""
        if self._is_plain:
            return
        body = b"".join(keys[: protocol.MAX_CONTAINS_KEYS])
        path = protocol.touched_path(self._frame.digest)
        headers = {protocol.FACTS_HEADER: facts.to_json()}
        await self._small("POST", path, (204, *NOT_OURS), data=body, headers=headers)

    async def _ask(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Which keys are stored; None if the server turns out to be a plain one."""
        path = protocol.contains_path(self._frame.digest, self._frame.known_bytes)
        if self._is_plain:
            self._ask_again.start(self._clock())  # other lookups do not ask meanwhile
        answers = await self._small(
            "POST",
            path,
            (200, *NOT_OURS),
            lambda body: protocol.read_answers(body, len(keys)),
            data=b"".join(keys),
        )
        self._learned(is_plain=answers is None)
        return answers

    def _learned(self, *, is_plain: bool) -> None:
        self._is_plain = is_plain
        if not is_plain:
            self._ask_again.reset()
        elif not self._ask_again.has_failed:
            self._ask_again.start(self._clock())
        if is_plain is not self._was_plain:
            self._was_plain = is_plain
            base = self.transport.base
            if is_plain:
                logger.warning("%s: no `sglang-cake store serve`, taken for a plain server", base)
            else:
                logger.warning("%s: answers as `sglang-cake store serve` again", base)

    async def _has(self, key: BlockKey) -> bool:
        async with self._asking:
            return await self.transport.call(
                self.transport.lookups, protocol.KEY_BYTES, lambda: self._head(key)
            )

    async def _head(self, key: BlockKey) -> bool:
        path = protocol.block_path(self._frame.digest, key)
        async with self.transport.request("HEAD", path, (200, *MISSING)) as response:
            # A truncated block counts as absent, so that the next write replaces it.
            return response.status == 200 and self._may_be(response.content_length)

    def _may_be(self, framed_bytes: int | None) -> bool:
        return framed_bytes is None or self._frame.fits(framed_bytes)

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        """As in `Store`. Nothing writes `out` after this returns, raises or is cancelled."""
        with self._reports.reading(key):
            async with self._reading:
                return await self.transport.call(
                    self.transport.reads,
                    self._frame.framed_bytes,
                    lambda: self._get(key, out, progress),
                )

    async def _report(self, key: BlockKey) -> None:
        """Ask the server to check a block that arrived corrupt; its own copy may be sound.

        The request bypasses the circuit, where its success would count as recovery.
        """
        if self._is_plain:
            return
        path = protocol.block_path(self._frame.digest, key)
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self.transport.request("POST", path, None):
                pass  # the answer does not matter: the block is computed

    async def _get(self, key: BlockKey, out: memoryview, progress: TellBytes | None) -> int:
        path = protocol.block_path(self._frame.digest, key)
        async with self.transport.request("GET", path, (200, *MISSING), hedged=True) as response:
            if response.status != 200:
                raise BlockMissing(key.hex())
            length = response.content_length
            if not self._may_be(length):
                raise BlockCorrupt(f"{length} bytes, a block has {self._frame.framed_bytes}")
            block = IncomingBlock(self._frame, key, out, progress)
            async for piece in response.content.iter_any():
                block.feed(piece)
            return block.finish()

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        """As in `Store`. Nothing reads `data` after this returns, raises or is cancelled."""
        assert self._frame.takes(data.nbytes), data.nbytes
        body = data.cast("B")
        await self._reports.end(key)
        async with self._writing:
            if self._is_plain is None:
                await self._ask(())
            header = self._frame.header(key, body)
            for _ in range(2):
                if not self._is_claimed:
                    await self._write_description()
                fresh = await self.transport.call(
                    self.transport.writes,
                    len(header) + len(body),
                    lambda: self._put(key, header, body),
                    # Our server answers before the body that the block is there.
                    transferred=lambda fresh: fresh is True or self._is_plain is not False,
                )
                if fresh is not None:
                    return fresh
                self._is_claimed = False  # the server lost the description: send it again
        raise StoreUnavailable("the server forgets the namespace at once")

    async def _put(self, key: BlockKey, header: bytes, body: memoryview) -> bool | None:
        """Whether the block was new; None if the server does not know the namespace."""

        async def pieces() -> AsyncIterator[bytes]:
            yield header
            for start in range(0, len(body), SEND_BYTES):
                # A copy, because the transport may still buffer it after a cancellation.
                yield bytes(body[start : start + SEND_BYTES])

        async with self.transport.request(
            "PUT",
            protocol.block_path(self._frame.digest, key),
            WRITTEN if self._is_plain else (*WRITTEN, 409),
            data=pieces,
            headers={
                "Content-Length": str(len(header) + len(body)),
                "Content-Type": protocol.BLOCK_TYPE,
            },
            # `sglang-cake store serve` can refuse before the body is sent. Other servers may not
            # support that.
            expect100=self._is_plain is False,
        ) as response:
            return None if response.status == 409 else response.status == 201

    async def _write_description(self) -> None:
        """Write the namespace's description unless it is there.

        Raises: StoreUnavailable, also if another namespace's is there; StoreFull.
        """
        path = protocol.description_path(self._frame.digest)
        found = await self._small("GET", path, (200, 404), lambda body: read_fields(body) or {})
        if found is None:
            body = (json.dumps(self._frame.namespace.describe(), indent=2) + "\n").encode()
            circuit = self.transport.descriptions
            await self._small("PUT", path, WRITTEN, data=body, circuit=circuit)
        elif digest_of(found) != self._frame.digest:
            raise StoreUnavailable(f"{path} on the server describes another namespace")
        self._is_claimed = True

    async def delete(self, key: BlockKey) -> None:
        path = protocol.block_path(self._frame.digest, key)
        await self._small("DELETE", path, DELETED, circuit=self.transport.writes)

    async def remove_description(self) -> None:
        """As in `Store`. A plain server does not check whether blocks are left."""
        path = protocol.description_path(self._frame.digest)
        circuit = self.transport.descriptions
        await self._small("DELETE", path, (*DELETED, 405), circuit=circuit)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        """As in `Store`. The list is kept in a temporary file: the server does not wait for a
        reader who works on each block.

        Raises: StoreUnavailable, always on a plain server, and if the list is too long or there is
            no room for the file.
        """

        async def attempt() -> aiohttp.ClientResponse:
            response = await self.transport.send("GET", path)
            if response.content_type != protocol.LIST_TYPE:
                await refuse(response, "this server cannot list blocks")
            return response

        path = protocol.list_path(self._frame.digest)
        async with self._asking:
            lookups = self.transport.lookups
            response = await self.transport.call(lookups, protocol.KEY_BYTES, attempt)
        with tempfile.SpooledTemporaryFile(LIST_MEMORY_BYTES) as kept:
            failure = await self._keep(response, kept)
            kept.seek(0)
            while (line := kept.readline(protocol.MAX_LIST_LINE_BYTES)).endswith(b"\n"):
                yield protocol.read_block_line(line)
        if failure is not None:  # what came before it is listed
            raise failure
        if line:
            raise StoreUnavailable("the list has a line without an end")

    async def _keep(
        self, response: aiohttp.ClientResponse, kept: "tempfile.SpooledTemporaryFile[bytes]"
    ) -> StoreUnavailable | None:
        """Copy a list to a file. The server has `first_s` for each piece. Returns why a part is
        missing."""
        try:
            while True:
                async with asyncio.timeout(self._limits.first_s):
                    piece = await response.content.readany()
                if not piece:
                    return None
                kept.write(piece)
                if kept.tell() > self._max_list_bytes:
                    return StoreUnavailable(f"a list of more than {self._max_list_bytes} bytes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return StoreUnavailable(f"the list broke off: {one_line(error)}")
        finally:
            response.close()

    async def stats(self) -> StoreStats:
        """As in `Store`; all fields are unknown on a plain server. Evictions are those of the
        server's processes, none of this one."""
        accepted = (200, *NOT_OURS)
        circuit = self.transport.statistics
        found = await self._small(
            "GET", protocol.STATS, accepted, protocol.read_stats, circuit=circuit
        )
        return replace(found or StoreStats(), evictions=EvictionCounts())

    async def close(self) -> None:
        await self._reports.end_all()
        await self.transport.close()

    async def _small(
        self,
        method: str,
        path: str,
        accepted: Collection[int],
        read: Callable[[bytes], T] | None = None,
        *,
        circuit: Circuit | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T | None:
        """One request with a small answer, as a lookup unless another circuit is given.

        Returns what `read` makes of a body with status 200; None for other accepted statuses, and
        without `read`.
        """

        async def attempt() -> T | None:
            async with self.transport.request(
                method, path, accepted, data=lambda: data, headers=headers
            ) as response:
                if read is None or response.status != 200:
                    return None
                return read(await read_whole(response, protocol.MAX_ANSWER_BYTES))

        async with self._asking:
            circuit = circuit or self.transport.lookups
            size_bytes = protocol.KEY_BYTES + len(data or b"")
            return await self.transport.call(circuit, size_bytes, attempt)


@dataclass(frozen=True, slots=True)
class HttpSource:
    """Implements `StoreSource`."""

    base: str  # without a slash at the end
    token_file: Path | None = None  # None: the user's own token, for a loopback address only
    ca: Path | None = None  # trusted certificates; None: those of the system
    reads_count: bool = True  # whether the server counts a GET as a use of the block
    check_s: float = CHECK_S  # limit for `check`
    max_namespaces_bytes: int = MAX_NAMESPACES_BYTES  # a longer list is an error

    def check(self) -> None:
        """Check that the files can be read, and that the server, if it answers, has a certificate
        that is trusted and takes the token.

        A server that does not answer is not reported: it may start later.

        Raises: ConfigError.
        """
        self.locate()
        io = IoThread()  # this thread may run an event loop
        try:
            io.run(self._ask(), self.check_s)
        except RemoteError as error:
            raise ConfigError(f"{self.base}: {error}") from None
        except aiohttp.ClientConnectorCertificateError as error:
            found = error.certificate_error
            why = found.verify_message if isinstance(found, ssl.CertificateError) else found
            raise ConfigError(
                f"{self.base}: its certificate is refused: {one_line(why)}; it needs one that is "
                "valid now, for this host, and from a CA of this machine or of the file of "
                "?ca=/path in the URL"
            ) from None
        except (aiohttp.ClientError, OSError):  # includes TimeoutError
            pass
        finally:
            io.close()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return HttpStore(self.locate, frame, depth=depth)

    async def namespaces(self) -> list[StoredNamespace]:
        """Raises: StoreUnavailable, always on a plain server."""
        transport = HttpTransport(self.locate, TimeoutLimits())

        found: list[StoredNamespace] = []

        async def attempt() -> tuple[list[StoredNamespace], int, bool]:
            path = protocol.namespaces_path(found[-1].digest if found else None)
            async with transport.request("GET", path, (200,)) as response:
                body = await read_whole(response, protocol.MAX_ANSWER_BYTES)
                # A server of 0.1.0 lists all at once.
                has_more = response.headers.get(protocol.MORE_HEADER) == protocol.MORE
                return protocol.read_namespaces(body), len(body), has_more

        try:
            size_bytes = 0
            while True:
                page, page_bytes, has_more = await transport.call(
                    transport.lookups, protocol.KEY_BYTES, attempt
                )
                last = found[-1].digest if found else b""
                found += page
                if not has_more:
                    return found
                if not page or page[-1].digest <= last:
                    raise StoreUnavailable("the pages of the list are out of order")
                size_bytes += page_bytes
                if size_bytes > self.max_namespaces_bytes:
                    raise StoreUnavailable(f"a list of more than {self.max_namespaces_bytes} bytes")
        except StoreUnavailable as error:
            raise StoreUnavailable(f"cannot list namespaces: {error}") from error
        finally:
            await transport.close()

    async def _ask(self) -> None:
        """Raises: RemoteError if the token is refused; aiohttp.ClientError, OSError."""
        transport = HttpTransport(self.locate, TimeoutLimits())
        try:
            async with transport.request("GET", protocol.STATS, None) as response:
                if response.status == 401:
                    await refuse(response)
        finally:
            await transport.close()

    def describe(self) -> StoreLayer:
        settings = {"base": self.base, "token_file": self.token_file, "ca": self.ca}
        return StoreLayer("HttpStore", settings)

    def locate(self) -> Endpoint:
        """The endpoint, with the present content of the files. Raises: ConfigError."""
        ca = b""
        tls = None
        if self.ca is not None:
            try:
                ca = self.ca.read_bytes()
                tls = ssl.create_default_context(cafile=self.ca)
            except OSError as error:  # includes SSLError, for text that is no certificate
                words = error.strerror or "no certificates in it"
                raise ConfigError(f"ca file {self.ca} cannot be read: {words}") from None
        return Endpoint(self.base, self._token(), ca, tls, self.reads_count)

    def _token(self) -> str | None:
        """Raises: ConfigError."""
        if self.token_file is not None:
            return load_tokens(self.token_file)[0]
        if not is_loopback(urlsplit(self.base).hostname or ""):
            return None
        try:
            path = own_token_path()
        except ConfigError:  # no home folder
            return None
        return load_tokens(path)[0] if os.path.exists(path) else None


def parse(url: StoreUrl) -> HttpSource:
    """Raises: ConfigError."""
    source = HttpSource(
        base=_base(url),
        token_file=url.option("token_file", absolute_path, None),
        ca=url.option("ca", absolute_path, None),
        reads_count=url.reads_count,
    )
    if source.ca is not None and url.scheme != "https":
        raise url.error("'ca' needs https")
    return source


def _base(url: StoreUrl) -> str:
    if "@" in url.place:
        raise url.error("write no user or password in it, use ?token_file=/path")
    if "#" in url.place or not url.place.isascii() or not url.place.isprintable():
        raise url.error("not a URL of a server, write for example http://host:8700")
    try:
        parts = urlsplit(f"{url.scheme}://{url.place}")
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # as each connection does
    except ValueError:  # its message could quote a part of a password
        raise url.error("host or port cannot be read, write for example http://host:8700") from None
    if not host or " " in url.place:
        raise url.error("names no host, write for example http://host:8700")
    return f"{url.scheme}://{url.place}".rstrip("/")
