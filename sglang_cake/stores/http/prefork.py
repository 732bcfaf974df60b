"""The processes of a store server: one listens, the others answer.

The parent deals every new connection to the worker with the fewest, over a Unix socket (the
channel), and reads nothing of it itself. A worker that ends without being told to is replaced, and
so is one that does nothing any more; the connections it had are lost, which a client takes for any
other broken connection.
"""

import contextlib
import errno
import logging
import math
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.http.shared_counters import Row, SharedCounters

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024  # over all workers, in equal parts
END_S = 20.0  # how long requests that are under way may take when the server stops
CUT_S = 2.0  # how long those that were cut off then may take to end
LATE_S = 10.0  # beyond both, before a worker is killed
REPLACE_AFTER_S = 1.0  # since its place was last filled
LOOK_S = 1.0  # between two looks at the workers
# A worker counts a beat a second, and is killed after so many looks without one. Looks are counted,
# not seconds: while the parent is stopped as well, nobody is judged.
DEAD_LOOKS = 20
ACCEPT_AT_ONCE = 64
DEAL_AGAIN_S = 0.005  # after no worker took a connection in
# Of `accept`, where nothing but time helps.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# What is said over a channel. A worker that cannot begin says why instead of READY.
READY, STOP = b"\x06", b"\x04"
CONNECTION = b"c"  # with its descriptor
MAX_WORDS_BYTES = 1000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(slots=True)
class _Worker:
    """One place in the crew, and who fills it."""

    counts: Row
    pid: int = 0  # 0: nobody
    channel: socket.socket | None = None  # until its end has closed
    began: bool = False
    ready: bool = False  # for connections
    started_s: float = -math.inf
    beats: int = 0  # when it was last looked at
    silent_looks: int = 0  # in a row

    @property
    def open_connections(self) -> int:
        return self.counts["dealt_connections"] - self.counts["closed_connections"]


class WorkerPool:
    """Forks, so it must run where there are no threads yet."""

    def __init__(
        self,
        listening: socket.socket,
        tally: SharedCounters,
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
        self._failure: str | None = None
        self._listens, self._has_room = False, True
        self._undealt: socket.socket | None = None  # accepted, and no worker took it in yet
        self._look_at_s = 0.0

    def run(self, announce: Callable[[], object]) -> None:
        """Until SIGTERM or SIGINT. Args: announce: called once all workers are ready.

        Raises: StoreUnavailable if a worker cannot begin; the others have ended then.
        """
        with self._signals(), contextlib.closing(self._selector):
            try:
                self._until(lambda: all(worker.ready for worker in self._workers))
                self._listening.setblocking(False)
                if not self._stopping:
                    announce()
                    self._listens = True
                self._until(lambda: False)
            finally:
                self._end()

    def _until(self, done: Callable[[], bool]) -> None:
        """Raises: StoreUnavailable if a worker cannot begin."""
        while not self._stopping and not done():
            self._hear(self._tend())
            if self._failure is not None:
                raise StoreUnavailable(self._failure)

    def _hear(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the loop; what was there before is put back."""
        self._told, wake = socket.socketpair()
        with self._told, wake:
            self._told.setblocking(False)
            wake.setblocking(False)
            old_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            old = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            self._selector.register(self._told, selectors.EVENT_READ, self._signalled)
            try:
                yield
            finally:
                signal.set_wakeup_fd(old_fd)
                for number, handler in old.items():
                    signal.signal(number, handler)

    def _signalled(self) -> None:
        assert self._told is not None
        numbers = set(self._told.recv(4096))
        self._stopping |= bool(numbers & {signal.SIGTERM, signal.SIGINT})
        if signal.SIGCHLD in numbers:
            self._reap()

    def _tend(self) -> float:
        """Fill empty places, look at workers and at whether to listen; returns until when there
        is nothing more to do."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s, self._has_room = now_s + LOOK_S, True
            for worker in self._workers:
                self._look(worker)
        wait_s = self._look_at_s - now_s
        for worker in self._workers:
            if not worker.pid:
                left_s = worker.started_s + REPLACE_AFTER_S - now_s
                if left_s > 0:
                    wait_s = min(wait_s, left_s)
                else:
                    self._start(worker)
        if self._undealt is not None:
            self._deal(self._undealt)
        if self._undealt is not None:
            wait_s = min(wait_s, DEAL_AGAIN_S)
        # Who is not accepted waits in the system's queue.
        ready = any(worker.ready for worker in self._workers)
        self._listen(self._listens and self._has_room and ready and self._undealt is None)
        return wait_s

    # ---- connections ----

    def _listen(self, wanted: bool) -> None:
        if wanted == (self._listening in self._selector.get_map()):
            return
        if wanted:
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        else:
            self._selector.unregister(self._listening)

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except OSError as error:  # none is left, or it is gone again
                if error.errno in NO_ROOM:  # it would be reported again at once
                    self._has_room = False
                    logger.warning("no connection is accepted: %s", error.strerror)
                return
            self._deal(connection)
            if self._undealt is not None:
                return

    def _deal(self, connection: socket.socket) -> None:
        """Give it to a worker, or keep it until one takes it in."""
        self._undealt = connection
        ready = [worker for worker in self._workers if worker.ready]
        for worker in sorted(ready, key=lambda worker: worker.open_connections):
            assert worker.channel is not None
            worker.counts["dealt_connections"] += 1  # before it can be answered
            try:
                socket.send_fds(worker.channel, [CONNECTION], [connection.fileno()])
            except OSError:  # it has just ended, or takes none in any more: the next one
                worker.counts["dealt_connections"] -= 1
                continue
            connection.close()
            self._undealt = None
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
        worker.beats, worker.silent_looks = 0, 0
        worker.started_s = time.monotonic()
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._heard(worker))

    def _be_worker(self, worker: _Worker, ours: socket.socket, theirs: socket.socket) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)  # or our signals would be the parent's
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours.close()
            self._listening.close()
            if self._undealt is not None:
                self._undealt.close()
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

    def _look(self, worker: _Worker) -> None:
        beats = worker.counts["beats"]
        silent = worker.ready and beats == worker.beats
        worker.beats, worker.silent_looks = beats, worker.silent_looks + 1 if silent else 0
        if worker.silent_looks >= DEAD_LOOKS:
            logger.warning("worker %d does nothing any more, and is killed", worker.pid)
            worker.ready = False
            os.kill(worker.pid, signal.SIGKILL)

    def _heard(self, worker: _Worker) -> None:
        if worker.channel is None:  # it was reaped in the same turn
            return
        try:
            said = worker.channel.recv(MAX_WORDS_BYTES)
        except OSError:
            said = b""
        worker.ready = said == READY
        if said == READY:
            worker.began = True
        elif not said:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None
        elif said != STOP:  # somebody may have told this worker alone to end
            self._failure = said.decode(errors="replace")
            os.kill(worker.pid, signal.SIGKILL)  # it has nothing that must end well

    def _reap(self) -> None:
        """Take note of workers that have ended."""
        for worker in self._workers:
            if not worker.pid:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if not pid:
                continue
            while worker.channel is not None:  # its last words
                self._heard(worker)
            code = os.waitstatus_to_exitcode(status)
            how = f"exit status {code}" if code >= 0 else f"signal {-code}"
            if worker.began and not self._stopping:
                logger.warning("worker %d ended (%s), and is replaced", worker.pid, how)
            if not worker.began and self._failure is None:
                self._failure = f"a worker ended: {how}"
            worker.pid = 0
            worker.counts.begin_anew()

    def _end(self) -> None:
        """Have all workers end well; kill who does not in time. One that not even that ends,
        because its disk hangs, is left behind."""
        self._listen(False)
        self._listening.close()
        if self._undealt is not None:
            self._undealt.close()
        self._stopping = True
        for worker in self._workers:
            if worker.channel is not None:
                with contextlib.suppress(OSError):
                    worker.channel.send(STOP)
        self._wait_for_all(END_S + CUT_S + LATE_S)
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGKILL)
        self._wait_for_all(LATE_S)

    def _wait_for_all(self, at_most_s: float) -> None:
        until_s = time.monotonic() + at_most_s
        while any(worker.pid for worker in self._workers):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self._hear(left_s)
