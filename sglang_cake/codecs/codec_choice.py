"""How the blocks of a store are encoded: one codec for all (`FixedCodec`), or `auto` (`AutoCodec`).

`auto` stores a block with the codec with which its prompt should start soonest. A block loads in
`l = max(size / link, block / decoding)` seconds, since decoding goes on while the next block comes
over the link (docs/theory.md#codecs). Compute and load share the blocks of a prompt, so a block
takes `c * l / (c + l)` where computing one takes `c`. That grows with `l` whatever `c` is, so the
choice does not depend on `c`.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from sglang_cake.codecs.block_arrays import relative_error
from sglang_cake.codecs.catalogue import decode, decodes_on_device
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.pipeline import RAW_CHAIN, Chain, Forms, is_raw
from sglang_cake.core.codec_names import (
    BLOCK_ERROR,
    LOSSLESS,
    NO_GAIN,
    RAW,
    SAMPLE_ERROR,
    SLOW,
    UNKNOWN_LINK,
)
from sglang_cake.core.counters import Counters
from sglang_cake.core.layout import BlockLayout

logger = logging.getLogger(__name__)
MIN_GAIN = 0.02  # share of the time: for a smaller gain, a block is not stored less exactly
MEASURE_EVERY_BLOCKS = 512
SAMPLE_BYTES = 2 << 20  # of the block on which codecs are measured: some milliseconds for most
DECODE_ROUNDS = 2  # the first one touches new memory
NO_LOSS: Mapping[str, float] = MappingProxyType({})
Decode = Callable[[BlockLayout, memoryview, memoryview], object]  # as `catalogue.decode`


@dataclass(frozen=True, slots=True)
class CodecTraits:
    """Measurements of a codec on blocks of this model, on this machine."""

    codec: str
    size_share: float  # of the block's bytes
    decode_bytes_per_s: float  # of the block's own bytes, by all threads together; 0: not measured
    error: float  # `block_arrays.relative_error`


RAW_TRAITS = CodecTraits(RAW, 1.0, float("inf"), 0.0)


class Choice(NamedTuple):
    """A codec, and the reason."""

    codec: str
    reason: str
    refused: Mapping[str, str]  # codec that was not chosen -> one of `codec_names.REFUSALS`


def choose(
    traits: Sequence[CodecTraits],
    *,
    link_bytes_per_s: float | None,
    max_error: float,
    lost: Mapping[str, float] = NO_LOSS,
) -> Choice:
    """The codec with the least predicted time to first token, within `max_error`.

    A codec that decodes more slowly than the link delivers is never chosen: raw blocks would come
    sooner. If two codecs differ by less than MIN_GAIN, the one with the smaller error is chosen.

    Args:
        traits: the traits of every candidate; raw is always one.
        link_bytes_per_s: of the store; None: not known yet, which means raw; infinite: the store
            lends raw blocks, without a copy.
        lost: codec -> its error on this very block, where that was more than `max_error`.
    """
    if link_bytes_per_s is None:
        unknown = dict.fromkeys((one.codec for one in traits), UNKNOWN_LINK)
        return Choice(RAW, "the link's speed is not known yet", unknown)
    if math.isinf(link_bytes_per_s):
        slow = dict.fromkeys((one.codec for one in traits), SLOW)
        return Choice(RAW, "memory lends raw blocks", slow)
    notes: list[str] = []
    refused: dict[str, str] = {}
    best = RAW_TRAITS
    best_s = raw_s = _byte_s(RAW_TRAITS, link_bytes_per_s)
    for one in sorted(traits, key=lambda one: one.error):
        if one.codec in lost:
            refused[one.codec] = BLOCK_ERROR
            notes.append(f"{one.codec} loses {lost[one.codec]:.2g} of this block")
        elif one.error > max_error:
            refused[one.codec] = SAMPLE_ERROR
            notes.append(f"{one.codec} loses {one.error:.2g}")
        elif one.decode_bytes_per_s < link_bytes_per_s:
            refused[one.codec] = SLOW
            notes.append(f"{one.codec} decodes {one.decode_bytes_per_s / 1e6:.0f} MB/s")
        else:
            byte_s = _byte_s(one, link_bytes_per_s)
            worse = one
            if byte_s < best_s * (1 - MIN_GAIN):
                best, best_s, worse = one, byte_s, best
            refused[worse.codec] = NO_GAIN
    reason = f"{best_s / raw_s:.2f} of the time of raw at {link_bytes_per_s / 1e6:.0f} MB/s"
    if notes:
        reason += f"; not {', '.join(notes)}"
    return Choice(best.codec, reason, refused)


def _byte_s(one: CodecTraits, link_bytes_per_s: float) -> float:
    """Seconds to load a byte of a block: the link and the decoder work at once."""
    return max(one.size_share / link_bytes_per_s, 1 / one.decode_bytes_per_s)


class FixedCodec:
    """Encodes blocks, one at a time, always with the same codec."""

    def __init__(self, layout: BlockLayout, codec: str, chain: Chain) -> None:
        self._layout = layout
        self._codec = codec
        self._chain = chain

    def encode(self, forms: Forms, tier: int) -> memoryview:
        """The payload, which all tiers share."""
        if self._codec not in forms.payloads:
            out = forms.take()
            chain = self._chain.of_first() if forms.first else self._chain
            forms.payloads[self._codec] = out[: chain.encode(self._layout, forms.block, out)]
        return forms.payloads[self._codec]


class AutoCodec:
    """Encodes blocks, one at a time, each with the codec that suits it and the link of its tier:
    `auto`. Tiers with the same codec share a payload.

    Size, decoding time and error of the codecs are measured on one block in MEASURE_EVERY_BLOCKS. A
    lossy payload is decoded again before it is stored. If it lost more than `max_error`, the next
    codec with a smaller error is tried. So the bound holds for every block, not only the sample.
    """

    def __init__(
        self,
        layout: BlockLayout,
        chains: Mapping[str, Chain],
        *,
        max_error: float,
        links: Sequence[Callable[[], float | None]],
        decode_threads: int,
        counters: Counters,
        on_device: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        decode: Decode = decode,
    ) -> None:
        """Args:
        chains: by codec, the candidates beside raw.
        links: the bytes per second of each tier, as for `choose`.
        decode_threads: how many threads decode loaded blocks.
        counters: `auto_refused_blocks` counts for each payload why other codecs were not chosen.
        on_device: chains that `decodes_on_device` are taken to be decoded in no time.
        clock, decode: for tests.
        """
        self._layout = layout
        self._chains = chains
        self._max_error = max_error
        self._links = links
        self._threads = decode_threads
        self._counters = counters
        self._on_device = on_device
        self._clock = clock
        self._decode = decode
        self._traits: list[CodecTraits] = []
        self._blocks = 0
        self._chosen = [""] * len(links)
        self._spare = bytearray()

    def encode(self, forms: Forms, tier: int) -> memoryview:
        """The payload for one tier."""
        if not forms.payloads:
            self._sample(forms)
        out: memoryview | None = None
        while True:
            choice = choose(
                self._traits,
                link_bytes_per_s=self._links[tier](),
                max_error=self._max_error,
                lost=forms.lost,
            )
            if choice.codec not in forms.payloads:
                out = forms.take() if out is None else out
                if not self._made(choice.codec, forms, out):
                    continue
                for codec, why in choice.refused.items():
                    self._counters.add("auto_refused_blocks", label=f"{codec} {why}")
            self._log(choice, tier)
            return forms.payloads[choice.codec]

    def _sample(self, forms: Forms) -> None:
        """Measure the codecs on one block in MEASURE_EVERY_BLOCKS."""
        if self._blocks % MEASURE_EVERY_BLOCKS == 0:
            with ThreadPoolExecutor(self._threads, "cake-measure") as pool:
                self._traits = [self._measure(codec, forms, pool) for codec in self._chains]
        self._blocks += 1

    def _made(self, codec: str, forms: Forms, out: memoryview) -> bool:
        """Encode the block into `out`; False if the codec loses too much of it."""
        size = self._chain(codec, forms).encode(self._layout, forms.block, out)
        error = 0.0 if codec in LOSSLESS else self._error(forms.block, out[:size])
        if error > self._max_error:
            forms.lost[codec] = error
            return False
        forms.payloads[codec] = out[:size]
        return True

    def _chain(self, codec: str, forms: Forms) -> Chain:
        chain = self._chains.get(codec, RAW_CHAIN)
        return chain.of_first() if forms.first else chain

    def _error(self, block: memoryview, payload: memoryview) -> float:
        """The `relative_error` of a block's payload."""
        if len(self._spare) != len(block):
            self._spare = bytearray(len(block))
        if is_raw(payload):
            return 0.0
        self._decode(self._layout, payload, memoryview(self._spare))
        return relative_error(self._layout, block, memoryview(self._spare))

    def _measure(self, codec: str, forms: Forms, pool: Executor) -> CodecTraits:
        group = self._layout.groups[0]
        layers = max(1, SAMPLE_BYTES * group.layers // self._layout.block_bytes)
        some = replace(group, layers=min(layers, group.layers))
        layout = BlockLayout((some,), self._layout.block_tokens)  # a block begins with them
        sample, chain = forms.block[: layout.block_bytes], self._chain(codec, forms)
        payload = memoryview(bytearray(layout.block_bytes + ENCODED_HEAD_BYTES))
        size = chain.encode(layout, sample, payload)
        outs = [memoryview(bytearray(layout.block_bytes)) for _ in range(self._threads)]
        # A lossless codec has no error. It could not be measured of NaN, or in dtypes of 8 bits.
        error = 0.0
        if codec not in LOSSLESS and not is_raw(payload):
            self._decode(layout, payload[:size], outs[0])
            error = relative_error(layout, sample, outs[0])
        share, rate = size / layout.block_bytes, float("inf")
        if error > self._max_error:  # its speed does not matter
            return CodecTraits(codec, share, 0.0, error)
        if not (self._on_device and decodes_on_device(chain)):
            took_s = self._decode_s(layout, payload[:size], outs, pool)
            rate = len(outs) * layout.block_bytes / took_s
        return CodecTraits(codec, share, rate, error)

    def _decode_s(
        self, layout: BlockLayout, payload: memoryview, outs: list[memoryview], pool: Executor
    ) -> float:
        """Seconds to decode a payload into each of `outs`, all at once, as loads do: the threads
        share the memory's bandwidth, and wait for each other where a decoder holds the GIL."""
        took_s = float("inf")
        for _ in range(DECODE_ROUNDS):
            began_s = self._clock()
            list(pool.map(lambda out: self._decode(layout, payload, out), outs))
            took_s = min(took_s, self._clock() - began_s)
        return max(took_s, 1e-9)

    def _log(self, choice: Choice, tier: int) -> None:
        """Log a codec that differs from the tier's last one."""
        if choice.codec != self._chosen[tier]:
            self._chosen[tier] = choice.codec
            where = f"{choice.codec} in tier {tier + 1}" if len(self._links) > 1 else choice.codec
            logger.info("codec auto: blocks are stored as %s: %s", where, choice.reason)
