"""Lets the scheduler thread sleep while it only waits for loads."""

import math
import os
import time
from typing import Any

# A poll holds the interpreter, which the threads that load need too. So the scheduler thread sleeps
# for so many times as long as it was awake: it is awake for a twentieth of the time. With a tenth,
# and 5 ms at most, a server on two cores loaded at 0.9 of the rate (`benchmarks load_rate`). The
# longest sleep is `_LONGEST_S`, or half of the time that the loads will take, but `_LEAST_LIMIT_S`
# at least. Decisions depend on that time: an overlapped last step begins before the loads are over.
_TIMES_AWAKE = 19
_LONGEST_S = 0.05
_LEAST_LIMIT_S = 0.002


def sleep_s(awake_s: float, loads_over_in_s: float) -> float:
    """How long the scheduler thread may sleep after so long a poll, while it waits for loads that
    are predicted to be over in `loads_over_in_s`."""
    limit_s = max(_LEAST_LIMIT_S, loads_over_in_s / 2)
    return min(_TIMES_AWAKE * awake_s, _LONGEST_S, limit_s)


class Waker:
    """One thread sleeps; any thread wakes it."""

    def __init__(self) -> None:
        import zmq  # SGLang's, which `sleep_s` does not need

        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._awake_since_s = time.monotonic()

    def wake(self) -> None:
        """End the sleep under way, or else the next one."""
        os.eventfd_write(self._woken, 1)

    def sleep(self, requests: Any, loads_over_in_s: float = math.inf) -> bool:
        """Sleep as long as `sleep_s` allows, until `wake` is called or a request has come.

        Args: requests: the socket that requests come from. Any other object, such as the queue of
        SGLang's server in Rust, cannot be watched: the sleep is as short as if the loads were over.
        Returns whether something ended the sleep.
        """
        import zmq

        if not isinstance(requests, zmq.Socket):
            loads_over_in_s = 0.0
        elif requests not in self._poller:
            self._poller.register(requests, zmq.POLLIN)
        pause_s = sleep_s(time.monotonic() - self._awake_since_s, loads_over_in_s)
        ready = [each for each, _ in self._poller.poll(math.ceil(1e3 * pause_s))]
        if self._woken in ready:
            os.eventfd_read(self._woken)
        self._awake_since_s = time.monotonic()
        return bool(ready)
