"""The connections of one process of the server: how many there may be, and which are kept.

A connection that has shown no valid token keeps its place only until another connection needs it.
When all places are taken, a new connection gets the place of

1. the oldest connection that has shown no token, or else
2. the connection whose last request was answered longest ago.

A connection is never dropped while its request is being answered. If all are, a new connection is
refused.
"""

import enum
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class ConnectionState(enum.Enum):
    """The state of a connection."""

    UNAUTHENTICATED = enum.auto()  # no valid token so far
    IDLE = enum.auto()
    BUSY = enum.auto()  # a request with a valid token is being answered


class Places(Generic[Connection]):
    """The places of a process, and the states of the connections that have them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: dict[Connection, ConnectionState] = {}  # in the order of their last changes

    def __len__(self) -> int:
        return len(self._states)

    def take(self, connection: Connection) -> Connection | None:
        """Give a new connection a place, unless all are busy. Returns the connection that has lost
        its place for that, which the caller has to drop."""
        dropped = None
        if len(self._states) >= self._most:
            dropped = self._first(ConnectionState.UNAUTHENTICATED) or self._first(
                ConnectionState.IDLE
            )
            if dropped is None:
                return None
            self.leave(dropped)
        self._states[connection] = ConnectionState.UNAUTHENTICATED
        return dropped

    def state_of(self, connection: Connection) -> ConnectionState | None:
        """None: the connection has no place."""
        return self._states.get(connection)

    def change(self, connection: Connection, state: ConnectionState) -> None:
        """A request has come or has been answered; nothing if the connection has no place."""
        if self._states.pop(connection, None) is not None:
            self._states[connection] = state

    def leave(self, connection: Connection) -> None:
        """The connection has ended."""
        self._states.pop(connection, None)

    def _first(self, wanted: ConnectionState) -> Connection | None:
        return next((one for one, state in self._states.items() if state is wanted), None)
