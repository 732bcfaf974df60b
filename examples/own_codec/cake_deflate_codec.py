"""`--cake-codec deflate`: DEFLATE over shuffled bytes, as an example of a codec."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_cake.codecs.codec_steps import Bytes, Malformed, is_whole
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.codecs.zstd import BytePlanes


@dataclass(frozen=True, slots=True)
class Deflate:
    """Implements `BytesStep`. One zlib stream (RFC 1950).

    Args: level: 1 (fast) to 9 (small).
    """

    level: int = 1

    name: ClassVar[str] = "deflate"  # stands with `level` in front of every block

    def __post_init__(self) -> None:
        # Also called with what a stored block says: nothing of it is trusted.
        if not is_whole(self.level, 1, 9):
            raise ValueError(f"deflate of level {self.level!r}")

    def max_bytes(self, size_bytes: int) -> int:
        return size_bytes + size_bytes // 8 + 64  # more than any zlib makes

    def encode(self, data: Bytes, out: Bytes) -> int:
        compressed = zlib.compress(data, self.level)
        out[: len(compressed)] = np.frombuffer(compressed, np.uint8)
        return len(compressed)

    def decode(self, data: Bytes, out: Bytes) -> int:
        stream = zlib.decompressobj()
        try:
            # At most one byte more than expected: a small stream may stand for any amount of bytes.
            found = stream.decompress(data, len(out) + 1)
        except zlib.error as error:
            raise Malformed(str(error)) from None
        if len(found) > len(out) or not stream.eof or stream.unused_data:
            raise Malformed(f"a stream of {len(found)} bytes, at most {len(out)} expected")
        out[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found)


CHAIN = Chain(BytePlanes(), compressors=(Deflate(),))
"""The entry point: numbers to shuffled bytes, as for `zstd`, then `Deflate`."""
