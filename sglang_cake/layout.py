"""What one block of KV looks like in bytes.

A block is the concatenation of planes, one after the other, each `[block_tokens, *token_shape]` in
row-major order: for MHA and GQA the planes are K of layer 0, V of layer 0, K of layer 1, ...; for
MLA one latent plane a layer.
"""

import json
import math
from dataclasses import dataclass

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of a block; part of the namespace, and written into every block header."""

    layers: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # planes of one layer: (name, shape of a token)
    dtype: str  # a key of DTYPE_BYTES
    block_tokens: int

    @property
    def plane_token_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each plane, in block order (`layers * len(parts)` entries)."""
        size = DTYPE_BYTES[self.dtype]
        return tuple(math.prod(shape) * size for _, shape in self.parts) * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes."""
        return sum(self.plane_token_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def describe(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        return json.dumps(
            {
                "layers": self.layers,
                "parts": [[name, list(shape)] for name, shape in self.parts],
                "dtype": self.dtype,
                "block_tokens": self.block_tokens,
            },
            separators=(",", ":"),
        )
