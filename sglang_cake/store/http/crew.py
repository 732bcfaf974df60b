"""The processes of a store server: one listens, the others answer.

The parent deals every new connection to the worker with the fewest, over a Unix socket (the
channel), and reads nothing of it itself. A worker that ends without being told to is replaced; the
connections it had are lost, which a client takes for any other broken connection.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_cake.errors import StoreUnavailable
from sglang_cake.store.http.tally import Row, Tally

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024  # over all workers
END_S = 20.0  # how long requests that are under way may take when the server stops
CUT_S = 2.0  # how long those that were cut off then may take to end
LATE_S = 10.0  # beyond both, before a worker is killed
REPLACE_AFTER_S = 1.0  # since its place was last filled
ACCEPT_AT_ONCE = 64
# What is said over a channel. A worker that cannot begin says why instead of READY.
READY, STOP = b"\x06", b"\x04"
CONNECTION, REFUSE = b"c", b"r"  # with the connection's descriptor
MAX_WORDS_BYTES = 1000


@dataclass(slots=True)
class _Worker:
    """One place in the crew, and who fills it."""

    counts: Row
    pid: int = 0  # 0: nobody
    channel: socket.socket | None = None
    began: bool = False
    ready: bool = False  # for connections
    started_s: float = 0.0

    @property
    def open_connections(self) -> int:
        return self.counts["dealt_connections"] - self.counts["closed_connections"]


class Crew:
    """Forks, so it must run where there are no threads yet."""

    def __init__(
        self,
        listening: socket.socket,
        tally: Tally,
        answer: Callable[[socket.socket, Row], None],
    ) -> None:
        """Args:
        listening: stays the caller's.
        tally: with a row for each worker there is to be.
        answer: what a worker does; it says READY over the channel and ends when it hears STOP.
        """
        self._listening, self._answer = listening, answer
        self._workers = [_Worker(counts) for counts in tally.rows]
        self._selector = selectors.DefaultSelector()
        self._told: socket.socket | None = None  # where signals arrive
        self._stopping = False

    def run(self, announce: Callable[[], object]) -> None:
        """Until SIGTERM or SIGINT. Args: announce: called once all workers are ready.

        Raises: StoreUnavailable if a worker cannot begin; the others have ended then.
        """
        with self._signals(), contextlib.closing(self._selector):
            try:
                for worker in self._workers:
                    self._start(worker)
                self._until(lambda: all(worker.ready for worker in self._workers))
                self._listening.setblocking(False)
                self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
                if not self._stopping:
                    announce()
                self._until(lambda: False)
            finally:
                self._listening.close()
                self._end()

    def _until(self, done: Callable[[], bool]) -> None:
        while not self._stopping and not done():
            for key, _ in self._selector.select(self._replace()):
                key.data()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT wake the loop; what was there before is put back."""
        self._told, wake = socket.socketpair()
        with self._told, wake:
            wake.setblocking(False)
            old_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            numbers = (signal.SIGTERM, signal.SIGINT)
            old = {number: signal.signal(number, lambda *_: None) for number in numbers}
            self._selector.register(self._told, selectors.EVENT_READ, self._signalled)
            try:
                yield
            finally:
                signal.set_wakeup_fd(old_fd)
                for number, handler in old.items():
                    signal.signal(number, handler)

    def _signalled(self) -> None:
        self._stopping = True

    # ---- connections ----

    def _accept(self) -> None:
        ready = [worker for worker in self._workers if worker.ready]
        if not ready:  # they are being replaced; connections wait in the system's queue
            time.sleep(0.01)
            return
        for _ in range(ACCEPT_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except OSError:  # none is left, or it is gone again, or too many files are open
                return
            with connection:
                self._deal(connection, ready)

    def _deal(self, connection: socket.socket, ready: list[_Worker]) -> None:
        open_connections = sum(worker.open_connections for worker in ready)
        word = REFUSE if open_connections >= MAX_CONNECTIONS else CONNECTION
        for worker in sorted(ready, key=lambda worker: worker.open_connections):
            assert worker.channel is not None
            worker.counts["dealt_connections"] += 1  # before it can be answered
            try:
                socket.send_fds(worker.channel, [word], [connection.fileno()])
            except OSError:  # it has just ended, or takes none in any more: the next one
                worker.counts["dealt_connections"] -= 1
                continue
            return

    # ---- workers ----

    def _start(self, worker: _Worker) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker.pid = os.fork()
        if worker.pid == 0:
            self._be_worker(worker, ours, theirs)  # never returns
        theirs.close()
        ours.setblocking(False)
        worker.channel, worker.began, worker.ready = ours, False, False
        worker.started_s = time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._heard(worker))

    def _be_worker(self, worker: _Worker, ours: socket.socket, theirs: socket.socket) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)  # or our signals would be the parent's
            ours.close()
            self._listening.close()
            for other in self._workers:  # a channel must end with the parent
                if other.channel is not None:
                    other.channel.close()
            theirs.setblocking(False)
            self._answer(theirs, worker.counts)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _heard(self, worker: _Worker) -> None:
        assert worker.channel is not None
        try:
            said = worker.channel.recv(MAX_WORDS_BYTES)
        except OSError:
            said = b""
        if said == READY:
            worker.began = worker.ready = True
            return
        if said == STOP:  # somebody told this worker alone to end
            worker.ready = False
            return
        status = self._reap(worker)
        if not worker.began:
            raise StoreUnavailable(said.decode(errors="replace") or f"a worker ended: {status}")
        logger.warning("worker %d ended (%s), and is replaced", worker.pid, status)

    def _reap(self, worker: _Worker) -> str:
        """Its channel has closed, or it said that it cannot go on: it ends, or has ended."""
        assert worker.channel is not None
        self._selector.unregister(worker.channel)
        worker.channel.close()
        worker.channel, worker.ready = None, False
        _, status = os.waitpid(worker.pid, 0)
        worker.counts.begin_anew()
        code = os.waitstatus_to_exitcode(status)
        return f"exit status {code}" if code >= 0 else f"signal {-code}"

    def _replace(self) -> float | None:
        """Fill empty places; returns when to look again, None if nothing is to be done."""
        wait_s = None
        for worker in self._workers:
            if worker.channel is None:
                left_s = worker.started_s + REPLACE_AFTER_S - time.monotonic()
                if left_s > 0:
                    wait_s = left_s if wait_s is None else min(wait_s, left_s)
                else:
                    self._start(worker)
        return wait_s

    def _end(self) -> None:
        """Have all workers end well; kill who does not in time."""
        left = [worker for worker in self._workers if worker.channel is not None]
        for worker in left:
            assert worker.channel is not None
            with contextlib.suppress(OSError):
                worker.channel.send(STOP)
        until_s = time.monotonic() + END_S + CUT_S + LATE_S
        for worker in left:
            assert worker.channel is not None
            worker.channel.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                while worker.channel.recv(MAX_WORDS_BYTES):
                    pass
            except TimeoutError:
                os.kill(worker.pid, signal.SIGKILL)
            except OSError:
                pass
            self._reap(worker)
