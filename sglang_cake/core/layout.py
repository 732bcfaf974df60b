"""The layout of one block of KV in bytes.

A block is the concatenation of planes, one after the other, each `[rows, *row_shape]` in row-major
order: for MHA and GQA the planes are K of layer 0, V of layer 0, K of layer 1, ...; for MLA one
latent plane a layer. Layers of another shape, and an index beside K and V, are further groups of
planes after them.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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

Parts = tuple[tuple[str, tuple[int, ...]], ...]


class Plane(NamedTuple):
    """Where a plane lies in a block."""

    start: int  # its first byte
    rows: int
    row_bytes: int
    row_tokens: int


@dataclass(frozen=True)
class PlaneGroup:
    """The planes of layers that have equal ones, layer after layer."""

    layers: int
    parts: Parts  # planes of one layer: (name, shape of a row)
    dtype: str  # a key of DTYPE_BYTES
    # 1; or the tokens of a page, if only a whole page has a meaning: an index may hold the keys of
    # its tokens first, and then their scales.
    row_tokens: int = 1

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of one row of each plane of a layer."""
        size = DTYPE_BYTES[self.dtype]
        return tuple(math.prod(shape) * size for _, shape in self.parts)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return self.layers * sum(self.part_bytes)


@dataclass(frozen=True)
class BlockLayout:
    """Shape of a block. It is part of the namespace, and stands in every block header.

    Derived sizes are cached, since each block needs them several times.
    """

    groups: tuple[PlaneGroup, ...]  # their `row_tokens` divide `block_tokens`
    block_tokens: int

    @classmethod
    def plain(cls, layers: int, parts: Parts, dtype: str, block_tokens: int) -> "BlockLayout":
        """The layout for a model with equal layers, and a row for each token."""
        return cls((PlaneGroup(layers, parts, dtype),), block_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether all layers are equal, and a row is a token's."""
        return len(self.groups) == 1 and self.groups[0].row_tokens == 1

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """All planes in block order."""
        found, start = [], 0
        for group in self.groups:
            rows = self.block_tokens // group.row_tokens
            for row_bytes in group.part_bytes * group.layers:
                found.append(Plane(start, rows, row_bytes, group.row_tokens))
                start += rows * row_bytes
        return tuple(found)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of each group in a block."""
        return tuple(
            self.block_tokens // group.row_tokens * group.row_bytes for group in self.groups
        )

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(self.group_bytes)

    def sliced(self, slices: int) -> "BlockLayout":
        """The layout of one of so many slices, which have equally many KV heads each.

        Raises: ValueError, one line, if a part has no rows of [heads, dim], or too few heads.
        """
        if slices == 1:
            return self
        for group in self.groups:
            for name, shape in group.parts:
                if name.removeprefix("draft_") not in ("k", "v") or len(shape) != 2:
                    raise ValueError(f"{name} has no heads that could be divided")
                if group.row_tokens > 1 or shape[0] % slices:
                    raise ValueError(
                        f"{shape[0]} heads of {name} do not make {slices} equal slices"
                    )
        groups = tuple(
            replace(
                group,
                parts=tuple((name, (heads // slices, dim)) for name, (heads, dim) in group.parts),
            )
            for group in self.groups
        )
        return BlockLayout(groups, self.block_tokens)

    def describe(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        return self._text

    @cached_property
    def _text(self) -> str:
        groups = [asdict(group) for group in self.groups]
        tokens = {"block_tokens": self.block_tokens}
        if self.is_plain:
            del groups[0]["row_tokens"]
            return json.dumps(groups[0] | tokens, separators=(",", ":"))
        return json.dumps({"groups": groups} | tokens, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "BlockLayout":
        """The inverse of `describe`. The text is not trusted.

        Raises: ValueError, one line, for any other text.
        """
        try:
            if len(text) > MAX_TEXT_CHARS:
                raise ValueError(f"{len(text)} characters")
            found: Any = json.loads(text)
            groups = found["groups"] if "groups" in found else [found | {"row_tokens": 1}]
            layout = cls(tuple(_group(group) for group in groups), _count(found["block_tokens"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a block layout: {error!r}") from None
        if layout.describe() != text:
            raise ValueError("not a block layout: it is not spelled as it should be")
        for group in layout.groups:
            if group.dtype not in DTYPE_BYTES or not group.parts:
                raise ValueError(
                    f"not a block layout: no planes, or of unknown dtype {group.dtype!r}"
                )
            if layout.block_tokens % group.row_tokens:
                raise ValueError("not a block layout: a row has a part of its tokens only")
        if not 0 < layout.block_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"not a block layout: a block of {layout.block_bytes} bytes")
        return layout


def _group(found: Any) -> PlaneGroup:
    return PlaneGroup(
        layers=_count(found["layers"], MAX_LAYERS),
        parts=tuple(
            (str(name), tuple(_count(size) for size in shape)) for name, shape in found["parts"]
        ),
        dtype=str(found["dtype"]),
        row_tokens=_count(found["row_tokens"]),
    )


def _count(value: object, at_most: int = MAX_BLOCK_BYTES) -> int:
    if type(value) is not int or not 0 < value <= at_most:
        raise ValueError(f"{value!r} is not a number from 1 to {at_most}")
    return value
