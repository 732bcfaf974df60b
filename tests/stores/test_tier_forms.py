"""Several stores as one: every tier gets the form of a block that suits its own link."""

import asyncio
import contextlib
import itertools
import logging

import pytest
from polling import async_until
from tiering import Clock, Tiers, opened_tiers

from sglang_cake.codecs.block_arrays import relative_error
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.codec_choice import AutoCodec, FixedCodec
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES, HEADER_BYTES
from sglang_cake.codecs.pipeline import is_raw
from sglang_cake.core.buffers import on_page
from sglang_cake.core.codec_names import CODECS, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import StoreFull, StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores import encoded
from sglang_cake.stores.base import WrapperStore
from sglang_cake.stores.circuit_breaker import FIRST_S
from sglang_cake.stores.encoded import EncodedStore
from sglang_cake.stores.link_speed import RATE_FRESH_S, LinkSpeed
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.stores.tiers.tier import FAILURES_IN_A_ROW
from sglang_cake.testing.codec_contract import kv_like
from sglang_cake.testing.store_contract import block_of, key_of, read

MB = 1e6
LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)
BLOCK = kv_like(LAYOUT)
PAYLOAD_BYTES = LAYOUT.block_bytes + ENCODED_HEAD_BYTES
DECODE_S = LAYOUT.block_bytes / (100 * MB)
FAST, SLOW = 1000 * MB, 5 * MB  # faster than the decoders of these tests, and slower
KEY = key_of("a")


class Encoded(Tiers):
    """Tiers whose links have given speeds, behind a codec."""

    def __init__(self, *speeds, codec="auto", max_error=0.02):
        super().__init__(len(speeds), block_bytes=PAYLOAD_BYTES)
        links = [tier.speed for tier in self.store.tiers]
        for link, speed in zip(links, speeds, strict=True):
            if speed is not None:
                link.read.transferred(PAYLOAD_BYTES, -PAYLOAD_BYTES / speed, 0.0)
        self.counters, ticks = Counters(), itertools.count()
        chains = {name: chain_of(name, LAYOUT) for name in ("zstd", "int8", "int4")}
        encoder = AutoCodec(
            LAYOUT,
            chains,
            max_error=max_error,
            links=[link.bytes_per_s for link in links],
            decode_threads=1,
            counters=self.counters,
            clock=lambda: next(ticks) * DECODE_S,
        )
        if codec != "auto":
            encoder = FixedCodec(LAYOUT, codec, chains[codec])
        self.blocks = EncodedStore(
            *(self.store, LAYOUT, encoder.encode),
            link=LinkSpeed(),
            counters=self.counters,
            payload_bytes=PAYLOAD_BYTES,
            depth=2,
        )

    async def stored(self, *names, block=BLOCK):
        for name in names:
            assert await self.blocks.put(key_of(name), memoryview(block))
        await self.quiet()

    async def loaded(self, key=KEY):
        out = bytearray(LAYOUT.block_bytes)
        assert await self.blocks.get_into(key, memoryview(out)) == LAYOUT.block_bytes
        return bytes(out)

    def form(self, tier, key=KEY):
        return self.memory[tier].blocks.get(key)

    def forms_made(self):
        counts = self.counters.snapshot()
        return {c: n for c in CODECS if (n := counts["encoded_blocks", c])}

    def all_buffers_are_back(self):
        pools = [tier.copies.buffers for tier in self.store.tiers]
        return all(pool.free == pool.capacity for pool in pools)


@pytest.fixture
def buffers(monkeypatch):
    """The sizes of the buffers that encoded stores have made."""
    made = []
    monkeypatch.setattr(encoded, "on_page", lambda size: made.append(size) or on_page(size))
    return made


@contextlib.asynccontextmanager
async def encoded_tiers(*speeds, **options):
    tiers = Encoded(*speeds, **options)
    try:
        yield tiers
    finally:
        await tiers.blocks.close()
    assert tiers.all_buffers_are_back()


@pytest.mark.parametrize(
    ("speeds", "max_error", "codecs"),
    [
        ((FAST, SLOW), 0.0, ("raw", "zstd")),
        ((FAST, SLOW), 0.02, ("raw", "int8")),
        ((SLOW, FAST), 0.3, ("int4", "raw")),
        ((FAST, SLOW, FAST), 0.02, ("raw", "int8", "raw")),
        ((FAST, None), 0.3, ("raw", "raw")),
        ((SLOW, SLOW), 0.02, ("int8", "int8")),
    ],
)
async def test_per_tier_encoding_each_tier_gets_the_codec_for_its_link(
    speeds, max_error, codecs, buffers
):
    async with encoded_tiers(*speeds, max_error=max_error) as tiers:
        await tiers.stored("a")
        for tier, codec in enumerate(codecs):
            payload = memoryview(tiers.form(tier))
            assert is_raw(payload) == (codec == "raw")
            out = memoryview(bytearray(LAYOUT.block_bytes))
            decode(LAYOUT, payload, out)
            assert relative_error(LAYOUT, memoryview(BLOCK), out) <= max_error
            for other in range(len(speeds)):  # read by the server from this tier alone
                tiers.outage[other].error = None if other == tier else StoreFull("no use")
            assert await tiers.loaded() == out
        assert tiers.forms_made() == dict.fromkeys(codecs, 1), "equal choices are made once"
        made = {codec: tiers.form(tier) for tier, codec in enumerate(codecs)}
        stored_bytes = sum(HEADER_BYTES + len(payload) for payload in made.values())
        assert tiers.counters.snapshot()["stored_bytes", ""] == stored_bytes
        assert len(buffers) == len(made), "a buffer for each form"


async def test_per_tier_encoding_fixed_codec_stores_one_form_in_all_tiers(buffers):
    async with encoded_tiers(FAST, SLOW, codec="int8") as tiers:
        await tiers.stored("a")
        assert tiers.form(0) == tiers.form(1)
        assert tiers.forms_made() == {"int8": 1}
        assert len(buffers) == 1


async def test_per_tier_encoding_promoted_block_keeps_its_form():
    async with encoded_tiers(FAST, SLOW) as tiers:
        await tiers.stored("a")
        below = tiers.form(1)
        await tiers.memory[0].delete(KEY)  # evicted, behind our back
        for _ in range(3):
            found = await tiers.loaded()
            await tiers.quiet()
        assert tiers.form(0) == below
        assert await tiers.loaded() == found
        assert tiers.forms_made() == {"raw": 1, "int8": 1}, "nothing is encoded again"


async def test_per_tier_encoding_failed_lower_tier_gets_no_encoding():
    async with encoded_tiers(FAST, SLOW) as tiers:
        tiers.outage[1].error = StoreUnavailable("down")
        await tiers.stored(*range(FAILURES_IN_A_ROW))
        assert tiers.forms_made()["int8"] == FAILURES_IN_A_ROW
        await tiers.stored("a")
        assert tiers.forms_made()["int8"] == FAILURES_IN_A_ROW
        assert (await tiers.counts(1))["left_out_blocks"] == 1
        tiers.outage[1].error = None
        tiers.clock.now_s += FIRST_S
        await tiers.stored("b")
        assert not is_raw(memoryview(tiers.form(1, key_of("b"))))


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("down")])
async def test_per_tier_encoding_failed_first_tier_keeps_the_other_forms(error):
    async with encoded_tiers(FAST, SLOW, FAST) as tiers:
        tiers.outage[0].error = error
        await tiers.stored("a")
        assert not is_raw(memoryview(tiers.form(1)))
        assert is_raw(memoryview(tiers.form(2)))


async def test_per_tier_encoding_second_put_is_not_copied_to_lower_tiers():
    async with encoded_tiers(FAST, SLOW) as tiers:
        await tiers.stored("a")
        assert not await tiers.blocks.put(KEY, memoryview(BLOCK))
        assert tiers.forms_made() == {"raw": 1, "int8": 1}
        assert len(tiers.calls[1].keys_of("put")) == 1


async def test_per_tier_encoding_log_lines_name_their_tier(tmp_path, caplog):
    fields = (("model", "m"), ("codec", namespace_value("auto", 0.0)))
    urls = [f"{(tmp_path / name).as_uri()}?min_free=0" for name in "ab"]

    with caplog.at_level(logging.INFO):
        sources = parse_sources(",".join(urls))
        store = open_blocks(sources, [Namespace(fields)], LAYOUT, codec="auto", depth=2)
        await store.put(KEY, memoryview(BLOCK))
        out = bytearray(LAYOUT.block_bytes)
        await store.get_into(KEY, memoryview(out))
        await store.close()
        assert out == BLOCK
    told = [line for line in caplog.messages if line.startswith("codec auto")]
    what = "codec auto: blocks are stored as raw in tier {}: the link's speed is not known yet"
    assert told == [what.format(1), what.format(2)]


# ---- how fast a link is ----


def test_link_speed_without_reads_is_that_of_writes():
    clock = Clock()
    link = LinkSpeed(clock)
    assert link.bytes_per_s() is None
    clock.now_s = 2.0
    link.written.transferred(100, 0.0, 2.0)
    assert link.bytes_per_s() == 50
    clock.now_s = 3.0
    link.read.transferred(100, 2.0, 3.0)
    assert link.bytes_per_s() == 100
    link.written.transferred(100, 2.0, 3.0)
    clock.now_s += RATE_FRESH_S + 1
    assert link.bytes_per_s() == 100, "what was known once"


async def test_tier_speed_is_that_of_its_own_reads_and_writes():
    async with opened_tiers() as tiers:

        class Slow(WrapperStore):
            async def put(self, key, data):
                tiers.clock.now_s += 4.0
                return await super().put(key, data)

            async def get_into(self, key, out, progress=None):
                tiers.clock.now_s += 2.0
                return await super().get_into(key, out, progress)

        tiers.store.tiers[1].store = Slow(tiers.memory[1])
        fast, slow = (tier.speed for tier in tiers.store.tiers)
        assert (fast.bytes_per_s(), slow.bytes_per_s()) == (None, None)
        await tiers.put("a")
        await tiers.quiet()
        size = len(block_of("a"))
        assert fast.bytes_per_s() > size
        assert slow.bytes_per_s() == size / 4.0
        await tiers.memory[0].delete(key_of("a"))
        await tiers.read("a")
        assert slow.bytes_per_s() == size / 2.0


# ---- a put of one form a tier ----


async def test_tiered_store_put_forms_encodes_only_what_the_queue_takes():
    async with opened_tiers(copy_bytes=0) as tiers:
        gate, asked = asyncio.Event(), []

        class Gated(WrapperStore):
            async def put(self, key, data):
                await gate.wait()
                return await super().put(key, data)

        async def form_of(tier):
            asked.append(tier)
            return block_of(tier)

        tiers.store.tiers[1].store = Gated(tiers.memory[1])
        for name in range(5):
            assert await tiers.store.put_forms(key_of(name), form_of)
        assert asked == [0, 1] * 2 + [0] * 3
        assert (await tiers.counts(1))["queue_full_blocks"] == 3
        gate.set()
        await tiers.quiet()
        for tier in range(2):
            assert await read(tiers.memory[tier], key_of(0)) == block_of(tier)


async def test_tiered_store_form_that_fails_skips_only_its_tier():
    async with opened_tiers(count=3) as tiers:

        async def form_of(tier):
            if tier == 1:
                raise StoreUnavailable("closed")
            return block_of(tier)

        assert await tiers.store.put_forms(KEY, form_of)
        await tiers.quiet()
        assert (await tiers.counts(1))["dropped_blocks"] == 1
        assert [len(memory) for memory in tiers.memory] == [1, 0, 1]


@pytest.mark.parametrize("ends", ["deleted", "cancelled"])
async def test_tiered_store_put_ended_during_encoding_leaves_no_copy(ends):
    async with opened_tiers(count=3) as tiers:
        making, gate = asyncio.Event(), asyncio.Event()

        async def form_of(tier):
            if tier == 1:
                making.set()
                await gate.wait()
            return block_of("a")

        putting = asyncio.create_task(tiers.store.put_forms(KEY, form_of))
        await making.wait()
        if ends == "deleted":
            await tiers.store.delete(KEY)
            gate.set()
        else:
            putting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await putting
        await tiers.quiet()
        there = [len(memory) for memory in tiers.memory]
        assert there == ([0, 0, 0] if ends == "deleted" else [1, 0, 0])
        for tier in tiers.store.tiers:
            assert tier.copies.buffers.free == tier.copies.buffers.capacity


async def test_encoded_store_cancelled_puts_return_their_buffers(buffers):
    async with encoded_tiers(FAST, SLOW) as tiers:
        for ticks in range(0, 40, 4):
            putting = asyncio.create_task(tiers.blocks.put(key_of(ticks), memoryview(BLOCK)))
            for _ in range(ticks):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait([putting])
            await async_until(tiers.all_buffers_are_back)
        assert len(buffers) <= 2
        await tiers.stored("b")
        assert await tiers.loaded(key_of("b")) == BLOCK
