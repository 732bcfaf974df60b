"""Decoders and writes of a fixed speed, for `--cake-codec auto`. A plugin of SGLang, used only by
tests.

CAKE_TEST_DECODERS is the speed of every codec in bytes per second. Writes to a tier take no time.
Measured speeds would vary. The speed of reads is measured.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    stated = os.environ.get("CAKE_TEST_DECODERS")
    if stated is None:
        return
    from sglang_cake.codecs.codec_choice import AutoCodec
    from sglang_cake.stores.link_speed import LinkSpeed, TierLink

    class QuickLink(TierLink):
        def transferred(self, size_bytes: int, started_s: float, now_s: float) -> None:
            super().transferred(size_bytes, now_s, now_s)

    measure = LinkSpeed.__init__

    def with_quick_writes(speed: Any, *args: Any, **given: Any) -> None:
        measure(speed, *args, **given)
        speed.written = QuickLink()

    LinkSpeed.__init__ = with_quick_writes  # type: ignore[method-assign]
    build = AutoCodec.__init__

    def with_clock(codec: Any, layout: Any, *args: Any, decode_threads: int, **given: Any) -> None:
        decode_s = decode_threads * layout.block_bytes / float(stated)  # in all threads at once
        clock = ticking(decode_s)
        build(codec, layout, *args, decode_threads=decode_threads, clock=clock, **given)

    AutoCodec.__init__ = with_clock  # type: ignore[method-assign]


def ticking(seconds: float) -> Callable[[], float]:
    """A clock on which so many seconds pass between two looks at it."""
    ticks = itertools.count()
    return lambda: next(ticks) * seconds
