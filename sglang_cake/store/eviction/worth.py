"""What a stored block saves a prompt that is computed and loaded at once. See docs/eviction.md."""

import math
from dataclasses import dataclass
from typing import Final

# A block left of where compute and load would meet saves nothing while all others are there. It
# keeps this share of its worth, for the requests that need less of the prompt than the last one.
HEAD_SHARE: Final = 0.1
MOST_BLOCK_TOKENS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds of compute and of loading, by a block's position in the prompt.

    Only proportions matter for who is evicted. The defaults: a dense model with hidden size 4096,
    where a (query, key) pair costs 1 / (6 x 4096) of a token, over a link that brings a block in a
    third of the time that a short prompt's block takes to compute.
    """

    block_tokens: int = 128
    token_s: float = 1e-4
    pair_s: float = 1e-4 / (6 * 4096)
    load_s: float = 128 * 1e-4 / 3  # per block

    def __post_init__(self) -> None:
        """Raises: ValueError for what no machine can be."""
        if not 1 <= self.block_tokens <= MOST_BLOCK_TOKENS or not 1e-12 <= self.token_s <= 10:
            raise ValueError("tokens of a block, or seconds of a token, are out of bounds")
        if not 0 <= self.pair_s <= 1 or not 1e-9 <= self.load_s <= 1e4:
            raise ValueError("seconds of a pair, or of a load, are out of bounds")

    def compute_s(self, position: float) -> float:
        """To compute the block at `position` (in blocks) behind all before it."""
        tokens = self.block_tokens
        pairs = tokens * tokens * (position + 0.5)
        return self.token_s * tokens + self.pair_s * pairs

    def meet(self, reach: int) -> float:
        """Where compute from the front and loading from the back meet in a prompt of `reach`
        stored blocks: m with  (compute of m blocks) = (reach - m) x load_s."""
        square = self.pair_s * self.block_tokens**2 / 2
        linear = self.token_s * self.block_tokens + self.load_s
        root = math.sqrt(linear**2 + 4 * square * reach * self.load_s)
        return 2 * reach * self.load_s / (linear + root)

    def saved_s(self, position: int, reach: int) -> float:
        """What the block at `position` is likely to save the next prompt, if that needs the same
        `reach` blocks as the last one."""
        share = 1.0 if position + 1 > self.meet(reach) else HEAD_SHARE
        return share * self.compute_s(position)

    def mean_saved_s(self, reach: int) -> float:
        """What a prompt of `reach` stored blocks saves, per block of it."""
        meet = self.meet(reach)
        saved_s = reach * self.compute_s((reach - 1) / 2) - meet * self.compute_s((meet - 1) / 2)
        return max(1e-12, saved_s / reach)  # over a slow link nothing, but for rounding
