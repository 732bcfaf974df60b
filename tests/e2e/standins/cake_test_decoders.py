"""Decoders of a fixed speed, for `--cake-codec auto`. A plugin of SGLang, used only by tests.

CAKE_TEST_DECODERS is the speed of every codec in bytes per second. A measured speed would vary.
"""

import os
from typing import Any


def register() -> None:
    stated = os.environ.get("CAKE_TEST_DECODERS")
    if stated is None:
        return
    from sglang_cake.codecs.codec_choice import AutoCodec

    bytes_per_s = float(stated)

    def decode_s(_: Any, layout: Any, payload: Any, outs: Any, pool: Any) -> float:
        return len(outs) * layout.block_bytes / bytes_per_s

    AutoCodec._decode_s = decode_s  # type: ignore[method-assign]
