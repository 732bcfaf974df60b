"""When to stop asking a server that does not answer, and when to try again. No clock in here."""


class Breaker:
    """Closed: every call goes. Open: none does. Half open: one does, as a probe.

    Every call asks first and reports how it ended, with the ticket it got. A report with a ticket
    from before the last change of state says nothing about now, and is ignored.
    """

    def __init__(self, *, failures: int, first_s: float, last_s: float) -> None:
        """Args:
        failures: in a row, until it opens.
        first_s, last_s: how long it stays open at first, and at most; doubled by a failed probe.
        """
        self._limit, self._first_s, self._last_s = failures, first_s, last_s
        self._ticket = 0
        self._failures = 0
        self._open_s = first_s  # how long it will be open next time
        self._until_s: float | None = None  # None: closed
        self._probing = False
        self.openings = 0

    @property
    def is_closed(self) -> bool:
        return self._until_s is None

    def ask(self, now_s: float) -> int | None:
        """A ticket for a call that starts now; None if it must not."""
        if self._until_s is not None:
            if self._probing or now_s < self._until_s:
                return None
            self._probing = True
            self._ticket += 1
        return self._ticket

    def succeeded(self, ticket: int) -> None:
        """The call was answered."""
        if ticket != self._ticket:
            return
        self._failures = 0
        if self._until_s is not None:
            self._until_s, self._probing, self._open_s = None, False, self._first_s
            self._ticket += 1

    def failed(self, ticket: int, now_s: float) -> None:
        """The call was not answered, or not with anything of use."""
        if ticket != self._ticket:
            return
        self._failures += 1
        if self._probing or self._failures >= self._limit:
            self._until_s = now_s + self._open_s
            self._open_s = min(2 * self._open_s, self._last_s)
            self._failures, self._probing = 0, False
            self._ticket += 1
            self.openings += 1

    def may_be_back(self, now_s: float) -> None:
        """Other calls to the same server are answered again: the next one is a probe."""
        if self._until_s is not None:
            self._until_s = min(self._until_s, now_s)

    def abandoned(self, ticket: int) -> None:
        """The call was cancelled: it showed nothing. If it was the probe, the next one is."""
        if ticket == self._ticket and self._probing:
            self._probing = False
            self._ticket += 1
