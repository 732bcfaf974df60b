"""A server with a lossy codec: its answers, and what it reports about lossy tokens.

`test_shared_store` has servers with a codec that keeps every bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live import BLOCK, TOLERANCE, Live, Start, StoreView, assert_same, distance, layout_of
from polling import until

from sglang_cake.codecs.block_arrays import relative_error
from sglang_cake.codecs.catalogue import chain_of, decode
from sglang_cake.codecs.frame import HEADER_BYTES, read_header
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.core.codec_names import CODECS

Make = Callable[[int], list[int]]

CODEC = "kvquant3"  # it depends on the most traits of the model: its heads and its RoPE
MAX_ERROR = 0.02  # of `auto`: more than int8 loses, less than all others do
# Far above the slow tier, and below a tier that was only written (`cake_test_decoders`).
DECODERS_BYTES_PER_S, SLOW_LINK = 1e6, "0.25MB/s"
BLOCKS = 4


@pytest.fixture(scope="module")
def coded(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "8000", "--cake-mode", "load"),
        *("--cake-codec", CODEC, "--enable-metrics"),
    )
    with start(models["first"], flags, store=folder / f"store-{CODEC}") as live:
        yield live


def test_server_kvquant3_prompt_is_loaded_and_counted_as_lossy(coded: Live, prompt: Make) -> None:
    ids = prompt(12 * BLOCK + 5)
    computed = coded.ask(ids)
    assert computed.meta["cake"]["lossy_tokens"] == 0
    files = coded.store.until_stored(ids)
    first, *others = (opened(file)[1].leading for file in files)
    assert first is not None
    assert set(others) == {None}
    for file in files:
        header = read_header(file.read_bytes()[:HEADER_BYTES])
        assert header.codec == CODEC
        assert header.payload_bytes == file.stat().st_size - HEADER_BYTES
    loaded = coded.ask_flushed(ids)
    assert loaded.loaded >= 11 * BLOCK
    assert loaded.meta["cake"]["lossy_tokens"] == loaded.loaded
    # If nothing was lost, nothing was encoded.
    assert distance(loaded.logprobs, computed.logprobs) > TOLERANCE / 100
    warm = coded.ask(ids).meta["cake"]  # matched in memory now: what was lossy stays so
    assert warm["lossy_tokens"] == warm["matched_tokens"] > 11 * BLOCK


@pytest.fixture(scope="module")
def slow(folder: Path) -> StoreView:
    return StoreView(folder / "store-slow")


@pytest.fixture(scope="module")
def choosing(
    start: Start, models: dict[str, Path], folder: Path, slow: StoreView, standins: dict[str, str]
) -> Iterator[Live]:
    """Codec `auto`. The tier `slow` is below a fast folder."""
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "8000", "--cake-mode", "load"),
        *("--cake-codec", "auto", "--cake-max-error", str(MAX_ERROR)),
        "--enable-metrics",
    )
    with start(
        models["first"],
        flags,
        store=folder / "store-fast",
        bandwidth="100GB/s",
        urls=[f"{slow.root.as_uri()}?bandwidth={SLOW_LINK}&min_free=0"],
        env={**standins, "CAKE_TEST_DECODERS": str(DECODERS_BYTES_PER_S)},
    ) as live:
        yield live


def test_server_auto_codec_stores_each_tier_with_its_own_codec(
    choosing: Live, slow: StoreView, prompt: Make
) -> None:
    # Until the slow tier is read, its write speed is the estimate of its read speed.
    first = prompt(BLOCKS * BLOCK + 5)
    assert forms(choosing.ask_and_store(first)) == forms(stored(slow, first)) == {"raw"}
    choosing.store.remove(*choosing.store.files(first))
    assert choosing.ask_flushed(first).loaded == BLOCKS * BLOCK

    near, far = prompt(BLOCKS * BLOCK + 5), prompt(BLOCKS * BLOCK + 5)
    computed = {name: choosing.ask(ids) for name, ids in (("near", near), ("far", far))}
    for ids in (near, far):
        exact, lossy = choosing.store.until_stored(ids), stored(slow, ids)
        assert (forms(exact), forms(lossy)) == ({"raw"}, {"int8"})
        for one, other in zip(exact, lossy, strict=True):
            error = relative_error(layout_of(one), opened(one)[0], opened(other)[0])
            assert 0 < error <= MAX_ERROR

    slow.remove(*slow.files(near))
    loaded = choosing.ask_flushed(near)
    assert_same(loaded, computed["near"])
    choosing.store.remove(*choosing.store.files(far))
    blurred = choosing.ask_flushed(far)
    assert loaded.loaded == blurred.loaded == BLOCKS * BLOCK
    assert distance(blurred.logprobs, computed["far"].logprobs) > TOLERANCE / 100
    for answer in (loaded, blurred):  # the namespace may hold either
        assert answer.meta["cake"]["lossy_tokens"] == answer.loaded

    said = choosing.server.logs()
    assert "codec auto: blocks are stored as raw in tier 1: " in said
    assert "codec auto: blocks are stored as int8 in tier 2: " in said
    until(
        lambda: choosing.metric("encoded_blocks_total", codec="int8") == 2 * BLOCKS, "all as int8"
    )
    assert choosing.metric("auto_refused_blocks_total", codec="int8", reason="slow") > 0


def stored(tier: StoreView, ids: list[int]) -> list[Path]:
    """The files of a prompt's blocks in a tier. Waits until all are stored."""
    until(tier.namespaces, "a namespace in the tier")
    return tier.until_stored(ids)


def opened(file: Path) -> tuple[memoryview, Chain]:
    """A block, and how it was stored."""
    layout = layout_of(file)
    block = memoryview(bytearray(layout.block_bytes))
    return block, decode(layout, memoryview(file.read_bytes())[HEADER_BYTES:], block)


def forms(files: list[Path]) -> set[str]:
    """The codecs of the blocks in these files."""
    assert all(read_header(file.read_bytes()[:HEADER_BYTES]).codec == "auto" for file in files)
    by_chain = {chain_of(name, layout_of(files[0])): name for name in CODECS}
    return {by_chain[replace(opened(file)[1], leading=None)] for file in files}
