"""A chain of steps, and how an encoded block says which it was.

An encoded payload is the length of the text, in four bytes; the text, which names the steps in the
order of encoding with their parameters, as JSON; zero bytes up to a multiple of 64; then what the
last step made. A block that the steps cannot take, or would make longer, is stored with the chain
`raw` instead: the payload is never more than HEAD_BYTES longer than the block.
"""

import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sglang_cake.codecs.blocks import Block
from sglang_cake.codecs.encoded_payload import HEAD_BYTES
from sglang_cake.codecs.leading import Leading
from sglang_cake.codecs.steps import (
    ArrayStep,
    Bytes,
    BytesStep,
    Malformed,
    PackStep,
    Scratch,
    Unencodable,
)
from sglang_cake.core.layout import BlockLayout

_LENGTH = struct.Struct("<I")
_ALIGN = 64
_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class Raw:
    """The block's bytes as they are. Implements `PackStep`."""

    name: ClassVar[str] = "raw"
    loses: ClassVar[bool] = False

    def max_bytes(self, layout: BlockLayout) -> int:
        return layout.block_bytes

    def encode(self, block: Block, out: Bytes) -> int:
        np.copyto(out[: block.layout.block_bytes], block.words.view(np.uint8))
        return block.layout.block_bytes

    def decode(self, data: Bytes, block: Block) -> None:
        if len(data) != block.layout.block_bytes:
            raise Malformed(f"{len(data)} bytes, a block has {block.layout.block_bytes}")
        np.copyto(block.words.view(np.uint8), data)


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps in the order of encoding."""

    pack: PackStep = Raw()
    arrays: tuple[ArrayStep, ...] = ()
    squeezes: tuple[BytesStep, ...] = ()
    leading: Leading | None = None

    def of_first(self) -> "Chain":
        """The chain of a block that begins with a prompt's first token."""
        return replace(self, leading=Leading()) if self.pack.loses else self

    def describe(self) -> str:
        """Canonical JSON, from which `catalogue.parse` makes the chain again."""
        steps: list[Any] = [*self.arrays, self.pack, *self.squeezes]
        if self.leading is not None:
            steps.insert(0, self.leading)
        return json.dumps([[step.name, asdict(step)] for step in steps], separators=(",", ":"))

    def max_bytes(self, layout: BlockLayout) -> int:
        """How many bytes the steps make of a block at most. Raises: Malformed if they cannot."""
        size = self.leading_bytes(layout)
        for array in self.arrays:
            layout = array.layout(layout)
        size += self.pack.max_bytes(layout)
        for squeeze in self.squeezes:
            size = squeeze.max_bytes(size)
        return size

    def leading_bytes(self, layout: BlockLayout) -> int:
        """How many bytes stand in front of what `pack` makes. Raises: Malformed."""
        return 0 if self.leading is None else self.leading.size_bytes(layout)

    def encode(self, layout: BlockLayout, block: memoryview, out: memoryview) -> int:
        """Encode one block; returns the bytes of the payload.

        Args:
            block: `layout.block_bytes`, read only.
            out: at least `layout.block_bytes + HEAD_BYTES`, written only; it begins with the
                payload afterwards.
        """
        source, target = Block.over(layout, block), np.frombuffer(out, np.uint8)
        assert len(target) >= layout.block_bytes + HEAD_BYTES, len(target)
        try:
            body = self._steps(source)
            if len(body) < layout.block_bytes:
                return _join(self.describe(), body, target)
        except Unencodable:
            pass
        return _join(RAW_CHAIN.describe(), source.words.view(np.uint8), target)

    def warm_up(self, layout: BlockLayout) -> None:
        """Have what such blocks need compiled now, and not when a request waits for it."""
        small = replace(layout, layers=1, block_tokens=min(8, layout.block_tokens))
        zeros = Block.over(small, memoryview(bytearray(small.block_bytes)))
        self.decode(self._steps(zeros).copy(), zeros)

    def _steps(self, block: Block) -> Bytes:
        if not len(block.words):
            raise Unencodable  # of nothing, nothing can be made
        lead = self.leading_bytes(block.layout)
        kept = _scratch.bytes("leading", lead)
        if self.leading is not None:
            others = _block(block.layout, "others")
            np.copyto(others.words, block.words)
            self.leading.set_apart(others, kept)
            block = others
        for turn, array in enumerate(self.arrays):
            made = _block(array.layout(block.layout), f"array{turn}")
            array.encode(block, made)
            block = made
        out = _scratch.bytes("packed", lead + self.pack.max_bytes(block.layout))
        np.copyto(out[:lead], kept)
        data = out[: lead + self.pack.encode(block, out[lead:])]
        for turn, squeeze in enumerate(self.squeezes):
            out = _scratch.bytes(f"squeezed{turn}", squeeze.max_bytes(len(data)))
            data = out[: squeeze.encode(data, out)]
        return data

    def decode(self, body: Bytes, block: Block) -> None:
        """Fill `block` from what the steps made. Raises: Malformed."""
        layouts = [block.layout]
        for array in self.arrays:
            layouts.append(array.layout(layouts[-1]))
        lead = self.leading_bytes(block.layout)
        sizes = [lead + self.pack.max_bytes(layouts[-1])]
        for squeeze in self.squeezes:
            sizes.append(squeeze.max_bytes(sizes[-1]))
        for turn, squeeze in reversed(list(enumerate(self.squeezes))):
            out = _scratch.bytes(f"squeezed{turn}", sizes[turn])
            body = out[: squeeze.decode(body, out)]
        made = _block(layouts[-1], f"array{len(self.arrays) - 1}") if self.arrays else block
        self.pack.decode(body[lead:], made)
        for turn, array in reversed(list(enumerate(self.arrays))):
            target = block if turn == 0 else _block(layouts[turn], f"array{turn - 1}")
            array.decode(made, target)
            made = target
        if self.leading is not None:
            self.leading.put_back(body[:lead], block)


RAW_CHAIN = Chain()
_RAW_TEXT = RAW_CHAIN.describe().encode()


def split(payload: Bytes) -> tuple[bytes, Bytes]:
    """The text of a payload's chain, and what the chain made. Raises: Malformed."""
    if len(payload) < _ALIGN:
        raise Malformed(f"{len(payload)} bytes are no encoded block")
    (count,) = _LENGTH.unpack_from(payload.data)
    start = -(-(_LENGTH.size + count) // _ALIGN) * _ALIGN
    if start > min(len(payload), HEAD_BYTES):
        raise Malformed(f"a text of {count} bytes in front of an encoded block")
    return payload[_LENGTH.size : _LENGTH.size + count].tobytes(), payload[start:]


def is_raw(payload: memoryview) -> bool:
    """Whether what `Chain.encode` made is the block as it is."""
    start = _LENGTH.size
    return bytes(payload[start : start + len(_RAW_TEXT)]) == _RAW_TEXT


def _block(layout: BlockLayout, use: str) -> Block:
    return Block.over(layout, _scratch.bytes(use, layout.block_bytes).data)


def begin(text: str, out: Bytes) -> int:
    """Write what stands before what the chain of that text makes; returns where that begins."""
    raw = text.encode()
    start = -(-(_LENGTH.size + len(raw)) // _ALIGN) * _ALIGN
    assert start <= HEAD_BYTES, text
    out[:start] = 0
    _LENGTH.pack_into(out.data, 0, len(raw))
    out[_LENGTH.size : _LENGTH.size + len(raw)] = np.frombuffer(raw, np.uint8)
    return start


def _join(text: str, body: Bytes, out: Bytes) -> int:
    start = begin(text, out)
    np.copyto(out[start : start + len(body)], body)
    return start + len(body)
