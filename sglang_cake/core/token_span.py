"""A half-open span of tokens."""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `start` to `stop - 1` of a prompt."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens the span covers."""
        return self.stop - self.start
