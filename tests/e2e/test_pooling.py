"""A server that scores prompts: its results do not depend on how the KV of a prompt was got."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from live import BLOCK, TOLERANCE, Live, Start, falsify

from sglang_cake.demo.models import write_model

Make = Callable[[int], list[int]]


def build_judge(llama: Path, path: Path, labels: int) -> Path:
    """Write a Llama to `path` that is of the shape of `llama` and scores a prompt by labels."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig.from_pretrained(llama, num_labels=labels)
    return write_model(path, LlamaForSequenceClassification, config)


def vector_of(live: Live, path: str, ids: list[int], rid: str) -> tuple[np.ndarray, int]:
    """The scores of a prompt, and how many of its tokens were loaded."""
    reply = live.post(path, input_ids=ids, rid=rid)
    assert reply.status_code == 200, reply.text[:500]
    (done,) = [event for event in live.events(rid) if event["event"] == "done"]
    return np.array(reply.json()["embedding"]), done["loaded_tokens"]


@pytest.mark.parametrize(
    ("backend", "numbers"),
    [
        ("sglang", 16),
        # It has no scores: a vector is the hidden state of the last token.
        pytest.param("transformers", 256, marks=pytest.mark.breadth),
    ],
)
def test_pooling_server_vectors_and_scores_are_equal_before_and_after_a_load(
    start: Start, models: dict[str, Path], folder: Path, prompt: Make, backend: str, numbers: int
) -> None:
    """Scores are a linear function of the vector of the last token, which embeddings are.

    SGLang does not chunk prompts here.
    """
    model = models["first"]
    if backend == "sglang":
        model = build_judge(model, folder / "judge", labels=numbers)
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--model-impl", backend),
        *("--is-embedding", "--cake-mode", "load", "--chunked-prefill-size", "-1"),
    )
    document = prompt(11 * BLOCK - 1)  # SGLang counts a token behind it as generated
    with start(model, flags, store=folder / f"store-vectors-{backend}") as live:
        computed, tokens = vector_of(live, "/encode", document, "computed")
        assert (computed.shape, tokens) == ((numbers,), 0)
        assert live.store is not None
        files = live.store.until_stored(document[: 10 * BLOCK])
        live.flush()
        loaded, tokens = vector_of(live, "/classify", document, "loaded")
        assert tokens == 10 * BLOCK
        assert np.abs(loaded - computed).max() <= TOLERANCE
        live.store.remove(files[4])  # its block is computed between two loaded parts
        live.flush()
        mixed, tokens = vector_of(live, "/classify", document, "mixed")
        assert tokens == 9 * BLOCK
        assert np.abs(mixed - computed).max() <= TOLERANCE
        for file in live.store.until_stored(document[: 10 * BLOCK]):
            falsify(file)
        live.flush()
        wrong, tokens = vector_of(live, "/classify", document, "wrong")
        assert tokens == 10 * BLOCK
        assert np.abs(wrong - computed).max() > 20 * TOLERANCE
        assert len(live.store.blocks()) == 10
