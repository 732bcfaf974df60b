"""The steps of a codec: typed, as in zarr, so that a wrong order does not type-check.

    Leading?     numbers -> numbers     the first token of a prompt is kept beside them
    ArrayStep*   numbers -> numbers     e.g. keys rotated back to before RoPE
    PackStep     numbers -> bytes       e.g. groups of 8-bit numbers with their scales
    BytesStep*   bytes -> bytes         e.g. zstd

A step is a frozen dataclass of its parameters. Name and parameters stand in front of every encoded
block (`pipeline`), and suffice to decode it.

Rules for all steps: `encode` and `decode` write into memory of the caller, keep no reference to it,
and may be called from any thread. They release the GIL while they work on a block. One exception:
the encoder of `entropy` holds it for a few thousand numbers at a time.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.block_arrays import Block, takes_lossy
from sglang_cake.core.layout import BlockLayout

Bytes = npt.NDArray[np.uint8]  # flat, contiguous


class Unencodable(Exception):
    """A step cannot encode this block within its error bound. The block is stored as it is."""


class Malformed(ValueError):
    """Bytes that no encoder made, or a layout that a step cannot take."""


def check_plain(layout: BlockLayout) -> None:
    """Raises: Malformed if blocks have more than K and V of equal layers. Steps that know nothing
    of groups call it."""
    if not layout.is_plain:
        raise Malformed("it has more than K and V of equal layers: use raw or zstd")


def check_lossy(layout: BlockLayout) -> None:
    """Raises: Malformed if the numbers of such blocks cannot be rounded."""
    check_plain(layout)
    if not takes_lossy(layout):
        raise Malformed(f"{layout.groups[0].dtype} has no bits to lose")


class ArrayStep(Protocol):
    """Numbers to numbers."""

    name: ClassVar[str]

    def layout(self, layout: BlockLayout) -> BlockLayout:
        """The layout of an encoded block of `layout`. Raises: Malformed if it cannot take one."""
        ...

    def encode(self, block: Block, out: Block) -> None:
        """Fill `out`. Raises: Unencodable."""
        ...

    def decode(self, block: Block, out: Block) -> None:
        """Fill `out` with the numbers that were encoded as `block`."""
        ...


class PackStep(Protocol):
    """Numbers to bytes."""

    name: ClassVar[str]
    loses: ClassVar[bool]  # whether decoded numbers may differ from the encoded ones

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
        """Fill the start of `out`; returns the bytes. Raises: Malformed, also if `out` is too
        small for them."""
        ...


class Scratch(threading.local):
    """Memory between two steps: one set a thread, reused, as large as its largest block needs."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def bytes(self, use: str, size_bytes: int) -> Bytes:
        """`size_bytes` of memory with undefined content, valid until the thread's next call with
        the same `use`."""
        held = self._held.get(use)
        if held is None or len(held) < size_bytes:
            held = self._held[use] = np.empty(size_bytes, np.uint8)
        return held[:size_bytes]


# dtype and shape of an array in the bytes of a `PackStep`.
Field = tuple[Any, tuple[int, ...]]


def packed_bytes(fields: Sequence[Field]) -> int:
    """Bytes of the arrays, one after the other, up to a multiple of 8."""
    size = sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in fields)
    return -(-size // 8) * 8


def packed_arrays(data: Bytes, at: int, fields: Sequence[Field]) -> list[npt.NDArray[Any]]:
    """The arrays that begin at byte `at` of `data`, as views if they are aligned.

    Raises: Malformed if `data` is too short.
    """
    arrays = []
    for kind, shape in fields:
        size = np.dtype(kind).itemsize
        stop = at + size * math.prod(shape)
        if stop > len(data):
            raise Malformed(f"{len(data)} bytes, at least {stop} expected")
        raw = data[at:stop] if at % size == 0 else data[at:stop].copy()
        arrays.append(raw.view(kind).reshape(shape))
        at = stop
    return arrays


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether a parameter is an integer in bounds. Parameters come from stored bytes."""
    return type(value) is int and low <= value <= high
