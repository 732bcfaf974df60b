"""Decoders of a stated speed, for `--cake-codec auto`; a plugin of SGLang, for tests alone.

CAKE_TEST_DECODERS says how many bytes a second every codec is found to decode: what a machine
really manages is not the same twice.
"""

import os
from typing import Any


def register() -> None:
    stated = os.environ.get("CAKE_TEST_DECODERS")
    if stated is None:
        return
    from sglang_cake.codecs.encoders import BestCodec

    bytes_per_s = float(stated)

    def decode_s(_: Any, layout: Any, payload: Any, outs: Any, pool: Any) -> float:
        return len(outs) * layout.block_bytes / bytes_per_s

    BestCodec._decode_s = decode_s  # type: ignore[method-assign]
