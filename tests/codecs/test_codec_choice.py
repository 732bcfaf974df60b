"""Which codec `auto` takes, and that it keeps its bound."""

import logging
import math
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.codecs.block_arrays import Block, relative_error
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.codec_choice import (
    MEASURE_EVERY_BLOCKS,
    RAW_TRAITS,
    AutoCodec,
    CodecTraits,
    choose,
)
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.pipeline import Forms, is_raw
from sglang_cake.core.codec_names import CODECS, LOSSLESS, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import Store
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import as_bytes, kv_like

MB = 1e6
ZSTD = CodecTraits("zstd", 0.7, 900 * MB, 0.0)
INT8 = CodecTraits("int8", 0.52, 5000 * MB, 0.006)
INT4 = CodecTraits("int4", 0.27, 5000 * MB, 0.1)
CACHEGEN = CodecTraits("cachegen2", 0.25, 20 * MB, 0.09)
ALL = (ZSTD, INT8, INT4, CACHEGEN)
LAYOUT = BlockLayout.plain(2, (("k", (2, 64)), ("v", (2, 64))), "bfloat16", 128)

facts = st.builds(
    CodecTraits,
    codec=st.sampled_from(CODECS),
    size_share=st.floats(0.05, 1.2),
    decode_bytes_per_s=st.floats(1e6, 1e11),
    error=st.floats(0, 1),
)


def chosen(link: float | None, max_error: float) -> str:
    return choose(ALL, link_bytes_per_s=link, max_error=max_error).codec


@pytest.mark.parametrize(
    ("link", "max_error", "codec"),
    [
        (None, 1.0, "raw"),
        (100 * MB, 0.0, "zstd"),
        (890 * MB, 0.0, "raw"),  # zstd could only just keep up: not worth it
        (1000 * MB, 0.0, "raw"),  # zstd decodes more slowly than that
        (100 * MB, 0.01, "int8"),
        (100 * MB, 0.2, "int4"),
        (4 * MB, 0.2, "cachegen2"),
        (10 * MB, 0.2, "int4"),  # cachegen2 decodes faster than that, but not by enough
        (6000 * MB, 1.0, "raw"),
        (math.inf, 1.0, "raw"),
    ],
)
def test_codec_choice_for_link_and_bound_takes_the_fastest_codec(
    link: float | None, max_error: float, codec: str
) -> None:
    assert chosen(link, max_error) == codec


@given(st.lists(facts, max_size=6), st.floats(1e5, 1e11), st.floats(0, 1))
def test_codec_choice_random_codecs_keeps_bound_and_decodes_at_link_speed(
    some: list[CodecTraits], link: float, max_error: float
) -> None:
    """Against all alternatives."""
    choice = choose(some, link_bytes_per_s=link, max_error=max_error)
    allowed = [one for one in some if one.error <= max_error and one.decode_bytes_per_s >= link] + [
        RAW_TRAITS
    ]

    def byte_s(one: CodecTraits) -> float:
        return max(one.size_share / link, 1 / one.decode_bytes_per_s)

    found_s = min(byte_s(one) for one in allowed if one.codec == choice.codec)
    least_s = min(map(byte_s, allowed))
    assert found_s <= least_s / 0.98 ** len(some) * (1 + 1e-9)
    if max_error == 0:
        assert all(one.error == 0 for one in allowed if one.codec == choice.codec)


def test_codec_choice_reason_lists_the_refused_codecs() -> None:
    choice = choose(ALL, link_bytes_per_s=1000 * MB, max_error=0.01)
    assert choice.codec == "int8"
    assert "zstd decodes 900 MB/s" in choice.reason
    assert "int4 loses 0.1" in choice.reason


@given(st.lists(facts, max_size=6, unique_by=lambda one: one.codec), st.floats(1e5, 1e11))
def test_codec_choice_refused_codec_has_a_reason(some: list[CodecTraits], link: float) -> None:
    some = [one for one in some if one.codec != "raw"]  # always in question, measured by nobody
    lost = {one.codec: 0.5 for one in some[:1]}
    kind = {"link_bytes_per_s": link, "max_error": 0.4}
    choice = choose(some, **kind, lost=lost)
    assert {choice.codec} | choice.refused.keys() >= {one.codec for one in some}
    for one in some:
        if one.codec in lost:
            assert choice.refused[one.codec] == "block_error"
            assert f"{one.codec} loses 0.5 of this block" in choice.reason
        elif one.error > 0.4:
            assert choice.refused[one.codec] == "sample_error"
        elif one.decode_bytes_per_s < link:
            assert choice.refused[one.codec] == "slow"
        else:
            assert one.codec == choice.codec or choice.refused[one.codec] == "no_gain"
    assert choice.codec == "raw" or choice.codec not in choice.refused
    unknown = choose(some, **{**kind, "link_bytes_per_s": None})
    assert set(unknown.refused.values()) <= {"unknown_link"}
    memory = choose(some, **{**kind, "link_bytes_per_s": math.inf})
    assert set(memory.refused.values()) <= {"slow"}


def encoder(
    max_error: float,
    *links: float | None,
    decode_s: float = 1e-9,
    on_device: bool = False,
    counters: Counters | None = None,
) -> AutoCodec:
    """Decoding takes no time to speak of, or what is said."""
    chains = {name: chain_of(name, LAYOUT) for name in ("zstd", "int8", "int4")}
    ticks = iter(range(10**9))
    return AutoCodec(
        LAYOUT,
        chains,
        max_error=max_error,
        links=[lambda link=link: link for link in links],
        decode_threads=1,
        counters=counters or Counters(),
        on_device=on_device,
        clock=lambda: next(ticks) * decode_s,
    )


def forms_of(block: bytes, *, leading: bool = False) -> Forms:
    payload_bytes = LAYOUT.block_bytes + ENCODED_HEAD_BYTES
    return Forms(memoryview(block), leading, lambda: memoryview(bytearray(payload_bytes)))


def decoded(payload: memoryview) -> bytes:
    out = bytearray(LAYOUT.block_bytes)
    decode(LAYOUT, payload, memoryview(out))
    return bytes(out)


def encoded(best: AutoCodec, block: bytes) -> tuple[str, bytes]:
    forms = forms_of(block)
    payload = best.encode(forms, 0)
    ((codec, only),) = forms.payloads.items()
    assert only is payload
    return "raw" if is_raw(payload) else codec, decoded(payload)


def test_auto_codec_device_decoding_ignores_slow_cpu_decoding() -> None:
    block = kv_like(LAYOUT)
    assert encoded(encoder(0.02, 50 * MB, decode_s=1.0), block)[0] == "raw"
    assert encoded(encoder(0.02, 50 * MB, decode_s=1.0, on_device=True), block)[0] == "int8"
    # zstd is for the CPU anyway
    assert encoded(encoder(0.0, 50 * MB, decode_s=1.0, on_device=True), block)[0] == "raw"


@pytest.mark.parametrize(("max_error", "codec"), [(0.0, "zstd"), (0.02, "int8"), (0.3, "int4")])
def test_auto_codec_error_bound_limits_the_codec_and_its_error(
    max_error: float, codec: str
) -> None:
    block = kv_like(LAYOUT)
    found, restored = encoded(encoder(max_error, 50 * MB), block)
    assert found == codec
    assert (restored == block) == (max_error == 0)
    assert relative_error(LAYOUT, memoryview(block), memoryview(restored)) <= max_error


def test_auto_codec_first_block_keeps_the_first_token_exact() -> None:
    block = kv_like(LAYOUT)
    for first in (True, False):
        forms = forms_of(block)
        forms.first = first
        payload = encoder(0.02, 50 * MB).encode(forms, 0)
        assert forms.payloads.keys() == {"int8"}
        found, exact = (
            Block.over(LAYOUT, memoryview(some)).planes() for some in (decoded(payload), block)
        )
        pairs = zip(found, exact, strict=True)
        assert all((restored[0] == kept[0]).all() for restored, kept in pairs) == first


def test_auto_codec_block_above_the_bound_is_stored_losslessly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw = np.random.default_rng(0)
    count = LAYOUT.block_bytes // 2
    easy = as_bytes(draw.uniform(-1, 1, size=count), "bfloat16")
    hard = as_bytes(draw.normal(size=count), "bfloat16")
    counters = Counters()
    best = encoder(0.005, 50 * MB, counters=counters)
    with caplog.at_level(logging.INFO):
        assert encoded(best, easy)[0] == "int8"
        codec, restored = encoded(best, hard)
    assert codec in LOSSLESS
    assert restored == hard
    error = re.search(r"not int8 loses (\S+) of this block", caplog.messages[-1])
    assert error is not None
    assert float(error[1]) > 0.005
    counts = counters.snapshot()
    assert counts["auto_refused_blocks", "int8 block_error"] == 1
    assert counts["auto_refused_blocks", "int8 sample_error"] == 0
    assert counts["auto_refused_blocks", "int4 sample_error"] == 2  # of both blocks


def test_auto_codec_candidates_above_the_bound_are_not_timed() -> None:
    """It is refused anyway; decoding would take the scheduler's cores for nothing."""
    asked = [0]

    def clock() -> float:
        asked[0] += 1
        return asked[0] * 1e-9

    best = AutoCodec(
        LAYOUT,
        {name: chain_of(name, LAYOUT) for name in ("int4", "cachegen3")},
        max_error=0.01,
        links=[lambda: 50 * MB],
        decode_threads=2,
        counters=Counters(),
        clock=clock,
    )
    assert encoded(best, kv_like(LAYOUT))[0] == "raw"
    assert asked == [0]


@pytest.mark.parametrize(("at_once", "codec"), [(True, "int8"), (False, "raw")])
def test_auto_codec_decoders_are_timed_on_all_threads_at_once(at_once: bool, codec: str) -> None:
    """Four threads are four times as fast, or as slow as one where a decoder keeps the GIL."""
    now_s, lock, meeting = [0.0], threading.Lock(), threading.Barrier(4)

    def decoding(layout: BlockLayout, payload: memoryview, out: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():
            pass  # the error is measured, not the time
        elif at_once:
            if meeting.wait(30) == 0:  # all four are here: one second for all of them
                now_s[0] += 1.0
        else:
            with lock:
                now_s[0] += 1.0
        decode(layout, payload, out)

    best = AutoCodec(
        LAYOUT,
        {"int8": chain_of("int8", LAYOUT)},
        max_error=0.02,
        links=[lambda: 3 * LAYOUT.block_bytes],
        decode_threads=4,
        counters=Counters(),
        clock=lambda: now_s[0],
        decode=decoding,
    )
    assert encoded(best, kv_like(LAYOUT))[0] == codec


def test_auto_codec_random_blocks_stay_within_the_bound() -> None:
    order = random.Random(1)
    best = encoder(0.01, 50 * MB)
    for seed in range(12):
        draw = np.random.default_rng(seed)
        numbers = draw.normal(size=LAYOUT.block_bytes // 2) * order.choice([1e-3, 1, 100])
        if seed % 3 == 0:
            numbers[:: order.randrange(50, 500)] *= 100
        block = as_bytes(numbers, "bfloat16")
        _, restored = encoded(best, block)
        assert relative_error(LAYOUT, memoryview(block), memoryview(restored)) <= 0.01
    assert MEASURE_EVERY_BLOCKS > 12


@pytest.mark.parametrize("number", [0.0, np.inf, np.nan])
def test_auto_codec_first_token_that_is_not_finite_loses_nothing_else(number: float) -> None:
    best = encoder(0.1, 5 * MB)
    assert encoded(best, kv_like(LAYOUT))[0] == "int4"
    draw = np.random.default_rng(3)
    numbers, sizes = draw.normal(size=(2, LAYOUT.block_bytes // 2))
    numbers *= np.exp(3 * sizes)  # int4 loses more than the bound of such a block
    numbers[0] = number  # K of the first token, which lossy codecs keep apart
    block = as_bytes(numbers, "bfloat16")
    payload = best.encode(forms_of(block, leading=True), 0)
    rest = [bytearray(each) for each in (block, decoded(payload))]
    for each in rest:
        each[:2] = bytes(2)
    assert relative_error(LAYOUT, *map(memoryview, rest)) <= 0.1


def test_auto_codec_each_tier_gets_the_codec_for_its_link(caplog: pytest.LogCaptureFixture) -> None:
    """Decoders do 100 MB/s: no use on the fast link."""
    block, counters = kv_like(LAYOUT), Counters()
    decode_s = LAYOUT.block_bytes / (100 * MB)
    best = encoder(0.02, 1000 * MB, 5 * MB, None, decode_s=decode_s, counters=counters)
    with caplog.at_level(logging.INFO):
        forms = forms_of(block)
        payloads = [best.encode(forms, tier) for tier in range(3)]
    assert list(forms.payloads) == ["raw", "int8"]
    assert payloads[2] is payloads[0], "equal choices are encoded once"
    assert decoded(payloads[0]) == block
    starts = [line.split(": ")[1] for line in caplog.messages]
    codecs = ("raw", "int8", "raw")
    assert starts == [f"blocks are stored as {c} in tier {i + 1}" for i, c in enumerate(codecs)]
    counts = counters.snapshot()  # of two forms, not of three tiers
    assert counts["auto_refused_blocks", "int8 slow"] == 1
    assert counts["auto_refused_blocks", "zstd no_gain"] == 1
    assert counts["auto_refused_blocks", "int4 sample_error"] == 2
    assert counts["auto_refused_blocks", "zstd unknown_link"] == 0


def test_auto_codec_block_error_is_measured_once_for_all_tiers() -> None:
    draw, counters = np.random.default_rng(0), Counters()
    best = encoder(0.005, 50 * MB, 40 * MB, counters=counters)
    count = LAYOUT.block_bytes // 2
    encoded(best, as_bytes(draw.uniform(-1, 1, size=count), "bfloat16"))
    hard = as_bytes(draw.normal(size=count), "bfloat16")
    forms = forms_of(hard)
    assert best.encode(forms, 0) is best.encode(forms, 1)
    assert forms.lost.keys() == {"int8"}
    assert decoded(best.encode(forms, 1)) == hard
    assert counters.snapshot()["auto_refused_blocks", "int8 block_error"] == 1


@settings(max_examples=25)
@given(
    st.lists(st.none() | st.floats(1e6, 1e10), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.005, 0.02, 0.3]),
    st.integers(0, 3),
)
def test_auto_codec_random_links_every_tier_stays_within_the_bound(
    links: list[float | None], max_error: float, seed: int
) -> None:
    block = kv_like(LAYOUT, seed)
    best = encoder(max_error, *links, decode_s=LAYOUT.block_bytes / (100 * MB))
    forms = forms_of(block)
    for tier, link in enumerate(links):
        payload = best.encode(forms, tier)
        (codec,) = [name for name, made in forms.payloads.items() if made is payload]
        alone = forms_of(block)
        encoder(max_error, link, decode_s=LAYOUT.block_bytes / (100 * MB)).encode(alone, 0)
        assert [codec] == list(alone.payloads), "as if there were no other tier"
        assert link is None or link <= 100 * MB or codec == "raw"
        restored = decoded(payload)
        error = relative_error(LAYOUT, memoryview(block), memoryview(restored))
        assert error <= max_error
        assert codec not in LOSSLESS or restored == block
    assert len(forms.payloads) <= len(links)


def opened(url: str, layout: BlockLayout, max_error: float, counters: Counters) -> Store:
    return open_blocks(
        parse_sources(url),
        [Namespace((("model", "m"), ("codec", namespace_value("auto", max_error))))],
        layout,
        codec="auto",
        max_error=max_error,
        depth=2,
        counters=counters,
    )


async def test_auto_codec_decisions_appear_in_log_and_counters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    with caplog.at_level(logging.INFO):
        store = opened(f"{tmp_path.as_uri()}?bandwidth=2MB/s", LAYOUT, 0.02, counters)
        found = []
        for turn in range(4):
            key, block = BlockKey(bytes([turn]) * 32), kv_like(LAYOUT, turn)
            await store.put(key, memoryview(block))
            out = bytearray(LAYOUT.block_bytes)
            await store.get_into(key, memoryview(out))
            found.append(bytes(out) == block)
        await store.close()
    assert found[0]  # nothing is known of the link yet: raw
    assert not found[-1]  # at 2 MB/s, anything smaller pays
    counts = counters.snapshot()
    assert counts["encoded_blocks", "raw"] == 1
    assert sum(counts["encoded_blocks", codec] for codec in CODECS) == 4
    assert counts["stored_bytes", ""] == counts["read_bytes", ""]
    assert 0 < counts["stored_bytes", ""] < 4 * LAYOUT.block_bytes
    assert any("blocks are stored as raw" in line for line in caplog.messages)
    assert any("of the time of raw at" in line for line in caplog.messages)
    assert counts["auto_refused_blocks", "int8 unknown_link"] == 1
    assert counts["auto_refused_blocks", "int4 sample_error"] == 3


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8"])
async def test_auto_codec_kv_of_8_bits_is_stored_with_zstd(tmp_path: Path, dtype: str) -> None:
    """Packed KV of 4 bits, and indices, are `uint8`. Lossy codecs refuse such planes."""
    layout = BlockLayout.plain(2, LAYOUT.groups[0].parts, dtype, 128)
    counters = Counters()
    draw = np.random.default_rng(0)
    store = opened(f"{tmp_path.as_uri()}?bandwidth=200KB/s", layout, 0.0, counters)
    for number in range(4):
        key = BlockKey(bytes([number]) * 32)
        block = draw.integers(60, 64, layout.block_bytes, dtype=np.uint8).tobytes()
        assert await store.put(key, memoryview(block))
        out = bytearray(layout.block_bytes)
        await store.get_into(key, memoryview(out))
        assert out == block
    await store.close()
    assert counters.snapshot()["encoded_blocks", "zstd"] > 0


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_auto_codec_number_that_is_not_finite_is_no_error_of_zstd(number: float) -> None:
    numbers = np.zeros(LAYOUT.block_bytes // 2)
    numbers[0] = number
    block = as_bytes(numbers, "bfloat16")
    assert encoded(encoder(0.0, 50 * MB), block) == ("zstd", block)
