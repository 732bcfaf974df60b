"""The first token of a prompt, kept as it is.

Models attend to the first token whatever it is, since attention must go somewhere: it is a sink
(StreamingLLM, arXiv 2309.17453). An error there is an error of every later token. KVQuant keeps it
apart (arXiv 2401.18079, section 3.5), and so does every codec here that loses bits.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_cake.codecs.blocks import Block
from sglang_cake.codecs.steps import Bytes, Malformed, is_whole
from sglang_cake.core.layout import BlockLayout

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Leading:
    """The first `tokens` rows of every plane, in the order of the block, in front of what the other
    steps make; zero bytes up to a multiple of 64. The other steps get copies of the row behind
    them: a sink stands far out, and would widen the range of every channel."""

    tokens: int = 1

    name: ClassVar[str] = "leading"

    def __post_init__(self) -> None:
        if not is_whole(self.tokens, 1, 4096):
            raise ValueError(f"{self.tokens!r} tokens")

    def size_bytes(self, layout: BlockLayout) -> int:
        """Bytes of the rows. Raises: Malformed if a block has fewer."""
        if self.tokens > layout.block_tokens:
            raise Malformed(f"{self.tokens} tokens of {layout.block_tokens}")
        return -(-self.tokens * layout.token_bytes // _ALIGN) * _ALIGN

    def set_apart(self, block: Block, kept: Bytes) -> None:
        """Move the rows to `kept`, of `size_bytes`."""
        kept[:] = 0
        words, at = kept[: self.tokens * block.layout.token_bytes].view(block.words.dtype), 0
        for plane in block.planes():
            rows = plane[: self.tokens]
            words[at : at + rows.size] = rows.reshape(-1)
            at += rows.size
            if self.tokens < len(plane):
                rows[:] = plane[self.tokens]

    def put_back(self, kept: Bytes, block: Block) -> None:
        """The inverse of `set_apart`."""
        words, at = kept[: self.tokens * block.layout.token_bytes].view(block.words.dtype), 0
        for plane in block.planes():
            rows = plane[: self.tokens]
            rows[:] = words[at : at + rows.size].reshape(rows.shape)
            at += rows.size
