"""When to stop calling a server or disk that fails, and when to try again. No clock in here.

Times are seconds of any monotonic clock.
"""

import math


class Backoff:
    """A pause after a failure, which doubles with each further failure."""

    def __init__(self, first_s: float = 1.0, last_s: float = 60.0) -> None:
        """Args:
        first_s, last_s: length of the first pause, and limit for later ones.
        """
        self._first_s = first_s
        self._last_s = last_s
        self._pause_s = 0.0  # length of the last pause; 0: the next one is the first
        self._until_s = -math.inf

    def left_s(self, now_s: float) -> float:
        """Rest of the pause; 0 if there is none."""
        return max(0.0, self._until_s - now_s)

    def start(self, now_s: float) -> None:
        """Start the next pause, after a failure."""
        self._pause_s = min(2 * self._pause_s, self._last_s) if self._pause_s else self._first_s
        self._until_s = now_s + self._pause_s

    def repeat(self, now_s: float) -> None:
        """Start a pause of the same length as the last one."""
        self._until_s = now_s + self._pause_s

    def skip(self) -> None:
        """End the pause."""
        self._until_s = -math.inf

    def reset(self) -> None:
        """The next pause is the first one again. A pause that has begun goes on."""
        self._pause_s = 0.0


class Breaker:
    """Circuit breaker. Closed: every call goes. Open: none does. Half open: one does, as a probe.

    A caller asks before every call, and reports the result of the call with the ticket that it got.
    Reports with a ticket from before the last change of state are outdated, and ignored.
    """

    def __init__(self, *, failures: int, first_s: float, last_s: float) -> None:
        """Args:
        failures: in a row, until the breaker opens.
        first_s, last_s: length of the first open phase, and limit for later ones. A failed probe
            doubles it.
        """
        self._limit = failures
        self._backoff = Backoff(first_s, last_s)
        self._ticket = 0
        self._failures = 0
        self._probing = False
        self.is_closed = True
        self.openings = 0

    def ask(self, now_s: float) -> int | None:
        """Ticket for a call that starts now; None if no call may start."""
        if not self.is_closed:
            if self._probing or self._backoff.left_s(now_s):
                return None
            self._probing = True
            self._ticket += 1
        return self._ticket

    def succeeded(self, ticket: int) -> None:
        """The call was answered."""
        if ticket != self._ticket:
            return
        self._failures = 0
        if not self.is_closed:
            self.is_closed = True
            self._probing = False
            self._backoff.reset()
            self._ticket += 1

    def failed(self, ticket: int, now_s: float) -> None:
        """The call was not answered, or with a useless answer."""
        if ticket != self._ticket:
            return
        self._failures += 1
        if self._probing or self._failures >= self._limit:
            self.is_closed = False
            self._failures = 0
            self._probing = False
            self._backoff.start(now_s)
            self._ticket += 1
            self.openings += 1

    def may_be_back(self) -> None:
        """Other calls to the same server succeed again: the next call is a probe."""
        self._backoff.skip()

    def abandoned(self, ticket: int) -> None:
        """The call was cancelled. If it was the probe, the next call is one."""
        if ticket == self._ticket and self._probing:
            self._probing = False
            self._ticket += 1
