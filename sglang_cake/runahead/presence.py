"""Whether a peer is here: there is a connection in each direction, and both live.

One alone is of no use. When one ends both do, and each side dials anew. Neither side may count what
is left of an old pair as half of the new one, or they would part and meet again without end.
"""

import socket
import threading
from collections.abc import Callable
from typing import Protocol

from sglang_cake.runahead.wire import end


class Outgoing(Protocol):
    """The connection to the peer."""

    def is_alive(self) -> bool:
        """Whether it is up, and the peer has not ended it."""
        ...

    def close(self) -> None:
        """It counts no more. Whoever writes on it dials anew."""
        ...


class Presence:
    """One peer's.

    Args:
        outgoing: to the peer.
        came, went: told when the peer comes, and why it is gone. Must not wait.
    """

    def __init__(
        self, outgoing: Outgoing, came: Callable[[], None], went: Callable[[str], None]
    ) -> None:
        self._outgoing, self._came, self._went = outgoing, came, went
        # Held while news are told too, so that a return is never told of before the parting.
        self._lock = threading.Lock()
        self._incoming: socket.socket | None = None
        self.is_here = False

    def answered(self, connection: socket.socket) -> None:
        """The peer dialed, and may be read from."""
        with self._lock:
            if self._incoming is not None:
                # The peer has given the old pair up. Ours of it may seem to live still.
                end(self._incoming)
                self._incoming = None
                self._judge("it dialed anew")
            self._incoming = connection
            self._judge("")

    def ended(self, connection: socket.socket, reason: str) -> None:
        """A connection that was read from ended."""
        with self._lock:
            if self._incoming is connection:
                self._incoming = None
            self._judge(reason)

    def judge(self, reason: str) -> None:
        """The outgoing connection came up, or went down."""
        with self._lock:
            self._judge(reason)

    def close(self) -> None:
        """End both."""
        with self._lock:
            self._end()

    def _judge(self, reason: str) -> None:
        both = self._incoming is not None and self._outgoing.is_alive()
        if both == self.is_here:
            return
        self.is_here = both
        if both:
            self._came()
        else:
            self._end()
            self._went(reason)

    def _end(self) -> None:
        self._outgoing.close()
        if self._incoming is not None:
            end(self._incoming)
            self._incoming = None
