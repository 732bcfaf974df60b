"""The layout of one block of KV in bytes.

A block is the concatenation of planes, one after the other, each `[block_tokens, *token_shape]` in
row-major order: for MHA and GQA the planes are K of layer 0, V of layer 0, K of layer 1, ...; for
MLA one latent plane a layer.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
# Limits of a layout that is read from a store: hostile text must not allocate too much memory.
MAX_TEXT_CHARS = 4096
MAX_LAYERS = 4096
MAX_BLOCK_BYTES = 2**34


@dataclass(frozen=True)
class BlockLayout:
    """Shape of a block. It is part of the namespace, and stands in every block header.

    Derived sizes are cached, since each block needs them several times.
    """

    layers: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # planes of one layer: (name, shape of a token)
    dtype: str  # a key of DTYPE_BYTES
    block_tokens: int

    @cached_property
    def plane_token_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each plane, in block order (`layers * len(parts)` entries)."""
        size = DTYPE_BYTES[self.dtype]
        return tuple(math.prod(shape) * size for _, shape in self.parts) * self.layers

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """The byte of a block at which each plane begins, in block order."""
        sizes = [token_bytes * self.block_tokens for token_bytes in self.plane_token_bytes]
        return tuple(accumulate(sizes[:-1], initial=0))

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes."""
        return sum(self.plane_token_bytes)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def describe(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps(
            {
                "layers": self.layers,
                "parts": [[name, list(shape)] for name, shape in self.parts],
                "dtype": self.dtype,
                "block_tokens": self.block_tokens,
            },
            separators=(",", ":"),
        )

    @classmethod
    def parse(cls, text: str) -> "BlockLayout":
        """The inverse of `describe`. The text is not trusted.

        Raises: ValueError, one line, for any other text.
        """
        try:
            if len(text) > MAX_TEXT_CHARS:
                raise ValueError(f"{len(text)} characters")
            found: Any = json.loads(text)
            layout = cls(
                layers=_count(found["layers"], MAX_LAYERS),
                parts=tuple(
                    (str(name), tuple(_count(size) for size in shape))
                    for name, shape in found["parts"]
                ),
                dtype=str(found["dtype"]),
                block_tokens=_count(found["block_tokens"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a block layout: {error!r}") from None
        if layout.describe() != text:
            raise ValueError("not a block layout: it is not spelled as it should be")
        if layout.dtype not in DTYPE_BYTES or not layout.parts:
            raise ValueError(f"not a block layout: no planes, or of unknown dtype {layout.dtype!r}")
        if layout.block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(f"not a block layout: a block of {layout.block_bytes} bytes")
        return layout


def _count(value: object, at_most: int = MAX_BLOCK_BYTES) -> int:
    if type(value) is not int or not 0 < value <= at_most:
        raise ValueError(f"{value!r} is not a number from 1 to {at_most}")
    return value
