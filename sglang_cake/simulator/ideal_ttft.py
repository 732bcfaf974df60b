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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Ideal:
    """The meeting point (in tokens, not rounded) and its time to first token."""

    meet_token: float
    ttft_s: float


def ideal_meet(
    chunks: Sequence[tuple[int, float]],
    stored: int,
    load_token_s: float,
    last_step_s: float = 0.0,
    fixed_s: float = 0.0,
) -> Ideal:
    """The ideal split of the first `stored` tokens; the module says what is included.

    Args:
        chunks: tokens of each computed chunk and its seconds, first chunk first.
        stored: tokens that can be loaded, at most as many as the chunks have.
        load_token_s: seconds to load one token (seconds per block / tokens per block).

    Raises: ValueError if the chunks have fewer tokens.
    """
    tokens, seconds = np.cumsum([(0, 0.0), *chunks], axis=0).T  # C(x) is linear between these
    if stored > tokens[-1]:
        raise ValueError(f"{stored} tokens are stored, and {tokens[-1]:.0f} were measured")
    knots = np.append(tokens[tokens < stored], stored)
    # It grows from at most 0 to at least 0, and is linear between knots.
    lead = np.interp(knots, tokens, seconds) - load_token_s * (stored - knots)
    meet = float(np.interp(0.0, lead, knots))
    return Ideal(meet, fixed_s + load_token_s * (stored - meet) + last_step_s)
