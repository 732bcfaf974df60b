"""What is logged of an outage: one line when it begins, one when it is over."""

import logging
import time

logger = logging.getLogger(__name__)


class Outage:
    """Of one server. Belongs to one event loop."""

    def __init__(self) -> None:
        self.fault = ""  # what failed last
        self._since_s: float | None = None

    def began(self, base: str) -> None:
        """The server is left alone; probes that fail say nothing more."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            logger.warning("%s is asked again every 1 to 60 s: %s", base, self.fault)

    def ended(self, base: str) -> None:
        """The server answers."""
        if self._since_s is not None:
            away_s, self._since_s = time.monotonic() - self._since_s, None
            logger.warning("%s is used again after %.0f s", base, away_s)
