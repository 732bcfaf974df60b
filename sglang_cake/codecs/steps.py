"""What a codec is made of: typed steps, as in zarr, so that a wrong order does not type.

    Leading?     numbers -> numbers     the first token of a prompt is kept beside them
    ArrayStep*   numbers -> numbers     e.g. keys turned back to where they were before RoPE
    PackStep     numbers -> bytes       e.g. groups of 8-bit numbers with their scales
    BytesStep*   bytes -> bytes         e.g. zstd

A step is a frozen dataclass of its parameters; name and parameters are written in front of every
encoded block (`chain`), which is all that is needed to decode it.

All of them: encode and decode into memory of the caller, keep nothing of it, and may be called from
any thread. They let go of the GIL while they work on a block, but for the encoder of `entropy`,
which keeps it for a few thousand numbers at a time.
"""

import threading
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.blocks import Block
from sglang_cake.core.layout import BlockLayout

Bytes = npt.NDArray[np.uint8]  # flat, contiguous


class Unencodable(Exception):
    """A step cannot keep its promise for this block; the block is then stored as it is."""


class Malformed(ValueError):
    """Encoded bytes that no encoder made."""


class ArrayStep(Protocol):
    """Numbers to numbers."""

    name: ClassVar[str]

    def layout(self, layout: BlockLayout) -> BlockLayout:
        """What becomes of a block of `layout`. Raises: Malformed if the step cannot take one."""
        ...

    def encode(self, block: Block, out: Block) -> None:
        """Fill `out`. Raises: Unencodable."""
        ...

    def decode(self, block: Block, out: Block) -> None:
        """Fill `out` with what was encoded as `block`."""
        ...


class PackStep(Protocol):
    """Numbers to bytes."""

    name: ClassVar[str]
    loses: ClassVar[bool]  # whether numbers may come back otherwise

    def max_bytes(self, layout: BlockLayout) -> int:
        """How many bytes a block becomes at most. Raises: Malformed if it cannot take one."""
        ...

    def encode(self, block: Block, out: Bytes) -> int:
        """Fill the start of `out`, of `max_bytes`; returns the bytes. Raises: Unencodable."""
        ...

    def decode(self, data: Bytes, block: Block) -> None:
        """Fill `block`. Raises: Malformed."""
        ...


class BytesStep(Protocol):
    """Bytes to bytes, without loss."""

    name: ClassVar[str]

    def max_bytes(self, size_bytes: int) -> int:
        """How many bytes `size_bytes` become at most."""
        ...

    def encode(self, data: Bytes, out: Bytes) -> int:
        """Fill the start of `out`, of `max_bytes`; returns the bytes."""
        ...

    def decode(self, data: Bytes, out: Bytes) -> int:
        """Fill the start of `out`; returns the bytes. Raises: Malformed, also if it is too much."""
        ...


class Scratch(threading.local):
    """Memory between two steps: each thread's own, reused, as large as its largest block needs."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def bytes(self, use: str, size_bytes: int) -> Bytes:
        """`size_bytes` of memory for `use`, with undefined content, until it is asked for again."""
        held = self._held.get(use)
        if held is None or len(held) < size_bytes:
            held = self._held[use] = np.empty(size_bytes, np.uint8)
        return held[:size_bytes]


def taken(data: Bytes, at: int, count: int, dtype: Any) -> npt.NDArray[Any]:
    """`count` numbers of `data` from byte `at` on. Raises: Malformed if they are not all there."""
    stop = at + count * np.dtype(dtype).itemsize
    if stop > len(data):
        raise Malformed(f"{len(data)} bytes, at least {stop} expected")
    view = data[at:stop]
    if at % np.dtype(dtype).itemsize:
        view = view.copy()
    return view.view(dtype)


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether a parameter is a whole number in bounds: whoever wrote it is not trusted."""
    return type(value) is int and low <= value <= high
