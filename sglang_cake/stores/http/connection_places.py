"""Which connections a worker keeps when more come than it has places for.

Whoever shows no valid token holds a place only until somebody else needs it: the oldest such
connection makes room first, then the one whose last answer is longest ago. A connection whose
request is being answered is never cut off for another.
"""

from collections.abc import Callable


class Place:
    """The place of one connection. All its methods may be called after it has left."""

    __slots__ = ("_among", "_places", "drop")

    def __init__(self, places: "Places", drop: Callable[[], object]) -> None:
        self._places, self._among = places, places.strangers
        self.drop = drop

    @property
    def is_known(self) -> bool:
        """Whether a request with a valid token has come over the connection."""
        return self._among is not self._places.strangers

    def begin(self) -> None:
        """A request with a valid token has come."""
        self._move(self._places.busy)

    def end(self) -> None:
        """The request has its answer."""
        self._move(self._places.idle)

    def leave(self) -> bool:
        """The connection has ended; False if it had left before."""
        return self._among.pop(self, False) is None

    def _move(self, there: "dict[Place, None]") -> None:
        if self.leave():
            there[self], self._among = None, there


class Places:
    """All places of a worker. Each dict is in the order in which connections came into it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.strangers: dict[Place, None] = {}
        self.idle: dict[Place, None] = {}
        self.busy: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self.strangers) + len(self.idle) + len(self.busy)

    def take(self, drop: Callable[[], object]) -> tuple[Place | None, Place | None]:
        """A place for a new connection, and the one that has left for it, whose connection the
        caller drops. No place if all are busy.

        Args: drop: ends the connection; may be set to another later.
        """
        left = None
        if len(self) >= self._most:
            left = next(iter(self.strangers or self.idle), None)
            if left is None:
                return None, None
            left.leave()
        place = Place(self, drop)
        self.strangers[place] = None
        return place, left
