"""Prefill time that a stored block saves a prompt that is computed and loaded at once.

docs/eviction.md derives the formulas.
"""

import math
from dataclasses import dataclass
from typing import Final

# A block left of the meeting point saves nothing while all other blocks are stored. It keeps this
# share of its compute time as benefit: a later request may need less of the prompt.
HEAD_SHARE: Final = 0.1
MAX_BLOCK_TOKENS: Final = 65_536
_MIN_SAVED_S: Final = 1e-12  # over a slow link the difference of two large numbers may round to 0


@dataclass(frozen=True, slots=True)
class Benefit:
    """Compute and load costs, from which the benefit of a block follows by its position.

    Eviction compares benefits, so only their ratios matter. The defaults describe a dense model
    with hidden size 4096, where a (query, key) pair costs 1 / (6 x 4096) of a token. Their link
    loads a block in a third of the time that computing the first block of a prompt takes.

    Attributes:
        block_tokens: tokens of a block, from 1 to MAX_BLOCK_TOKENS.
        token_s: seconds of prefill per token, without attention.
        pair_s: seconds of prefill per (query, key) pair, causal.
        load_s: seconds of loading per block.

    Raises:
        ValueError: a cost is outside the range of real machines.
    """

    block_tokens: int = 128
    token_s: float = 1e-4
    pair_s: float = 1e-4 / (6 * 4096)
    load_s: float = 128 * 1e-4 / 3

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS or not 1e-12 <= self.token_s <= 10:
            raise ValueError("block_tokens or token_s is out of bounds")
        if not 0 <= self.pair_s <= 1 or not 1e-9 <= self.load_s <= 1e4:
            raise ValueError("pair_s or load_s is out of bounds")

    def compute_s(self, position: float) -> float:
        """Seconds that computing the block at `position` takes, with all blocks before it cached.

        Args:
            position: index of the block in the prompt; a fraction interpolates.
        """
        tokens = self.block_tokens
        pairs = tokens * tokens * (position + 0.5)
        return self.token_s * tokens + self.pair_s * pairs

    def meeting_block(self, prompt_blocks: int) -> float:
        """Block at which computing from the front and loading from the back finish together.

        Solves (compute time of m blocks) = (prompt_blocks - m) x load_s for m.

        Args:
            prompt_blocks: blocks of the prompt, all of them stored.
        """
        square = self.pair_s * self.block_tokens**2 / 2
        linear = self.token_s * self.block_tokens + self.load_s
        root = math.sqrt(linear**2 + 4 * square * prompt_blocks * self.load_s)
        return 2 * prompt_blocks * self.load_s / (linear + root)

    def saved_s(self, position: int, prompt_blocks: int) -> float:
        """Seconds that the block at `position` saves the next request for its prompt.

        Assumes that the next request needs the same `prompt_blocks` blocks as the last request.
        """
        share = 1.0 if position + 1 > self.meeting_block(prompt_blocks) else HEAD_SHARE
        return share * self.compute_s(position)

    def mean_saved_s(self, prompt_blocks: int) -> float:
        """Seconds that a prompt of `prompt_blocks` stored blocks saves, divided by its blocks."""
        meet = self.meeting_block(prompt_blocks)
        all_s = prompt_blocks * self.compute_s((prompt_blocks - 1) / 2)
        computed_s = meet * self.compute_s((meet - 1) / 2)
        return max(_MIN_SAVED_S, (all_s - computed_s) / prompt_blocks)
