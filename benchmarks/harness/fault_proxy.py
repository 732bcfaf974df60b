"""A proxy in front of an HTTP server of this machine, which injects faults into its answers."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import aiohttp
from yarl import URL

from benchmarks.harness.slow_link import PIECE_BYTES, SlowLink

READ_METHODS = ("GET",)
LATE_S = 2.0
# Headers of one connection; the proxy sets the length itself.
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
_REDIRECT = b"Location: http://user:secret@127.0.0.1:9/elsewhere?signature=ab\r\n"
HUGE_BYTES = 100 << 30


@dataclass(eq=False)
class Exchange:
    """One request, and the server's answer before it is sent to the client."""

    method: str
    path: str
    status: int
    fields: bytes  # header lines of the answer, without its length
    body: bytes
    length: int | None  # Content-Length of the answer; None: it has none
    link: "FaultProxy"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def head(self, length: int | None) -> bytes:
        """The head of the answer, with this Content-Length."""
        line = b"" if length is None else f"Content-Length: {length}\r\n".encode()
        return f"HTTP/1.1 {self.status} x\r\n".encode() + self.fields + line + b"\r\n"

    async def send(self, data: bytes) -> None:
        """Send at the link's rate. Raises: OSError if the client has disconnected."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self.link.pass_on(len(piece))
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self) -> None:
        """Send the answer unchanged."""
        await self.send(self.head(self.length) + self.body)

    async def answer_as(self, status: int, fields: bytes = b"", body: bytes = b"no") -> None:
        """Send another answer instead."""
        self.status = status
        self.fields = fields
        self.body = body
        self.length = len(body)
        if self.method == "HEAD":
            self.body = b""
        await self.answer()

    async def half(self) -> None:
        """Send the head, and half of the body."""
        await self.send(self.head(self.length) + self.body[: len(self.body) // 2])

    async def client_left(self) -> None:
        """Wait until the client closes the connection."""
        with contextlib.suppress(OSError):
            while await self.reader.read(PIECE_BYTES):
                pass
        self.writer.close()

    async def trickle(self, data: bytes) -> None:
        """Send byte by byte, with a pause after each."""
        for at in range(len(data)):
            self.writer.write(data[at : at + 1])
            await self.writer.drain()
            await asyncio.sleep(self.link.trickle_s)


Fault = Callable[[Exchange], Awaitable[None]]


async def refused(exchange: Exchange) -> None:
    """Every connection breaks, and new ones are refused."""
    exchange.link.stop()


async def reset(exchange: Exchange) -> None:
    """The connection breaks without an answer."""
    exchange.writer.transport.abort()


async def reset_halfway(exchange: Exchange) -> None:
    """The connection breaks in the middle of the answer."""
    await exchange.half()
    exchange.writer.transport.abort()


async def truncated(exchange: Exchange) -> None:
    """The connection is closed cleanly in the middle of the answer."""
    await exchange.half()
    exchange.writer.close()


async def silent(exchange: Exchange) -> None:
    """No byte is sent."""
    await exchange.client_left()


async def stalled(exchange: Exchange) -> None:
    """No byte is sent after the middle of the answer."""
    await exchange.half()
    await exchange.client_left()


async def trickling(exchange: Exchange) -> None:
    """The body is sent byte by byte."""
    await exchange.send(exchange.head(exchange.length))
    await exchange.trickle(exchange.body)


async def late(exchange: Exchange) -> None:
    """The answer comes `LATE_S` later."""
    await asyncio.sleep(LATE_S)
    await exchange.answer()


async def slow_headers(exchange: Exchange) -> None:
    """The head is sent byte by byte."""
    await exchange.trickle(exchange.head(exchange.length))


async def endless_headers(exchange: Exchange) -> None:
    """The head never ends."""
    await exchange.send(b"HTTP/1.1 200 x\r\n")
    while True:
        await exchange.send(b"X-More: " + b"x" * 1000 + b"\r\n")


async def endless_error(exchange: Exchange) -> None:
    """A status of 500 with a body that never ends."""
    exchange.status = 500
    await endless_body(exchange)


async def endless_body(exchange: Exchange) -> None:
    """The body never ends, and has no length."""
    await exchange.send(exchange.head(None)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        await exchange.send(b"%x\r\n" % PIECE_BYTES + bytes(PIECE_BYTES) + b"\r\n")


async def huge_length(exchange: Exchange) -> None:
    """The answer has a much too large Content-Length."""
    await exchange.send(exchange.head(HUGE_BYTES) + exchange.body)
    await exchange.client_left()


async def too_long(exchange: Exchange) -> None:
    """The answer has one byte more, and a matching Content-Length."""
    await exchange.send(exchange.head(len(exchange.body) + 1) + exchange.body + b"x")


async def too_short(exchange: Exchange) -> None:
    """The answer has one byte less, and a matching Content-Length."""
    await exchange.send(exchange.head(max(0, len(exchange.body) - 1)) + exchange.body[:-1])


async def flipped_bit(exchange: Exchange) -> None:
    """The last bit of the body is flipped."""
    await exchange.send(exchange.head(exchange.length) + flipped(exchange.body))


def flipped(body: bytes) -> bytes:
    """`body` with its last bit flipped."""
    return body[:-1] + bytes([body[-1] ^ 1]) if body else b""


def status(code: int, fields: bytes = b"", body: bytes = b"no") -> Fault:
    """A fault that sends another status instead of the answer."""

    async def fault(exchange: Exchange) -> None:
        await exchange.answer_as(code, fields, body)

    return fault


async def another_block(exchange: Exchange) -> None:
    """The body is that of the first read that was answered."""
    body = exchange.link.first_read or exchange.body
    await exchange.send(exchange.head(len(body)) + body)


def _s3_error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()


FAULTS: dict[str, Fault] = {
    "refused": refused,
    "reset": reset,
    "reset halfway": reset_halfway,
    "truncated": truncated,
    "silent": silent,
    "stalled": stalled,
    "trickling": trickling,
    "late": late,
    "slow headers": slow_headers,
    "endless headers": endless_headers,
    "endless body": endless_body,
    "500, endless body": endless_error,
    "length of 100 GiB": huge_length,
    "a byte too long": too_long,
    "a byte too short": too_short,
    "a flipped bit": flipped_bit,
    "another block": another_block,
    "500": status(500),
    "503": status(503),
    "503, Retry-After 3600": status(503, b"Retry-After: 3600\r\n"),
    "403": status(403, body=_s3_error("AccessDenied")),
    "no such bucket": status(404, body=_s3_error("NoSuchBucket")),
    "redirect": status(307, _REDIRECT),
}


class FaultProxy(SlowLink):
    """A `SlowLink` that parses HTTP. Both ends are on this machine and trusted: it holds whole
    requests and answers in memory."""

    def __init__(
        self, store: int, bytes_per_s: float = math.inf, *, trickle_s: float = 1.0
    ) -> None:
        """Args:
        store: the port of the store.
        bytes_per_s: bandwidth from the store.
        trickle_s: the pause of `Exchange.trickle`.
        """
        self.trickle_s = trickle_s
        self.first_read = b""  # body of the first read that was answered unchanged
        self._fault: Fault | None = None
        self._methods: Collection[str] | None = None
        self._spare = 0
        self._session: aiohttp.ClientSession | None = None
        super().__init__(store, bytes_per_s)

    def spoil(
        self, fault: Fault | None, *, methods: Collection[str] | None = None, spare: int = 0
    ) -> None:
        """Inject `fault` into every later answer; None: into none.

        Args:
            methods: only for these requests; None: for all.
            spare: how many of these answers are first sent unchanged.
        """

        async def change() -> None:
            self._fault = fault
            self._methods = methods
            self._spare = spare
            if not self._server.is_serving():
                await self._listen()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(60)

    def stop(self) -> None:
        """Break every connection, and refuse new ones until `spoil`. The link's thread."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        """As `SlowLink.close`."""
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(60)
        super().close()

    async def pass_on(self, count: int) -> None:
        """Wait until so many bytes have crossed the link."""
        await self._pass(count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        broken = (OSError, aiohttp.ClientError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*broken):
            while not writer.is_closing():
                exchange = await self._ask(reader, writer)
                fault = self._fault_for(exchange)
                if fault is None and exchange.method in READ_METHODS and not self.first_read:
                    self.first_read = exchange.body
                await (fault or Exchange.answer)(exchange)
        self._writers.discard(writer)
        writer.close()

    def _fault_for(self, exchange: Exchange) -> Fault | None:
        if self._methods is not None and exchange.method not in self._methods:
            return None
        if self._fault is not None and self._spare:
            self._spare -= 1
            return None
        return self._fault

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
        """Read a request, and forward it to the server."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.strip().split("\r\n")
        method, path, _ = line.split(" ")
        fields = [
            (name, value.strip()) for name, _, value in (each.partition(":") for each in lines)
        ]
        known = {name.lower(): value for name, value in fields}
        if "expect" in known:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(known.get("content-length", 0)))
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        async with self._session.request(
            method,
            URL(f"http://127.0.0.1:{self._store}{path}", encoded=True),
            headers=[field for field in fields if field[0].lower() not in _HOP],
            data=body or None,
            allow_redirects=False,
        ) as answer:
            header_lines = [
                name + b": " + value + b"\r\n"
                for name, value in answer.raw_headers
                if name.decode("latin-1").lower() not in _HOP
            ]
            data = await answer.read()
            length = len(data)
            if method == "HEAD":
                length = answer.content_length or 0
            bodiless = answer.status in (204, 304)
            return Exchange(
                method=method,
                path=path,
                status=answer.status,
                fields=b"".join(header_lines),
                body=data,
                length=None if bodiless else length,
                link=self,
                reader=reader,
                writer=writer,
            )
