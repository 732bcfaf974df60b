"""Models with sliding windows or recurrent states: an end state is stored beside the blocks.

Every answer is compared with that of transformers, computed without SGLang and without a cache.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from live import (
    BLOCK,
    CHUNK,
    NEW_TOKENS,
    TOLERANCE,
    Answer,
    Live,
    PendingRequest,
    Start,
    description_of,
    distance,
    falsify,
    forge,
    layout_from,
)
from tiny_hybrids import (
    VOCAB,
    Expected,
    Transformers,
    build_lfm2,
    build_mellum,
    build_qwen3_next,
)

from sglang_cake.codecs.frame import HEADER_BYTES

Make = Callable[[int], list[int]]
WINDOW_TOKENS = 64
PAGE_TOKENS = 16
POOL_TOKENS = 4096
# A prompt that one server stores and another loads.
KEPT = [(i * i * 31 + i * 17) % VOCAB for i in range(20 * BLOCK + 7)]
WINDOW_FLAGS = ("--page-size", str(PAGE_TOKENS), "--swa-full-tokens-ratio", "0.25")
# Few states: the tree evicts some.
STATE_FLAGS = ("--max-mamba-cache-size", "20", "--max-running-requests", "4")


@dataclass(frozen=True, slots=True)
class Kind:
    """A server for one kind of model.

    Attributes:
        state: kind of the end state.
        mode: `both`: speed decides whether a block is loaded or computed.
    """

    state: str
    mode: str
    flags: tuple[str, ...]


KINDS = {
    "windows-both": Kind("windows", "both", WINDOW_FLAGS),
    "windows-load": Kind("windows", "load", WINDOW_FLAGS),
    # SGLang's default on a GPU, with overlap scheduling.
    "states-both": Kind(
        "states", "both", (*STATE_FLAGS, "--mamba-radix-cache-strategy", "extra_buffer")
    ),
    "states-load": Kind(
        "states",
        "load",
        (*STATE_FLAGS, "--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    ),
    "convolutions-load": Kind("convolutions", "load", STATE_FLAGS),
}


@dataclass(slots=True)
class Hybrid:
    """A running server, and the model by transformers.

    Attributes:
        is_second: another server has stored `KEPT` before.
    """

    kind: Kind
    live: Live
    model: Transformers
    is_second: bool = False
    expectations: dict[str, Expected] = field(default_factory=dict)

    def expected(self, ids: list[int], new_tokens: int = NEW_TOKENS) -> Expected:
        name = json.dumps([ids, new_tokens])
        if name not in self.expectations:
            self.expectations[name] = self.model.answer(ids, new_tokens)
        return self.expectations[name]

    def check(self, answer: Answer, ids: list[int], new_tokens: int = NEW_TOKENS) -> None:
        expected = self.expected(ids, new_tokens)
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE

    def ask_and_store(self, ids: list[int]) -> tuple[list[Path], list[Path]]:
        """Ask for a prompt, and wait until it is stored. Returns the files of its blocks, and of
        the end state behind them."""
        files = self.live.ask_and_store(ids)
        return files, self.live.store.until_end_stored(ids)


@pytest.fixture(scope="module")
def folders(folder: Path) -> dict[str, Path]:
    """The models, by the kind of their end states."""
    return {
        "windows": build_mellum(folder / "mellum" / "model", window_tokens=WINDOW_TOKENS),
        "states": build_qwen3_next(folder / "qwen3-next" / "model"),
        "convolutions": build_lfm2(folder / "lfm2" / "model"),
    }


@pytest.fixture(scope="module", params=KINDS)
def hybrid(
    request: pytest.FixtureRequest,
    start: Start,
    folder: Path,
    folders: dict[str, Path],
    standins: dict[str, str],
) -> Iterator[Hybrid]:
    """The servers of one kind of model share a store. The second one finds what the first one has
    stored."""
    kind = KINDS[request.param]
    model, store = folders[kind.state], folder / f"store-{kind.state}"
    env = standins | {"CAKE_TEST_RECURRENT": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}

    def flags(kind: Kind) -> tuple[str, ...]:
        return (
            *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--sleep-on-idle"),
            *("--enable-metrics", "--enable-cache-report", "--cake-mode", kind.mode, *kind.flags),
        )

    first = KINDS.get(f"{kind.state}-both", kind)
    if kind is not first and not store.exists():  # tests of the first server were not asked for
        with start(model, flags(first), store=store, env=env) as live:
            Hybrid(first, live, Transformers(model)).ask_and_store(KEPT)
    with start(model, flags(kind), store=store, env=env) as live:
        live.races = kind.mode == "both"
        yield Hybrid(kind, live, Transformers(model), is_second=kind is not first)


@pytest.fixture
def tiny(prompt: Make) -> Make:
    """Random prompts of the tiny models' vocabulary."""
    return lambda tokens: [token % VOCAB for token in prompt(tokens)]


@pytest.fixture(autouse=True)
def no_hybrid_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "hybrid" in request.fixturenames:
        live = request.getfixturevalue("hybrid").live
        live.flush()  # waits until nothing runs; then SGLang checks all its books
        live.check_log()


def only_loading(hybrid: Hybrid) -> None:
    if hybrid.live.races:
        pytest.skip("that each block is read is certain in mode load only")


# ---- what is stored is loaded ----


def test_prompt_stored_before_a_restart_is_loaded_up_to_its_end(hybrid: Hybrid) -> None:
    answer = hybrid.live.ask(KEPT)
    hybrid.check(answer, KEPT)
    hybrid.live.store.until_end_stored(KEPT)
    if hybrid.is_second:  # SGLang's own first requests may have left some tokens in the tree
        assert answer.loaded + answer.meta["cake"]["matched_tokens"] == 20 * BLOCK
        assert answer.loaded > 19 * BLOCK


@pytest.mark.parametrize("tokens", [BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 4 * CHUNK, 1000, 2047])
def test_prompt_of_any_length_cold_and_stored_gives_the_answer_of_transformers(
    hybrid: Hybrid, tiny: Make, tokens: int
) -> None:
    ids, live = tiny(tokens), hybrid.live
    hybrid.check(live.ask(ids), ids)
    live.store.until_stored(ids)
    ends_inside = tokens > BLOCK and tokens % BLOCK > 0
    if ends_inside:  # else a prompt has its last end at its own end, or a block before
        live.store.until_end_stored(ids)
    answer = live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded + answer.computed == tokens
    assert answer.cached == answer.loaded
    if ends_inside and not live.races:
        assert answer.loaded == tokens // BLOCK * BLOCK


@pytest.mark.parametrize("tail", [1, BLOCK - 1, CHUNK + 7])
def test_stored_document_with_a_new_question_is_loaded_up_to_its_end(
    hybrid: Hybrid, tiny: Make, tail: int
) -> None:
    document = tiny(10 * BLOCK + 11)
    hybrid.ask_and_store(document)
    ids = document + tiny(tail)
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded == 10 * BLOCK or hybrid.live.races


def test_stored_document_that_is_partly_in_the_tree_loads_the_rest(
    hybrid: Hybrid, tiny: Make
) -> None:
    ids = tiny(16 * BLOCK + 3)
    hybrid.ask_and_store(ids)
    hybrid.check(hybrid.live.ask_flushed(ids[: 5 * BLOCK], 1), ids[: 5 * BLOCK], 1)
    answer = hybrid.live.ask(ids)
    hybrid.check(answer, ids)
    cake = answer.meta["cake"]
    assert cake["matched_tokens"] + answer.loaded + answer.computed == len(ids)
    assert answer.loaded > 0 or hybrid.live.races


def test_answer_after_a_load_comes_from_the_tree_the_next_time(hybrid: Hybrid, tiny: Make) -> None:
    ids = tiny(12 * BLOCK + 5)
    hybrid.ask_and_store(ids)
    hybrid.check(hybrid.live.ask_flushed(ids), ids)
    again = hybrid.live.ask(ids + tiny(9))
    assert again.loaded == 0
    assert again.cached >= 12 * BLOCK


def test_generated_tokens_in_the_next_turn_give_the_answer_of_transformers(
    hybrid: Hybrid, tiny: Make
) -> None:
    ids = tiny(6 * BLOCK + 1)
    first = hybrid.live.ask(ids, 2 * BLOCK)
    hybrid.check(first, ids, 2 * BLOCK)
    turn = ids + first.tokens + tiny(20)
    hybrid.live.store.until_stored(ids + first.tokens[:-1])
    answer = hybrid.live.ask_flushed(turn)
    hybrid.check(answer, turn)
    assert answer.loaded > 0 or hybrid.live.races


# ---- computing and loading meet ----


def test_one_prompt_from_both_ends_gives_the_answer_of_transformers(
    hybrid: Hybrid, tiny: Make
) -> None:
    if not hybrid.live.races:
        pytest.skip("mode load computes nothing that is stored")
    ids = tiny(40 * BLOCK + 5)
    hybrid.ask_and_store(ids)
    for _ in range(20):  # on a busy machine all blocks may be loaded before the first chunk
        answer = hybrid.live.ask_flushed(ids)
        hybrid.check(answer, ids)
        if answer.computed >= CHUNK and answer.loaded >= 2 * BLOCK:
            break
    else:
        raise AssertionError("never from both ends")
    events = [event["event"] for event in hybrid.live.events(answer.meta["id"])]
    assert events.index("claim") < events.index("attach")  # while the request runs


def test_concurrent_requests_for_one_document_give_the_answers_of_transformers(
    hybrid: Hybrid, tiny: Make
) -> None:
    document = tiny(14 * BLOCK)
    hybrid.ask_and_store(document + tiny(1))
    hybrid.live.flush()
    prompts = [document + tiny(tail) for tail in (3, 40, 70, 300)]
    asked = [
        PendingRequest(hybrid.live, ids, new_tokens=8, rid=f"{hybrid.kind}-tail-{i}")
        for i, ids in enumerate(prompts)
    ]
    for asking, ids in zip(asked, prompts, strict=True):
        hybrid.check(asking.answer(), ids, 8)


def test_prompts_that_outgrow_the_pools_together_give_the_answers_of_transformers(
    hybrid: Hybrid, tiny: Make
) -> None:
    prompts = [tiny(18 * BLOCK + i) for i in range(1, 5)]
    for ids in prompts:
        hybrid.ask_and_store(ids)
    hybrid.live.flush()
    asked = [
        PendingRequest(hybrid.live, ids, new_tokens=40, rid=f"{hybrid.kind}-full-{i}")
        for i, ids in enumerate(prompts)
    ]
    for asking, ids in zip(asked, prompts, strict=True):
        hybrid.check(asking.answer(), ids, 40)


STAGES = (("arrive", 1), ("land", 1), ("land", 6), ("claim", 1), ("attach", 1), ("done", 1))


def test_abort_at_every_stage_of_a_load_leaks_nothing(hybrid: Hybrid) -> None:
    live = hybrid.live
    live.ask(KEPT, 1)
    live.store.until_end_stored(KEPT)
    for turn, (event, count) in enumerate(STAGES):
        live.flush()
        rid = f"{hybrid.kind}-abort-{turn}"
        asking = PendingRequest(live, KEPT, new_tokens=32, rid=rid)
        asking.until(event, count)
        live.post("/abort_request", rid=rid)
        assert asking.answer().meta["finish_reason"]["type"] in ("abort", "length")
    hybrid.check(live.ask_flushed(KEPT), KEPT)


# ---- what is lost or broken ----


def test_lost_end_state_is_computed_and_stored_again(hybrid: Hybrid, tiny: Make) -> None:
    ids = tiny(16 * BLOCK + 5)
    _, end = hybrid.ask_and_store(ids)
    hybrid.live.store.remove(*end)
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded < 16 * BLOCK
    hybrid.live.store.until_end_stored(ids)
    hybrid.check(hybrid.live.ask_flushed(ids), ids)


def test_corrupt_end_state_is_computed_and_set_aside(hybrid: Hybrid, tiny: Make) -> None:
    only_loading(hybrid)
    ids = tiny(16 * BLOCK + 5)
    _, end = hybrid.ask_and_store(ids)
    raw = bytearray(end[-1].read_bytes())
    raw[HEADER_BYTES] ^= 1
    end[-1].write_bytes(raw)
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded < 16 * BLOCK
    assert hybrid.live.store.set_aside(end[-1])


def test_hole_left_of_the_end_gives_the_answer_of_transformers(hybrid: Hybrid, tiny: Make) -> None:
    ids = tiny(16 * BLOCK + 5)
    files, _ = hybrid.ask_and_store(ids)
    hybrid.live.store.remove(files[9], files[3])
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded == 6 * BLOCK or hybrid.live.races
    hybrid.live.store.until_stored(ids)  # the holes are filled again


# ---- controls: what is stored decides the answer ----


def _assert_changed(hybrid: Hybrid, ids: list[int], stored: list[Path]) -> None:
    """The answer with forged files is wrong; without them it is right again."""
    lie = hybrid.live.ask_flushed(ids)
    hybrid.live.store.remove(*stored)
    assert lie.loaded == (len(ids) - 1) // BLOCK * BLOCK
    assert distance(lie.logprobs, hybrid.expected(ids).logprobs) > 20 * TOLERANCE
    with pytest.raises(AssertionError):
        hybrid.check(lie, ids)
    hybrid.check(hybrid.live.ask_flushed(ids), ids)


def test_control_wrong_blocks_change_the_answer(hybrid: Hybrid, tiny: Make) -> None:
    only_loading(hybrid)
    ids = tiny(12 * BLOCK + 1)
    files, end = hybrid.ask_and_store(ids)
    for file in files:
        falsify(file)
    _assert_changed(hybrid, ids, files + end)


def test_control_end_state_of_another_prompt_changes_the_answer(hybrid: Hybrid, tiny: Make) -> None:
    only_loading(hybrid)
    ids = tiny(12 * BLOCK + 1)
    other = tiny(12 * BLOCK + 1)
    files, end = hybrid.ask_and_store(ids)
    _, foreign = hybrid.ask_and_store(other)
    for file, source in zip(end, foreign, strict=True):
        forge(file, source.read_bytes()[HEADER_BYTES:])
    _assert_changed(hybrid, ids, files + end)


def test_control_window_shifted_by_one_page_changes_the_answer(hybrid: Hybrid, tiny: Make) -> None:
    only_loading(hybrid)
    if hybrid.kind.state != "windows":
        pytest.skip("no windows")
    ids = tiny(12 * BLOCK + 1)
    files, end = hybrid.ask_and_store(ids)
    payloads = np.stack([np.frombuffer(f.read_bytes()[HEADER_BYTES:], np.uint8) for f in end])
    [windows] = json.loads(description_of(end[0])["end_states"])
    layout, offset = layout_from(windows["layout"]), 0
    for plane in layout.planes:  # each has the rows of a window, cut into blocks
        size = plane.rows * plane.row_bytes
        rows = payloads[:, offset : offset + size].reshape(-1, plane.row_bytes)
        window = rows[: windows["window_tokens"]]
        window[:] = np.roll(window, PAGE_TOKENS, axis=0)
        payloads[:, offset : offset + size] = rows.reshape(len(end), size)
        offset += size
    for file, payload in zip(end, payloads, strict=True):
        forge(file, payload.tobytes())
    _assert_changed(hybrid, ids, files + end)


# ---- windows without a pool of their own ----


def test_windows_in_one_pool_stored_prompt_gives_the_answer_of_transformers(
    start: Start, folders: dict[str, Path], folder: Path, tiny: Make
) -> None:
    """Gemma 3 and OLMo 3 run in this way by default. Blocks have the KV of all layers, and a prefix
    needs no end state."""
    model, ids = folders["windows"], tiny(20 * BLOCK + 7)
    expected = Transformers(model).answer(ids, NEW_TOKENS)
    flags = (
        *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--sleep-on-idle"),
        *("--disable-hybrid-swa-memory", "--cake-mode", "load"),
    )
    with start(model, flags, store=folder / "store-one-pool") as live:
        files = live.ask_and_store(ids)
        answer = live.ask_flushed(ids)
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE
        assert answer.loaded == 20 * BLOCK
        for file in files:  # the control
            falsify(file)
        lie = live.ask_flushed(ids)
        assert distance(lie.logprobs, expected.logprobs) > 20 * TOLERANCE
