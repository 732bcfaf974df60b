"""Who encodes the blocks of a store: one codec for all, or the best for each."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

from sglang_cake.codecs.catalogue import decode, left_to_device
from sglang_cake.codecs.codec_choice import Choice, CodecTraits, choose
from sglang_cake.codecs.encoded_payload import HEAD_BYTES
from sglang_cake.codecs.encodings import Forms
from sglang_cake.codecs.pipeline import RAW_CHAIN, Chain, is_raw
from sglang_cake.codecs.relative_error import relative_error
from sglang_cake.core.codec_names import LOSSLESS
from sglang_cake.core.counters import Counters
from sglang_cake.core.layout import BlockLayout

logger = logging.getLogger(__name__)
MEASURE_EVERY_BLOCKS = 512
SAMPLE_BYTES = 2 << 20  # of the block that codecs are measured on: some milliseconds for most
DECODE_TURNS = 2  # the first touches new memory


class OneCodec:
    """Encodes blocks, one at a time, always with the same codec."""

    def __init__(self, layout: BlockLayout, codec: str, chain: Chain) -> None:
        self._layout, self._codec = layout, codec
        self._chain, self._first = chain, chain.of_first()

    def encode(self, forms: Forms, tier: int) -> memoryview:
        """The payload that any tier gets."""
        out, chain = forms.take(), self._first if forms.first else self._chain
        forms.payloads[self._codec] = out[: chain.encode(self._layout, forms.block, out)]
        return forms.payloads[self._codec]


class BestCodec:
    """Encodes blocks, one at a time, each with the codec that suits it and the link of the tier
    that gets it: `auto`. Tiers that the same codec suits share what it made.

    Codecs are measured on the blocks themselves: size, time to decode and error, now and then. What
    a lossy one makes of a block is decoded again before it is stored: when it lost more than is
    allowed, here and now, the next that loses less takes its place. So the bound holds for every
    block, whatever the sample said.
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
    ) -> None:
        """Args:
        chains: by codec, what may be chosen beside raw.
        links: how many bytes a second each tier gives; None: not known.
        decode_threads: that decode what is loaded.
        counters: `auto_refused_blocks` says of every payload why it was not another codec's.
        on_device: a device decodes what it can, in hardly any time.
        """
        self._layout, self._chains, self._max_error = layout, chains, max_error
        self._links, self._threads, self._clock = links, decode_threads, clock
        self._counters, self._on_device = counters, on_device
        self._facts: list[CodecTraits] = []
        self._blocks = 0
        self._chosen = [""] * len(links)
        self._spare = bytearray()

    def encode(self, forms: Forms, tier: int) -> memoryview:
        """The payload that a tier gets."""
        if not forms.payloads:
            self._sample(forms)
        out: memoryview | None = None
        while True:
            choice = choose(
                self._facts,
                link_bytes_per_s=self._links[tier](),
                block_bytes=self._layout.block_bytes,
                max_error=self._max_error,
                lost=forms.lost,
            )
            if choice.codec not in forms.payloads:
                out = forms.take() if out is None else out
                if not self._made(choice.codec, forms, out):
                    continue
                for codec, why in choice.refused.items():
                    self._counters.add("auto_refused_blocks", label=f"{codec} {why}")
            self._tell(choice, tier)
            return forms.payloads[choice.codec]

    def _sample(self, forms: Forms) -> None:
        """Measure the codecs, if it is time to."""
        if self._blocks % MEASURE_EVERY_BLOCKS == 0:
            with ThreadPoolExecutor(self._threads, "cake-measure") as pool:
                self._facts = [self._measure(codec, forms, pool) for codec in self._chains]
        self._blocks += 1

    def _made(self, codec: str, forms: Forms, out: memoryview) -> bool:
        """Make the block's payload of a codec in `out`; False if too much is lost."""
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
        """Of what was made of a block, as `relative_error`."""
        if len(self._spare) != len(block):
            self._spare = bytearray(len(block))
        if is_raw(payload):
            return 0.0
        decode(self._layout, payload, memoryview(self._spare))
        return relative_error(self._layout, block, memoryview(self._spare))

    def _measure(self, codec: str, forms: Forms, pool: Executor) -> CodecTraits:
        layers = max(1, SAMPLE_BYTES * self._layout.layers // self._layout.block_bytes)
        layout = replace(self._layout, layers=min(layers, self._layout.layers))
        sample, chain = forms.block[: layout.block_bytes], self._chain(codec, forms)
        payload = memoryview(bytearray(layout.block_bytes + HEAD_BYTES))
        size = chain.encode(layout, sample, payload)
        outs = [memoryview(bytearray(layout.block_bytes)) for _ in range(self._threads)]
        decode(layout, payload[:size], outs[0])
        error = 0.0 if is_raw(payload) else relative_error(layout, sample, outs[0])
        share, rate = size / layout.block_bytes, float("inf")
        if error > self._max_error:  # it is out, however fast it is
            return CodecTraits(codec, share, 0.0, error)
        if not (self._on_device and left_to_device(chain)):
            rate = (
                len(outs) * layout.block_bytes / self._decode_s(layout, payload[:size], outs, pool)
            )
        return CodecTraits(codec, share, rate, error)

    def _decode_s(
        self, layout: BlockLayout, payload: memoryview, outs: list[memoryview], pool: Executor
    ) -> float:
        """Seconds to decode a payload into each of `outs`, all at once, as loads have it: they
        share the memory's bandwidth, and would wait for each other where one keeps the GIL."""
        took_s = float("inf")
        for _ in range(DECODE_TURNS):
            begun_s = self._clock()
            list(pool.map(lambda out: decode(layout, payload, out), outs))
            took_s = min(took_s, self._clock() - begun_s)
        return max(took_s, 1e-9)

    def _tell(self, choice: Choice, tier: int) -> None:
        if choice.codec != self._chosen[tier]:
            self._chosen[tier] = choice.codec
            where = f"{choice.codec} in tier {tier + 1}" if len(self._links) > 1 else choice.codec
            logger.info("codec auto: blocks are stored as %s: %s", where, choice.reason)
