"""Runs a store server: settings, sockets, TLS, and the processes that answer."""

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import Access
from sglang_cake.stores.http.prefork import MAX_CONNECTIONS, WorkerPool
from sglang_cake.stores.http.shared_counters import Row, SharedCounters
from sglang_cake.stores.http.worker import work

MAX_WORKERS = 64
# Each worker knows the order of eviction by heart, so more are for who asks for them.
DEFAULT_WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What one server serves, where, and for whom."""

    source: FileSource
    host: str
    port: int  # 0: any that is free
    token_file: Path
    read_token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    namespace_quota_bytes: int | None = None
    workers: int = DEFAULT_WORKERS

    def check(self) -> None:
        """Raises: ConfigError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together")
        if not 0 <= self.port <= 65535:  # the system would take it modulo 65536
            raise ConfigError(f"--port {self.port} is none, allowed: 0 to 65535")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers {self.workers} is none, allowed: 1 to {MAX_WORKERS}")
        self.source.check()


def serve(settings: ServeSettings, announce: Callable[[str], object]) -> None:
    """Serve until SIGTERM or SIGINT, then let end what is under way. Forks: no threads before.

    Args: announce: called with the store's URL once requests are answered.
    Raises: ConfigError, StoreUnavailable.
    """
    settings.check()
    cert, key = settings.tls_cert, settings.tls_key
    tls_files = (cert, key) if cert and key else None
    access = Access(settings.token_file, settings.read_token_file, tls_files)
    _allow_open_files()

    def answer(channel: socket.socket, counts: Row) -> None:
        most, quota_bytes = MAX_CONNECTIONS // settings.workers, settings.namespace_quota_bytes
        asyncio.run(work(channel, settings.source, access, counts, most, quota_bytes))

    with contextlib.closing(_listen(settings.host, settings.port)) as listening:
        crew = WorkerPool(listening, SharedCounters(settings.workers), answer)
        crew.run(lambda: announce(_url(settings, listening)))


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
    """Each connection may have a block open, and itself once more while it is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * MAX_CONNECTIONS + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
