"""A server of embeddings: its vectors do not depend on how the KV of a prompt was got."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from live import BLOCK, TOLERANCE, Live, Start, falsify

Make = Callable[[int], list[int]]


def vector_of(live: Live, ids: list[int], rid: str) -> tuple[np.ndarray, int]:
    """The vector of a prompt, and how many of its tokens were loaded."""
    reply = live.post("/encode", input_ids=ids, rid=rid)
    assert reply.status_code == 200, reply.text[:500]
    (done,) = [event for event in live.events(rid) if event["event"] == "done"]
    return np.array(reply.json()["embedding"]), done["loaded_tokens"]


def test_embedding_server_vectors_are_equal_before_and_after_a_load(
    start: Start, models: dict[str, Path], folder: Path, prompt: Make
) -> None:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000"),
        *("--is-embedding", "--cake-mode", "load"),
    )
    document = prompt(11 * BLOCK - 1)  # SGLang counts a token behind it as generated
    with start(models["first"], flags, store=folder / "store-embeddings") as live:
        computed, tokens = vector_of(live, document, "computed")
        assert tokens == 0
        assert live.store is not None
        files = live.store.until_stored(document[: 10 * BLOCK])
        live.flush()
        loaded, tokens = vector_of(live, document, "loaded")
        assert tokens == 10 * BLOCK
        assert np.abs(loaded - computed).max() <= TOLERANCE
        for file in files:
            falsify(file)
        live.flush()
        wrong, tokens = vector_of(live, document, "wrong")
        assert tokens == 10 * BLOCK
        assert np.abs(wrong - computed).max() > 20 * TOLERANCE
        assert len(live.store.blocks()) == 10
