"""zstd over bytes (RFC 8878), by the `zstandard` package."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import zstandard

from sglang_cake.codecs.steps import Bytes, Malformed, is_whole

_own = threading.local()  # contexts are not thread-safe, and take a while to make


@dataclass(frozen=True, slots=True)
class Zstd:
    """Implements `BytesStep`. One frame, which knows its length."""

    level: int = 1
    long: bool = False  # look for repeats in the whole block, not in the last some 100 kB

    name: ClassVar[str] = "zstd"

    def __post_init__(self) -> None:
        if not is_whole(self.level, -50, 22) or type(self.long) is not bool:
            raise ValueError(f"zstd of level {self.level!r}, long {self.long!r}")

    def max_bytes(self, size_bytes: int) -> int:
        return size_bytes + size_bytes // 255 + 64  # ZSTD_compressBound, rounded up

    def encode(self, data: Bytes, out: Bytes) -> int:
        squeezed = np.frombuffer(self._compressor().compress(data), np.uint8)
        np.copyto(out[: len(squeezed)], squeezed)
        return len(squeezed)

    def decode(self, data: Bytes, out: Bytes) -> int:
        try:
            size = zstandard.frame_content_size(data.data)
            if not 0 <= size <= len(out):
                raise Malformed(f"a zstd frame of {size} bytes, at most {len(out)} expected")
            done = 0
            with _decompressor().stream_reader(data, closefd=False) as reader:
                while done < size:
                    got = reader.readinto(out.data[done:size])
                    if not got:
                        break
                    done += got
        except zstandard.ZstdError as error:
            raise Malformed(str(error)) from None
        if done != size:
            raise Malformed(f"a zstd frame ends after {done} of {size} bytes")
        return size

    def _compressor(self) -> Any:
        known: dict[Zstd, Any] = _own.__dict__.setdefault("compressors", {})
        if self not in known:
            params = zstandard.ZstdCompressionParameters.from_level(
                self.level, enable_ldm=self.long, write_content_size=1
            )
            known[self] = zstandard.ZstdCompressor(compression_params=params)
        return known[self]


def _decompressor() -> Any:
    if not hasattr(_own, "decompressor"):
        # What long mode made needs a window as large as the block.
        _own.decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    return _own.decompressor
