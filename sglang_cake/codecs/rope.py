"""Keys rotated back to before RoPE, as far as that is possible for a block alone.

KVQuant (arXiv 2401.18079, section 3.2) quantises keys before RoPE, since RoPE mixes the two
channels of a pair by an angle that grows with the position. Blocks hold keys after RoPE. This step
rotates each key back by its place *within the block*. What remains is one rotation, the same for
all tokens of the block. So a channel is as even as before RoPE, and the position of the block in
the prompt need not be known.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.block_arrays import KEYS, Block
from sglang_cake.codecs.codec_steps import Malformed, Unencodable, check_lossy, is_whole
from sglang_cake.codecs.kernels import all_finite, compiled, number, word
from sglang_cake.core.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class InverseRope:
    """Implements `ArrayStep`: the numbers of part `k` are rotated back and rounded to their dtype.

    RoPE as in Llama (arXiv 2104.09864): channels `i` and `i + head / 2` of a head are a pair,
    rotated by `position * theta ** (-2 * i / head)`. A `theta` that is not the model's costs only
    accuracy.
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
        check_lossy(layout)
        keys = [shape for name, shape in layout.groups[0].parts if name == KEYS]
        if any(int(np.prod(shape)) % self.head for shape in keys):
            raise Malformed(f"no heads of {self.head} in {layout.describe()}")
        return layout

    def encode(self, block: Block, out: Block) -> None:
        if not all_finite(block.words, block.kind):  # the rotation would make them finite
            raise Unencodable
        self._rotate(block, out, -1.0)

    def decode(self, block: Block, out: Block) -> None:
        self._rotate(block, out, 1.0)

    def _rotate(self, block: Block, out: Block, sign: float) -> None:
        np.copyto(out.words, block.words)
        for part in block.parts:
            if part.name == KEYS:
                cos, sin = rotations(self.theta, self.head, part.tokens)
                sin = np.float32(sign) * sin
                rotate(block.words, *part.place, block.kind, out.words, self.head, cos, sin)


@lru_cache(maxsize=8)
def rotations(
    theta: float, head: int, tokens: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine, float32 `[tokens, head / 2]`."""
    speeds = theta ** (-np.arange(0, head, 2) / head)
    angles = np.arange(tokens)[:, None] * speeds
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@compiled
def rotate(words, start, stride, layers, tokens, channels, kind, out, head, cosines, sines):
    """Rotate every pair of channels by its token's angle."""
    half = head // 2
    for layer in range(layers):
        for token in range(tokens):
            cos, sin = cosines[token], sines[token]
            for first in range(0, channels, head):
                at = start + layer * stride + token * channels + first
                left, right = words[at : at + half], words[at + half : at + head]
                into, beside = out[at : at + half], out[at + half : at + head]
                for i in range(half):
                    a, b = number(left[i], kind), number(right[i], kind)
                    into[i] = word(a * cos[i] - b * sin[i], kind)
                    beside[i] = word(b * cos[i] + a * sin[i], kind)
