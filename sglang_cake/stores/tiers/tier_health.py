"""Whether a tier may be used: a small state machine, with the clock passed in.

                  FAILURES_IN_A_ROW failures
     WELL ------------------------------------> OUT until a back-off ends
      ^                                          |  |  ^
      |              success                     |  |  | failure: the back-off doubles
      +------------------------------------------+  +--+

While a tier is out, one call is let through at the end of each back-off, as a trial. A trial that
never comes back costs nothing more: the next is due after another back-off.
"""

FAILURES_IN_A_ROW = 3
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


class TierHealth:
    """The state of one tier for one kind of call. Times are seconds of any one steady clock."""

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._backoff_s = FIRST_BACKOFF_S
        self._trial_s: float | None = None  # out: when the next trial is due

    @property
    def is_well(self) -> bool:
        """Calls may go there without further ado."""
        return self._trial_s is None

    def may_try(self, now_s: float) -> bool:
        """It is well, or a trial is due."""
        return self._trial_s is None or now_s >= self._trial_s

    def begin(self, now_s: float) -> bool:
        """A call goes there; True if it is a trial. The next trial is due a back-off later."""
        if self._trial_s is None:
            return False
        self._trial_s = now_s + self._backoff_s
        return True

    def succeeded(self) -> None:
        """It did what it was asked, or said that it cannot."""
        self._failures = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._trial_s = None

    def failed(self, now_s: float, *, trial: bool) -> bool:
        """It did not answer, or wrongly. True if this is what put it out.

        Calls that were under way when it went out fail too; they prove nothing new, so that only a
        trial makes the back-off grow.
        """
        self._failures += 1
        if self._trial_s is None and self._failures >= FAILURES_IN_A_ROW:
            self._trial_s = now_s + self._backoff_s
            return True
        if self._trial_s is not None and trial:
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            self._trial_s = now_s + self._backoff_s
        return False
