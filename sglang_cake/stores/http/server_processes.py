"""Runs a store server: settings, the listening socket, and gunicorn with its worker processes.

gunicorn starts the workers, replaces a worker that has ended or hangs, and stops all. Each worker
runs an event loop with aiohttp's server on the shared listening socket.
"""

import asyncio
import contextlib
import ipaddress
import logging
import mmap
import os
import resource
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.workers.base import Worker

from sglang_cake.core.backoff import Backoff
from sglang_cake.core.errors import CakeError, ConfigError, StoreUnavailable, one_line
from sglang_cake.core.local_files import temporary_folder
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import ServerCredentials
from sglang_cake.stores.http.request_body import STUCK_S

if TYPE_CHECKING:
    from sglang_cake.stores.http.http_server import StoreServer

logger = logging.getLogger(__name__)

MAX_WORKERS = 64
# Each worker holds the order of eviction in memory, so more workers are only made on request.
DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
BACKLOG = 1024  # connections that wait in the system until a worker accepts them
HANDSHAKE_S = 10.0
BEAT_S = 1.0  # interval of a worker's reports to gunicorn
EVERY_S = 1.0  # interval in which a worker counts blocks, and reads the credentials again
SETTLE_S = 0.2  # after the last accept: requests that have been sent are read in that time
END_S = 20.0  # requests in progress may take so long when the server stops
CUT_S = 2.0  # requests that are cut off then may take so long to end
GRACE_S = 10  # beyond both, before a worker is killed
SETTLED_S = 20.0  # a worker that ends sooner after its start may do so each time
READY = "ready"
NO_FAILURE = "the server ended"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve, on which address, and which files hold the credentials."""

    source: FileSource
    host: str
    port: int  # 0: any free port
    token_file: Path
    read_token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    namespace_quota_bytes: int | None = None
    workers: int = DEFAULT_WORKERS
    max_connections: int = 1024  # over all workers, in equal parts
    hang_s: int = 20  # a worker whose event loop has not run for so long, or at all, is killed

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
    """Serve until SIGTERM or SIGINT, then finish the requests in progress.

    Forks, so no other thread may run. Handlers of signals and a variable of the environment stay:
    the caller ends the process.

    Args: announce: called once with the store's URL, in a worker, when all workers are ready.
    Raises: ConfigError; StoreUnavailable if a worker cannot start at the start, or if none is left.
    """
    settings.check()
    tls = (settings.tls_cert, settings.tls_key)
    credentials = ServerCredentials(
        settings.token_file,
        settings.read_token_file,
        tls_files=None if tls[0] is None or tls[1] is None else (tls[0], tls[1]),
    )
    _allow_open_files(settings.max_connections)
    with temporary_folder("sglang-cake-serve-") as shared:
        listening = _listen(settings.host, settings.port)
        url = _url(settings, listening)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)  # for `server_metrics`, in the workers
        application = _Application(settings, credentials, shared, lambda: announce(url), listening)
        arbiter = _Arbiter(application)
        try:
            arbiter.run()
        except SystemExit as end:
            if end.code:
                raise StoreUnavailable(arbiter.failure) from None


def _listen(host: str, port: int) -> socket.socket:
    """Raises: ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {words}") from None
    # Inherited by each connection: the system closes one whose peer takes no bytes for so long.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STUCK_S))
    return listening


def _url(settings: ServeSettings, listening: socket.socket) -> str:
    """The URL for clients. A server that listens everywhere is named by this machine's name."""
    host = settings.host
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = socket.gethostname()
        elif address.version == 6:
            host = f"[{host}]"
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _allow_open_files(max_connections: int) -> None:
    """Each connection may have a block open, and itself once more while it is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * max_connections + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Application(BaseApplication):
    """gunicorn's settings, and what a worker needs."""

    def __init__(
        self,
        settings: ServeSettings,
        credentials: ServerCredentials,
        shared: Path,
        announce: Callable[[], object],
        listening: socket.socket,
    ) -> None:
        """Args:
        shared: a folder for files of all processes.
        listening: becomes gunicorn's.
        """
        self.settings = settings
        self.credentials = credentials
        self.shared = shared
        self.announced = shared / "announced"  # there once the server has been announced
        self.announce = announce
        self._listening_fd = listening.detach()
        super().__init__()

    def load_config(self) -> None:
        options = {
            "bind": [f"fd://{self._listening_fd}"],
            "backlog": BACKLOG,
            "workers": self.settings.workers,
            "worker_class": _Worker,
            "timeout": self.settings.hang_s,
            "graceful_timeout": int(END_S + CUT_S) + GRACE_S,
            "worker_tmp_dir": str(self.shared),
            "control_socket_disable": True,
            "loglevel": "error",
            "child_exit": _worker_ended,
            "proc_name": "sglang-cake store serve",
        }
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> "_Application":
        return self


def _worker_ended(arbiter: "_Arbiter", worker: "_Worker") -> None:
    """Called by gunicorn."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(worker.pid)
    if arbiter.LISTENERS:  # the server is not stopping
        arbiter.replace(worker)


class _Arbiter(Arbiter):
    """gunicorn's parent process.

    A worker that ends is replaced at once, or after a pause if it ended soon after its start. If
    its replacement cannot start, the other workers go on, and further tries have such pauses
    between them.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, application: "_Application") -> None:
        self._pause = Backoff()
        self.failure = NO_FAILURE
        super().__init__(application)

    def spawn_workers(self) -> None:
        if not self._pause.left_s(time.monotonic()):
            super().spawn_workers()

    def spawn_worker(self) -> None:
        try:
            super().spawn_worker()
        except OSError as error:  # no memory, process or descriptor
            self._not_started(str(error))
        except SystemExit:  # in the new process, before `_Worker.run`
            os._exit(1)

    def replace(self, worker: "_Worker") -> None:
        """A worker has ended. Raises: HaltServer."""
        if worker.start_report != READY:
            self._not_started(worker.start_report or "a worker ended before it was ready")
            return
        now_s = time.monotonic()
        if now_s >= worker.started_s + SETTLED_S:
            self._pause.reset()
            self.failure = NO_FAILURE
        else:
            self._rest(now_s)
        left_s = self._pause.left_s(now_s)
        logger.warning("worker %d ended and is replaced in %.0f s", worker.pid, left_s)

    def _not_started(self, reason: str) -> None:
        """Raises: HaltServer at the start, and if no worker is left: a service manager sees it."""
        is_new = reason != self.failure
        self.failure = reason
        if not self.WORKERS or not self.app.announced.exists():
            raise HaltServer("a worker could not start", 1)
        if is_new:
            logger.warning(
                "a worker cannot start; the others go on, and it is tried every 1 to 60 s: %s",
                reason,
            )
        self._rest(time.monotonic())

    def _rest(self, now_s: float) -> None:
        """Begin a pause, unless there is one: workers that end together count once."""
        if not self._pause.left_s(now_s):
            self._pause.start(now_s)

    def handle_int(self) -> None:
        """As SIGTERM: finish the requests in progress. A second SIGINT cuts them off."""
        raise StopIteration


class _Worker(Worker):
    """gunicorn's handle on a worker process; `run` is the process."""

    wsgi: _Application

    def __init__(self, *args: Any) -> None:
        """In the parent process."""
        super().__init__(*args)
        self.started_s = time.monotonic()
        # Shared with the parent. No file, since a worker may not start because a disk is full.
        self._start_report = mmap.mmap(-1, mmap.PAGESIZE)
        self.notify()  # gunicorn never kills a worker of which there is no report

    @property
    def start_report(self) -> str:
        """READY, or why the worker cannot start; empty before that."""
        return self._start_report[:].rstrip(b"\0").decode(errors="replace")

    def _tell(self, text: str) -> None:
        self._start_report[:] = text.encode(errors="replace").ljust(mmap.PAGESIZE, b"\0")

    def init_signals(self) -> None:
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def run(self) -> None:
        """Never returns: the stack below belongs to the parent process."""
        status = 1
        self.booted = False
        try:
            asyncio.run(self._work())
            status = 0
        except (CakeError, OSError, MemoryError) as error:
            if self.booted:
                traceback.print_exc()
            else:
                self._tell(one_line(error) or type(error).__name__)
                status = 0  # gunicorn logs a line for any other one
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    async def _work(self) -> None:
        """Answer requests until SIGTERM or SIGINT, or until the parent is gone.

        Raises: CakeError if the worker cannot start.
        """
        # `server_metrics` can only be imported after `serve` has set a variable for it.
        from sglang_cake.stores.http.http_server import StoreServer
        from sglang_cake.stores.http.server_metrics import ServerMetrics

        settings = self.wsgi.settings
        credentials = self.wsgi.credentials
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            loop.add_signal_handler(number, stopping.set)
        tasks = [asyncio.create_task(self._report(stopping))]
        await asyncio.to_thread(credentials.refresh)  # read before the first fork
        folder = await asyncio.to_thread(settings.source.folder)
        try:
            store = StoreServer(
                folder,
                credentials,
                ServerMetrics(),
                most_connections=settings.max_connections // settings.workers,
                workers=settings.workers,
                namespace_quota_bytes=settings.namespace_quota_bytes,
            )
            listening = await loop.create_server(
                store,
                sock=self.sockets[0].sock,
                backlog=BACKLOG,
                ssl=credentials.tls,
                ssl_handshake_timeout=None if credentials.tls is None else HANDSHAKE_S,
            )
            self.booted = True
            self._tell(READY)
            self._announce()
            tasks.append(asyncio.create_task(_look_after(store, credentials)))
            await stopping.wait()
            # Accept no more. `close` at once would drop connections that asyncio has accepted and
            # not yet set up.
            loop.remove_reader(listening.sockets[0])
            await asyncio.sleep(SETTLE_S)
            listening.close()
            if self._parent_lives():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await store.drained()
            store.pre_shutdown()
            await store.shutdown(CUT_S)
            for task in tasks:
                task.cancel()
            store.count_blocks()
            await asyncio.to_thread(store.close)
        finally:
            await asyncio.to_thread(folder.close)
        if not self._parent_lives():  # which would have removed it
            shutil.rmtree(self.wsgi.shared, ignore_errors=True)

    def _announce(self) -> None:
        """The last worker that becomes ready at the start announces the server."""
        application = self.wsgi
        (application.shared / f"ready-{self.pid}").touch()
        if len(list(application.shared.glob("ready-*"))) >= application.settings.workers:
            with contextlib.suppress(FileExistsError):
                application.announced.touch(exist_ok=False)
                application.announce()

    def _parent_lives(self) -> bool:
        return bool(os.getppid() == self.ppid)

    async def _report(self, stopping: asyncio.Event) -> None:
        """Every BEAT_S: report to gunicorn that the event loop runs, also while a start is slow."""
        while True:
            self.notify()
            if not self._parent_lives():
                stopping.set()
            await asyncio.sleep(BEAT_S)


async def _look_after(store: "StoreServer", credentials: ServerCredentials) -> None:
    """Every EVERY_S: count evictions and corrupt blocks, and read tokens and certificate again."""
    warned = ""
    while True:
        store.count_blocks()
        await asyncio.sleep(EVERY_S)
        try:
            await asyncio.to_thread(credentials.refresh)
            warned = ""
        except ConfigError as error:
            if warned != str(error):
                warned = str(error)
                logger.warning("%s; the former content stays in force", warned)
