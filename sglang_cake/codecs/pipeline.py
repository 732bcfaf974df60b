"""A chain of steps, and the text in front of an encoded block that names them.

An encoded payload is, in this order: the length of the text, in four bytes; the text, which names
the steps in the order of encoding with their parameters, as JSON; zero bytes up to a multiple of
64; the bytes of the last step. A block that the steps cannot take, or would make longer, is stored
with the chain `raw` instead. So a payload is at most ENCODED_HEAD_BYTES longer than the block.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from sglang_cake.codecs.block_arrays import Block, Words
from sglang_cake.codecs.codec_steps import (
    ArrayStep,
    Bytes,
    BytesStep,
    Malformed,
    PackStep,
    Scratch,
    Unencodable,
    is_whole,
)
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.core.layout import BlockLayout

_LENGTH = struct.Struct("<I")
_ALIGN = 64
_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class Leading:
    """The first `tokens` rows of every plane, kept as they are: the first token of a prompt, which
    is an attention sink (StreamingLLM, arXiv 2309.17453; KVQuant, arXiv 2401.18079, section 3.5).

    The rows stand in the order of the block in front of the bytes of the other steps, with zero
    bytes up to a multiple of 64. The other steps get copies of the row after them: a sink lies far
    out, and would widen the range of every channel.
    """

    tokens: int = 1

    name: ClassVar[str] = "leading"

    def __post_init__(self) -> None:
        if not is_whole(self.tokens, 1, 4096):
            raise ValueError(f"{self.tokens!r} tokens")

    def size_bytes(self, layout: BlockLayout) -> int:
        """Bytes of the rows. Raises: Malformed if a block has fewer."""
        if self.tokens > layout.block_tokens or not layout.is_plain:
            raise Malformed(f"{self.tokens} tokens of {layout.describe()}")
        return -(-self.tokens * layout.groups[0].row_bytes // _ALIGN) * _ALIGN

    def set_apart(self, block: Block, kept: Bytes) -> None:
        """Move the rows to `kept`, of `size_bytes`."""
        kept[:] = 0
        words, at = self._rows(kept, block), 0
        for plane in block.planes():
            rows = plane[: self.tokens]
            words[at : at + rows.size] = rows.reshape(-1)
            at += rows.size
            if self.tokens < len(plane):
                rows[:] = plane[self.tokens]

    def put_back(self, kept: Bytes, block: Block) -> None:
        """The inverse of `set_apart`."""
        words, at = self._rows(kept, block), 0
        for plane in block.planes():
            rows = plane[: self.tokens]
            rows[:] = words[at : at + rows.size].reshape(rows.shape)
            at += rows.size

    def _rows(self, kept: Bytes, block: Block) -> Words:
        size = self.tokens * block.layout.groups[0].row_bytes
        return kept[:size].view(block.words.dtype)


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
    """Steps in the order of encoding: `leading`, `arrays`, `pack`, `compressors`."""

    pack: PackStep = Raw()
    arrays: tuple[ArrayStep, ...] = ()
    compressors: tuple[BytesStep, ...] = ()
    leading: Leading | None = None

    @property
    def loses(self) -> bool:
        """Whether decoded numbers may differ from the encoded ones."""
        return self.pack.loses or bool(self.arrays)

    def of_first(self) -> "Chain":
        """The chain of a block that begins with a prompt's first token."""
        return replace(self, leading=Leading()) if self.loses else self

    @property
    def steps(self) -> list[Any]:
        """All steps in the order of encoding."""
        leading = [] if self.leading is None else [self.leading]
        return [*leading, *self.arrays, self.pack, *self.compressors]

    def describe(self) -> str:
        """Canonical JSON. `catalogue.parse` is the inverse."""
        steps = [[step.name, asdict(step)] for step in self.steps]
        return json.dumps(steps, separators=(",", ":"))

    def max_bytes(self, layout: BlockLayout) -> int:
        """Bytes of the last step, at most, for a block. Raises: Malformed if it cannot take one."""
        size = self.leading_bytes(layout)
        for array in self.arrays:
            layout = array.layout(layout)
        size += self.pack.max_bytes(layout)
        for compressor in self.compressors:
            size = compressor.max_bytes(size)
        return size

    def leading_bytes(self, layout: BlockLayout) -> int:
        """Bytes of `leading`, in front of those of `pack`. Raises: Malformed."""
        return 0 if self.leading is None else self.leading.size_bytes(layout)

    def encode(self, layout: BlockLayout, block: memoryview, out: memoryview) -> int:
        """Encode one block; returns the bytes of the payload, with which `out` then begins.

        Args:
            block: `layout.block_bytes`, read only.
            out: at least `layout.block_bytes + ENCODED_HEAD_BYTES`, written only.
        """
        source, filled = Block.over(layout, block), np.frombuffer(out, np.uint8)
        assert len(filled) >= layout.block_bytes + ENCODED_HEAD_BYTES, len(filled)
        try:
            body = self._encode(source)
            if len(body) < layout.block_bytes:
                return _join(self.describe(), body, filled)
        except Unencodable:
            pass
        return _join(RAW_CHAIN.describe(), source.words.view(np.uint8), filled)

    def warm_up(self, layout: BlockLayout) -> None:
        """Compile the loops that such blocks need, before a request waits for them."""
        # As many tokens as real blocks have: the types of indices depend on that.
        groups = tuple(replace(group, layers=1) for group in layout.groups)
        small = BlockLayout(groups, layout.block_tokens)
        zeros = Block.over(small, memoryview(bytearray(small.block_bytes)))
        self.decode(self._encode(zeros).copy(), zeros)

    def _encode(self, block: Block) -> Bytes:
        """The bytes of the last step, in scratch memory. Raises: Unencodable."""
        if not len(block.words):
            raise Unencodable  # steps need at least one number
        lead = self.leading_bytes(block.layout)
        kept = _scratch.bytes("leading", lead)
        if self.leading is not None:
            others = _block(block.layout, "others")
            np.copyto(others.words, block.words)
            self.leading.set_apart(others, kept)
            block = others
        for number, array in enumerate(self.arrays):
            made = _block(array.layout(block.layout), f"array{number}")
            array.encode(block, made)
            block = made
        out = _scratch.bytes("packed", lead + self.pack.max_bytes(block.layout))
        np.copyto(out[:lead], kept)
        data = out[: lead + self.pack.encode(block, out[lead:])]
        for number, compressor in enumerate(self.compressors):
            out = _scratch.bytes(f"compressed{number}", compressor.max_bytes(len(data)))
            data = out[: compressor.encode(data, out)]
        return data

    def decode(self, body: Bytes, block: Block) -> None:
        """Fill `block` from the bytes of the last step. Raises: Malformed."""
        layouts = [block.layout]
        for array in self.arrays:
            layouts.append(array.layout(layouts[-1]))
        lead = self.leading_bytes(block.layout)
        sizes = [lead + self.pack.max_bytes(layouts[-1])]
        for compressor in self.compressors:
            sizes.append(compressor.max_bytes(sizes[-1]))
        for number, compressor in reversed(list(enumerate(self.compressors))):
            out = _scratch.bytes(f"compressed{number}", sizes[number])
            body = out[: compressor.decode(body, out)]
        made = _block(layouts[-1], f"array{len(self.arrays) - 1}") if self.arrays else block
        self.pack.decode(body[lead:], made)
        for number, array in reversed(list(enumerate(self.arrays))):
            filled = block if number == 0 else _block(layouts[number], f"array{number - 1}")
            array.decode(made, filled)
            made = filled
        if self.leading is not None:
            self.leading.put_back(body[:lead], block)


RAW_CHAIN = Chain()
_RAW_TEXT = RAW_CHAIN.describe().encode()
_RAW_HEAD = _LENGTH.pack(len(_RAW_TEXT)) + _RAW_TEXT
# What stands in front of a block that is stored as it is, with zero bytes.
RAW_HEAD_BYTES = -(-len(_RAW_HEAD) // _ALIGN) * _ALIGN


def split(payload: Bytes) -> tuple[bytes, Bytes]:
    """The text of a payload's chain, and the bytes of its last step. Raises: Malformed."""
    if len(payload) < _ALIGN:
        raise Malformed(f"{len(payload)} bytes are no encoded block")
    (count,) = _LENGTH.unpack_from(payload.data)
    start = -(-(_LENGTH.size + count) // _ALIGN) * _ALIGN
    if start > min(len(payload), ENCODED_HEAD_BYTES):
        raise Malformed(f"a text of {count} bytes in front of an encoded block")
    return payload[_LENGTH.size : _LENGTH.size + count].tobytes(), payload[start:]


def is_raw(payload: memoryview) -> bool:
    """Whether a payload names the chain `raw`. Any bytes may be asked about."""
    return bytes(payload[: len(_RAW_HEAD)]) == _RAW_HEAD


def begin(text: str, out: Bytes) -> int:
    """Write the length of a chain's text, the text and zeros; returns where its bytes begin."""
    raw = text.encode()
    start = -(-(_LENGTH.size + len(raw)) // _ALIGN) * _ALIGN
    assert start <= ENCODED_HEAD_BYTES, text
    out[:start] = 0
    _LENGTH.pack_into(out.data, 0, len(raw))
    out[_LENGTH.size : _LENGTH.size + len(raw)] = np.frombuffer(raw, np.uint8)
    return start


def _join(text: str, body: Bytes, out: Bytes) -> int:
    start = begin(text, out)
    np.copyto(out[start : start + len(body)], body)
    return start + len(body)


def _block(layout: BlockLayout, use: str) -> Block:
    return Block.over(layout, _scratch.bytes(use, layout.block_bytes).data)


@dataclass(slots=True)
class Forms:
    """The payloads of one block so far. Tiers with the same codec share one. Not thread-safe."""

    block: memoryview
    first: bool  # whether it begins with a prompt's first token
    take: Callable[[], memoryview]  # memory for one more payload
    payloads: dict[str, memoryview] = field(default_factory=dict)  # by the codec that was asked for
    lost: dict[str, float] = field(
        default_factory=dict
    )  # codec -> its error on this block, if > max
