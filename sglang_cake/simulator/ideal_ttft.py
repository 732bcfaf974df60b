"""The best time to first token that computing and loading at once could reach.

A prompt of which the first `stored` tokens can be loaded is computed from the front and loaded from
the back. With C(x) the time to compute the first x tokens and l the time to load one token, the two
meet best at the x where C(x) = l * (stored - x); no split is faster.

Included:

- computing [0, x) at the measured cost of each chunk, taken as linear within it;
- loading [x, stored) at the measured rate;
- the step over the rest of the prompt, which no store holds and which produces the first token
  (`last_step_s`);
- the fixed cost of a request before its first step (`fixed_s`), the same for all modes.

Not included, so that a real system is always somewhat slower: chunks and blocks are whole (half of
each is lost on average at the meet), compute and load disturb each other, copies to the device, and
decisions.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ideal:
    """The meeting point (in tokens, not rounded) and its time to first token."""

    meet_token: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class ComputeCurve:
    """C(x): seconds to compute the first x tokens, linear between the measured points.

    `tokens` and `seconds` start at 0 and grow strictly and weakly, respectively.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.tokens) != len(self.seconds) or not pairs:
            raise ValueError("a compute curve needs at least one chunk")
        if self.tokens[0] != 0 or self.seconds[0] != 0 or any(a >= b for a, b in pairs):
            raise ValueError("a compute curve starts at 0 and its tokens grow")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("computing more tokens cannot take less time")

    @classmethod
    def from_chunks(cls, chunks: Sequence[tuple[int, float]]) -> "ComputeCurve":
        """From (tokens, seconds) of each chunk, first chunk first."""
        tokens, seconds = [0.0], [0.0]
        for chunk_tokens, chunk_s in chunks:
            tokens.append(tokens[-1] + chunk_tokens)
            seconds.append(seconds[-1] + chunk_s)
        return cls(tuple(tokens), tuple(seconds))

    def at(self, token: float) -> float:
        """C(token). Raises: ValueError beyond the last measured point."""
        if not 0 <= token <= self.tokens[-1]:
            raise ValueError(f"the curve was measured up to {self.tokens[-1]:.0f} tokens")
        right = max(1, bisect_left(self.tokens, token))
        x0, x1 = self.tokens[right - 1 : right + 1]
        y0, y1 = self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (token - x0) / (x1 - x0)


def ideal_meet(
    curve: ComputeCurve,
    stored: int,
    load_token_s: float,
    last_step_s: float = 0.0,
    fixed_s: float = 0.0,
) -> Ideal:
    """The ideal split of the first `stored` tokens; the module says what is included.

    Args:
        stored: tokens that can be loaded, at most as many as the curve covers.
        load_token_s: seconds to load one token (seconds per block / tokens per block).
    """

    def lead(token: float) -> float:
        return curve.at(token) - load_token_s * (stored - token)

    # `lead` grows from at most 0 to at least 0 and is linear between knots: find the knots around
    # its zero, then the zero itself.
    knots = [x for x in curve.tokens if x < stored] + [float(stored)]
    right = next((i for i, x in enumerate(knots) if lead(x) >= 0), len(knots) - 1)
    meet = knots[right]
    if right > 0 and lead(meet) > 0:
        low, high = knots[right - 1], knots[right]
        meet = low + (high - low) * -lead(low) / (lead(high) - lead(low))
    return Ideal(meet, fixed_s + load_token_s * (stored - meet) + last_step_s)
