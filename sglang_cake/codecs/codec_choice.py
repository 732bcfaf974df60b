"""Which codec a block should be stored with: the one with which its prompt will start soonest.

A block loads in `l = max(size / link, block / decoding)` seconds, since decoding goes on while the
next block comes over the link (docs/theory.md#codecs). Compute
and load share the blocks of a prompt, so a block takes `c * l / (c + l)` of it where computing one
takes `c`. That grows with `l` whatever `c` is: the choice needs no `c`, the prediction does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sglang_cake.core.codec_names import BLOCK_ERROR, NO_GAIN, RAW, SAMPLE_ERROR, SLOW, UNKNOWN_LINK

WORTH = 0.02  # a share of the time: for less, a block is not stored less exactly


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """What was measured of a codec on blocks of this model, on this machine."""

    codec: str
    size_share: float  # of the block's bytes
    decode_bytes_per_s: float  # of the block's own bytes, by all threads at once; 0: not known
    error: float  # `error.relative_error`


NOTHING: Mapping[str, float] = MappingProxyType({})
RAW_FACTS = CodecTraits(RAW, 1.0, float("inf"), 0.0)


class Choice(NamedTuple):
    """A codec, what is predicted with it, and why it is the one."""

    codec: str
    block_s: float  # what a block adds to the time to first token; 0: not known
    reason: str
    refused: Mapping[str, str]  # codec that was not taken -> why, one of `codec_names.REFUSALS`


def choose(
    facts: Sequence[CodecTraits],
    *,
    link_bytes_per_s: float | None,
    block_bytes: int,
    max_error: float,
    compute_s: float | None = None,
    lost: Mapping[str, float] = NOTHING,
) -> Choice:
    """The codec with the least predicted time to first token, within `max_error`.

    Never one whose decoding is slower than the link: raw blocks would come sooner. Of two that
    differ by less than WORTH, the one that loses less.

    Args:
        facts: of every codec in question; raw always is.
        link_bytes_per_s: of the store; None: not known yet, which means raw.
        compute_s: what computing a block takes; None: nothing is computed beside the load.
        lost: codec -> what it lost of this very block, where that was too much.
    """
    if link_bytes_per_s is None:
        unknown = dict.fromkeys((one.codec for one in facts), UNKNOWN_LINK)
        return Choice(RAW, 0.0, "the link's speed is not known yet", unknown)
    told: list[str] = []
    refused: dict[str, str] = {}
    best, best_s = RAW_FACTS, _block_s(RAW_FACTS, link_bytes_per_s, block_bytes, compute_s)
    raw_s = best_s
    for one in sorted(facts, key=lambda one: one.error):
        if one.codec in lost:
            refused[one.codec] = BLOCK_ERROR
            told.append(f"{one.codec} loses {lost[one.codec]:.2g} of this block")
        elif one.error > max_error:
            refused[one.codec] = SAMPLE_ERROR
            told.append(f"{one.codec} loses {one.error:.2g}")
        elif one.decode_bytes_per_s < link_bytes_per_s:
            refused[one.codec] = SLOW
            told.append(f"{one.codec} decodes {one.decode_bytes_per_s / 1e6:.0f} MB/s")
        else:
            block_s = _block_s(one, link_bytes_per_s, block_bytes, compute_s)
            worse = one
            if block_s < best_s * (1 - WORTH):
                best, best_s, worse = one, block_s, best
            refused[worse.codec] = NO_GAIN
    reason = f"{best_s / raw_s:.2f} of the time of raw at {link_bytes_per_s / 1e6:.0f} MB/s"
    if told:
        reason += f"; not {', '.join(told)}"
    return Choice(best.codec, best_s, reason, refused)


def _block_s(
    one: CodecTraits, link_bytes_per_s: float, block_bytes: int, compute_s: float | None
) -> float:
    load_s = max(
        one.size_share * block_bytes / link_bytes_per_s, block_bytes / one.decode_bytes_per_s
    )
    return load_s if compute_s is None else compute_s * load_s / (compute_s + load_s)
