"""Connections that were accepted and have not proved themselves yet: a bounded number.

A new one takes the place of the oldest, so that nobody who says nothing, or little, keeps a member
out. Connections from addresses of members are the last to lose their places.
"""

import socket
import threading

from sglang_cake.runahead.wire import end


class Strangers:
    """Those of one member. The thread that serves a connection closes it.

    Args:
        places: how many there may be.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._from_member: dict[socket.socket, bool] = {}  # the oldest first

    def admit(self, connection: socket.socket, *, from_member: bool) -> bool:
        """Give a new connection a place; whether it has one.

        Args:
            from_member: it comes from an address of a member.
        """
        with self._lock:
            self._from_member[connection] = from_member
            if len(self._from_member) <= self._places:
                return True
            # Of equals, `min` finds the oldest.
            loser = min(self._from_member, key=self._from_member.__getitem__)
            del self._from_member[loser]
            if loser is not connection:
                end(loser)
            return loser is not connection

    def leave(self, connection: socket.socket) -> None:
        """It proved itself, or failed to."""
        with self._lock:
            self._from_member.pop(connection, None)

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            for connection in self._from_member:
                end(connection)
