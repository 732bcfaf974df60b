"""A server whose blocks lose bits: what comes back, and what it says about that.

`test_shared_store` has servers with a codec that keeps every bit.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, TOLERANCE, Live, Start, distance

from sglang_cake.codec.frame import HEADER_BYTES, read_header

Make = Callable[[int], list[int]]

CODEC = "kvquant3"  # the one that must know most of the model: its heads, and its RoPE


@pytest.fixture(scope="module")
def coded(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "8000", "--cake-mode", "load"),
        *("--cake-codec", CODEC, "--enable-metrics", "--sleep-on-idle"),
    )
    with start(models["first"], flags, store=folder / f"store-{CODEC}") as live:
        yield live


def test_an_encoded_prompt_is_loaded_and_says_how_much_was_lossy(coded: Live, prompt: Make) -> None:
    ids = prompt(12 * BLOCK + 5)
    computed = coded.ask(ids)
    assert computed.meta["cake"]["lossy_tokens"] == 0
    for file in coded.store.until_stored(ids):
        header = read_header(file.read_bytes()[:HEADER_BYTES])
        assert header.codec == CODEC
        assert header.payload_bytes == file.stat().st_size - HEADER_BYTES
    loaded = coded.again(ids)
    assert loaded.loaded >= 11 * BLOCK
    assert loaded.meta["cake"]["lossy_tokens"] == loaded.loaded
    # If nothing was lost, nothing was encoded.
    assert distance(loaded.logprobs, computed.logprobs) > TOLERANCE / 100
    warm = coded.ask(ids).meta["cake"]  # matched in memory now: what was lossy stays so
    assert warm["lossy_tokens"] == warm["matched_tokens"] > 11 * BLOCK
