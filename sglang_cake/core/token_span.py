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

    def blocks(self, block_tokens: int) -> range:
        """The blocks that the span touches."""
        return range(self.start // block_tokens, -(-self.stop // block_tokens))
