"""Runs a store server in this process: sockets, TLS, bounds on connections, a clean end."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from sglang_cake.errors import ConfigError
from sglang_cake.store.file.source import FileSource
from sglang_cake.store.http.auth import Gate
from sglang_cake.store.http.server import StoreServer

MAX_CONNECTIONS = 1024
KEEPALIVE_S = 75.0  # of a connection without a request
END_S = 20.0  # how long requests that are under way may take when the server stops
CUT_S = 2.0  # how long those that were cut off then may take to end
LINGER_S = 2.0  # how long the rest of an unwanted body is read, so that the answer arrives
HANDSHAKE_S = 10.0
READ_BYTES = 1 << 17  # of a body that wait in memory until they are looked at
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 0\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What one server serves, where, and for whom."""

    source: FileSource
    host: str
    port: int  # 0: any that is free
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tokens: tuple[str, ...] = ()
    namespace_quota_bytes: int | None = None

    def check(self) -> None:
        """Raises: ConfigError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together")
        if not 0 <= self.port <= 65535:  # the system would take it modulo 65536
            raise ConfigError(f"--port {self.port} is none, allowed: 0 to 65535")
        if not self.tokens and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines in: protect it with --token-file, "
                "or listen on 127.0.0.1"
            )
        self.source.check()


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def serve(settings: ServeSettings, announce: Callable[[str], object]) -> None:
    """Serve until SIGTERM or SIGINT, then let end what is under way, END_S at most.

    Args: announce: called with the store's URL once requests are answered.
    Raises: ConfigError, StoreUnavailable.
    """
    settings.check()
    tls = _tls(settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    _allow_open_files()
    with contextlib.closing(_listen(settings.host, settings.port)) as listening:
        folder = await asyncio.to_thread(settings.source.folder)
        try:
            server = StoreServer(
                folder,
                Gate(settings.tokens),
                namespace_quota_bytes=settings.namespace_quota_bytes,
            )
            try:
                await _run(
                    server, listening, tls, lambda: announce(_url(settings, listening)), stopping
                )
            finally:
                await asyncio.to_thread(server.close)
        finally:
            await asyncio.to_thread(folder.close)


async def _run(
    server: StoreServer,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    ready: Callable[[], object],
    stopping: asyncio.Event,
) -> None:
    http = web.Server(
        server.handle,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        read_bufsize=READ_BYTES,
        logger=_count_bad_requests(server),
    )

    def connect() -> asyncio.Protocol:
        if len(http.connections) >= MAX_CONNECTIONS:
            server.refused_connections += 1
            return _Refusal()
        return http()

    runner = web.ServerRunner(http, shutdown_timeout=CUT_S)
    await runner.setup()
    listener = await asyncio.get_running_loop().create_server(
        connect,
        sock=listening,
        ssl=tls,
        backlog=MAX_CONNECTIONS,
        ssl_handshake_timeout=HANDSHAKE_S if tls else None,
    )
    ready()
    await stopping.wait()
    listener.close()
    # Before `cleanup`, which lets no more bytes of a body in.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await server.drained()
    await runner.cleanup()


def _count_bad_requests(server: StoreServer) -> logging.Logger:
    """What aiohttp logs to: with a traceback for whatever is no HTTP, which anybody could fill a
    disk with. Errors in the handling of requests are logged by the server itself."""

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.bad_requests += 1

    log = logging.Logger("sglang_cake.http.bad_requests", logging.ERROR)
    log.addHandler(Count())
    return log


class _Refusal(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(REFUSAL)
        transport.close()


def _listen(host: str, port: int) -> socket.socket:
    """Raises: ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {words}") from None


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # what cannot be parsed, or does not fit, is an SSLError, which is one
        words = error.strerror or str(error)
        raise ConfigError(f"--tls-cert and --tls-key cannot be used: {words}") from None
    return context


def _url(settings: ServeSettings, listening: socket.socket) -> str:
    """What a client writes; for a server that listens everywhere with this machine's name."""
    host = settings.host
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = socket.gethostname()
        elif address.version == 6:
            host = f"[{host}]"
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _allow_open_files() -> None:
    """Each connection may have a block open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
