"""A prefill and a decode server for models with end states. SGLang sends the windows or the states
with the KV of a prompt, computed or loaded. With recurrent states, the decode server stores the
answers; with sliding windows, it has no cake. Every answer is compared with the one of
transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from live import (
    BLOCK,
    DRAFT_CHAIN,
    TOLERANCE,
    PendingRequest,
    Start,
    accepted,
    distance,
    forge,
)
from polling import until
from server_pair import COMMON, Pair
from tiny_drafts import VOCAB, build_qwen3_next_mtp
from tiny_hybrids import Transformers, build_mellum, build_qwen3_next

from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.demo.sglang_server import free_port

try:
    import mooncake.engine  # noqa: F401  it takes KV from one server to the other
except ImportError as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

Make = Callable[[int], list[int]]
WINDOWS = ("--page-size", "16", "--swa-full-tokens-ratio", "0.25")
STATES = (  # SGLang's default on a GPU
    *("--max-mamba-cache-size", "20", "--max-running-requests", "4"),
    *("--mamba-radix-cache-strategy", "extra_buffer"),
    *("--mamba-track-interval", str(BLOCK)),
)


@pytest.mark.parametrize(
    "state", ["windows", pytest.param("states", marks=pytest.mark.breadth), "states-mtp"]
)
def test_pair_with_end_states_answers_as_transformers_before_and_after_a_load(
    start: Start, folder: Path, standins: dict[str, str], prompt: Make, state: str
) -> None:
    at = folder / f"{state}-disaggregated" / "model"
    builders = {
        "windows": partial(build_mellum, window_tokens=64),
        "states": build_qwen3_next,
        "states-mtp": build_qwen3_next_mtp,
    }
    path, has_drafts = builders[state](at), state == "states-mtp"
    model, port, store = Transformers(path), free_port(), folder / f"store-pair-{state}"
    env = standins | {
        "CAKE_TEST_DISAGGREGATION": "1",
        "CAKE_TEST_RECURRENT": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
    }
    flags = (*COMMON, *(WINDOWS if state == "windows" else STATES))
    if has_drafts:
        env |= {"CAKE_TEST_SPECULATIVE": "1"}
        flags = (*flags, "--speculative-algorithm", "NEXTN", *DRAFT_CHAIN)
    of_prefill = (
        *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)),
        *("--cake-mode", "load"),
    )
    stores_answers = state != "windows"
    of_decode = (
        *("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "none"),
        *(("--disaggregation-decode-enable-radix-cache",) if stores_answers else ()),
    )
    document, other = ([token % VOCAB for token in prompt(10 * BLOCK + 7)] for _ in range(2))
    expected = model.answer(document, 2 * BLOCK)
    with (
        start(path, (*flags, *of_prefill), store=store, env=env) as prefill,
        start(
            path, (*flags, *of_decode), store=store if stores_answers else None, env=env
        ) as decode,
    ):
        pair = Pair(prefill, decode, port)
        steps = []

        def check(*, loaded: int, same: bool) -> None:
            answer, prefilled = pair.ask(document, new_tokens=2 * BLOCK)
            assert prefilled.loaded == loaded
            assert (answer.tokens == expected.tokens) == same
            if has_drafts:
                steps.append(accepted(answer))
            if same:
                assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE

        check(loaded=0, same=True)
        pair.ask(other)
        assert prefill.store is not None
        prefill.store.next_tokens = int(has_drafts)
        ends, foreign = [], []
        for ids, files in ((document, ends), (other, foreign)):
            prefill.store.until_stored(ids)
            files += prefill.store.until_end_stored(ids)
        pair.flush()
        check(loaded=10 * BLOCK, same=True)
        assert len(set(map(tuple, steps))) <= 1
        if stores_answers:
            check_next_turn(pair, model, document + expected.tokens, prompt(20))
        for file, source in zip(ends, foreign, strict=True):
            forge(file, source.read_bytes()[HEADER_BYTES:])
        pair.flush()
        check(loaded=10 * BLOCK, same=False)
        if stores_answers:
            check_other_prompt(pair, document)


def check_other_prompt(pair: Pair, document: list[int]) -> None:
    """The servers have two prompts of one length. The decode server keeps the states out of its
    tree, and gives them back."""
    counted = pair.decode.metric("differing_prompts_total")
    room = pair.room()
    rendered = [*document[:-1], document[-1] ^ 1]
    decoding = PendingRequest(pair.decode, document, new_tokens=2 * BLOCK, **room)
    prefilling = PendingRequest(pair.prefill, rendered, new_tokens=2 * BLOCK, **room)
    assert len(decoding.answer().tokens) == 2 * BLOCK
    prefilling.answer()
    until(lambda: pair.decode.metric("differing_prompts_total") == counted + 1, "it is counted")
    pair.flush()
    pair.decode.check_log()


def check_next_turn(pair: Pair, model: Transformers, told: list[int], question: list[int]) -> None:
    """The prefill server loads a prompt with its answer, which the decode server has stored up to
    the last block boundary in it."""
    store = pair.prefill.store
    assert store is not None
    kept = told[:-1]
    store.until_stored(kept)
    ends = store.until_end_stored(kept)
    turn = told + [token % VOCAB for token in question]
    expected = model.answer(turn, BLOCK)
    pair.flush()
    answer, prefilled = pair.ask(turn, new_tokens=BLOCK)
    assert prefilled.loaded == 12 * BLOCK
    assert answer.tokens == expected.tokens
    assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE
    pair.decode.check_log()
    store.remove(*ends)
    pair.flush()
    assert pair.ask(turn)[1].loaded == 10 * BLOCK  # the prompt ends there
