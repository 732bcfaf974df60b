"""Keys turned back to before RoPE, as far as that can be known of a block alone.

KVQuant (arXiv 2401.18079, section 3.2) quantises keys before RoPE, since turning them by their
position smears channels over each other. Blocks hold keys after RoPE. Here each key is turned back
by its place *within the block*: what is left is one and the same turn for all tokens of the block,
so a channel is as even as before RoPE, and the block's position in the prompt need not be known.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.blocks import KEYS, KINDS, Block
from sglang_cake.codecs.steps import Malformed, Unencodable, is_whole
from sglang_cake.core.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class InverseRope:
    """Implements `ArrayStep`: the numbers of part `k` are turned back, and rounded to their dtype.

    RoPE as in Llama (arXiv 2104.09864): channels `i` and `i + head / 2` of a head turn together, by
    `position * theta ** (-2 * i / head)`. Another RoPE than the model's only costs accuracy.
    """

    theta: float
    head: int  # channels of a head

    name: ClassVar[str] = "unrotate"

    def __post_init__(self) -> None:
        if type(self.theta) is not float or not 1 < self.theta < 1e12:
            raise ValueError(f"theta of {self.theta!r}")
        if not is_whole(self.head, 2, 4096) or self.head % 2:
            raise ValueError(f"a head of {self.head!r}")

    def layout(self, layout: BlockLayout) -> BlockLayout:
        keys = [shape for name, shape in layout.parts if name == KEYS]
        if layout.dtype not in KINDS or any(int(np.prod(shape)) % self.head for shape in keys):
            raise Malformed(f"no heads of {self.head} in {layout.describe()}")
        return layout

    def encode(self, block: Block, out: Block) -> None:
        from sglang_cake.codecs.kernels import all_finite

        if not all_finite(block.words, block.kind):  # it would not be turned, but made finite
            raise Unencodable
        self._turn(block, out, -1.0)

    def decode(self, block: Block, out: Block) -> None:
        self._turn(block, out, 1.0)

    def _turn(self, block: Block, out: Block, sign: float) -> None:
        from sglang_cake.codecs.rope_kernels import copy, turn

        for part in block.parts:
            place = (block.words, part.start, part.stride, part.layers, part.tokens, part.channels)
            if part.name == KEYS:
                cos, sin = turns(self.theta, self.head, part.tokens)
                turn(*place, block.kind, out.words, self.head, cos, np.float32(sign) * sin)
            else:
                copy(*place, out.words)


@lru_cache(maxsize=8)
def turns(
    theta: float, head: int, tokens: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine, float32 `[tokens, head / 2]`."""
    speeds = theta ** (-np.arange(0, head, 2) / head)
    angles = np.arange(tokens)[:, None] * speeds
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
