"""A server whose blocks are encoded: what comes back, and what it says about that."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, TOLERANCE, Live, Start, assert_same, distance

Make = Callable[[int], list[int]]


@pytest.fixture(scope="module", params=["zstd", "int8"])
def coded(
    request: pytest.FixtureRequest, start: Start, models: dict[str, Path], folder: Path
) -> Iterator[tuple[str, Live]]:
    codec = str(request.param)
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "8000", "--cake-mode", "load"),
        *("--cake-codec", codec, "--enable-metrics", "--sleep-on-idle"),
    )
    with start(models["first"], flags, store=folder / f"store-{codec}") as live:
        yield codec, live


def test_an_encoded_prompt_is_loaded_and_says_how_much_was_lossy(
    coded: tuple[str, Live], prompt: Make
) -> None:
    codec, live = coded
    ids = prompt(12 * BLOCK + 5)
    computed = live.ask(ids)
    assert computed.meta["cake"]["lossy_tokens"] == 0
    assert live.store is not None
    files = live.store.until_stored(ids)
    whole_bytes = max(live.metric("stored_bytes_total"), 1) / len(files)
    assert all(file.stat().st_size < 0.95 * whole_bytes for file in files)
    loaded = live.again(ids)
    assert loaded.loaded >= 11 * BLOCK
    far = distance(loaded.logprobs, computed.logprobs)
    if codec == "zstd":
        assert_same(loaded, computed)
        assert loaded.meta["cake"]["lossy_tokens"] == 0
    else:
        assert loaded.meta["cake"]["lossy_tokens"] == loaded.loaded
        assert far > TOLERANCE / 100  # if nothing was lost, nothing was encoded
        warm = live.ask(ids)  # matched in memory now: what was lossy stays so
        story = warm.meta["cake"]
        assert story["lossy_tokens"] == story["matched_tokens"] > 11 * BLOCK
