"""Models with sliding windows or recurrent states: an end state is stored beside the blocks.

One family has windows, and one has states. `hybrids.py` has what is done to every family.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from hybrids import (
    EXTRA_BUFFER,
    KEPT,
    NO_BUFFER,
    STATES,
    STATES_ENV,
    WINDOW_TOKENS,
    WINDOWS,
    Crowding,
    Hybrid,
    Loading,
    Make,
    Meeting,
    flags_of,
    no_hybrid_alarm,  # noqa: F401
)
from live import (
    BLOCK,
    NEW_TOKENS,
    TOLERANCE,
    PendingRequest,
    Start,
    distance,
    falsify,
)
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.kl_multiturn_utils import make_mamba_decode_assert, make_mamba_prefill_assert
from tiny_hybrids import Transformers, build_gemma_3, build_mellum, build_qwen3_next

from sglang_cake.codecs.frame import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Kind:
    """A server for one kind of model.

    Attributes:
        state: kind of the end state.
        mode: of cake; None: a server without cake.
    """

    state: str
    mode: str | None
    flags: tuple[str, ...]


KINDS = {
    "windows-both": Kind("windows", "both", WINDOWS),
    "windows-load": Kind("windows", "load", WINDOWS),
    "states-both": Kind("states", "both", (*STATES, *EXTRA_BUFFER)),
    "states-load": Kind("states", "load", (*STATES, *NO_BUFFER)),
}
STOCK = {  # servers without cake, for SGLang's kits
    "windows-stock": Kind("windows", None, WINDOWS),
    "states-stock": Kind("states", None, (*STATES, *EXTRA_BUFFER)),
}
# In mode both, speed decides what is loaded: there these situations are only more prompts.
mostly_loading = pytest.mark.parametrize(
    "hybrid",
    [
        pytest.param(name, marks=[pytest.mark.breadth] * (kind.mode == "both"))
        for name, kind in KINDS.items()
    ],
    indirect=True,
)
only_loading = pytest.mark.parametrize("hybrid", ["windows-load", "states-load"], indirect=True)


@pytest.fixture(scope="module")
def folders(folder: Path) -> dict[str, Path]:
    """The models, by the kind of their end states."""
    return {
        "windows": build_mellum(folder / "mellum" / "model", window_tokens=WINDOW_TOKENS),
        "states": build_qwen3_next(folder / "qwen3-next" / "model"),
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
    kind = (KINDS | STOCK)[request.param]
    model, env = folders[kind.state], standins | STATES_ENV
    store = folder / f"store-{kind.state}" if kind.mode else None
    if kind.mode == "load" and not store.exists():  # tests of the first server were not asked for
        first = KINDS[f"{kind.state}-both"]
        with start(model, flags_of("both", *first.flags), store=store, env=env) as live:
            Hybrid(live, Transformers(model)).ask_and_store(KEPT)
    with start(model, flags_of(kind.mode, *kind.flags), store=store, env=env) as live:
        live.races = kind.mode == "both"
        yield Hybrid(live, Transformers(model), is_second=kind.mode == "load")


class TestMeeting(Meeting):
    pass


# Windows that are computed and loaded at once are crowded in test_hybrid_families.py.
@pytest.mark.parametrize("hybrid", ["windows-load", "states-both", "states-load"], indirect=True)
class TestCrowded(Crowding):
    pass


@mostly_loading
class TestLoading(Loading):
    pass


# ---- SGLang's own test kits ----


def served(state: str) -> pytest.MarkDecorator:
    """With our class, and with SGLang's own."""
    stock = pytest.param(f"{state}-stock", marks=pytest.mark.breadth)
    return pytest.mark.parametrize("hybrid", [f"{state}-both", stock], indirect=True)


class Kit:
    """What a kit finds in its surroundings."""

    base_url: str

    @pytest.fixture(autouse=True)
    def surroundings(self, hybrid: Hybrid) -> None:
        type(self).base_url = hybrid.live.url

    @classmethod
    def flush_cache(cls) -> None:
        requests.post(cls.base_url + "/flush_cache?timeout=60", timeout=60).raise_for_status()


class RadixTreeKit(UnifiedRadixTreeTestMixin, Kit):
    model = "tiny"  # a name in what it prints
    kl_threshold = 1e-6  # the kit's own 0.003 would not notice wrong KV in a random model
    max_new_tokens = 6
    num_groups = 1  # more would be evicted
    branches_per_group = 2
    prefix_len = 384
    input_ids = tuple(random.Random(i).choices(range(1, 30000), k=448) for i in range(2))
    test_gsm8k = None  # needs a model that can calculate


@served("windows")
class TestRadixTreeWithWindows(RadixTreeKit):
    pass


@served("states")
class TestRadixTreeWithStates(RadixTreeKit):
    prefill_cache_assert = staticmethod(make_mamba_prefill_assert(64))
    # A step keeps a state at every 64th token from its own beginning, wherever that is.
    decode_cache_assert = staticmethod(make_mamba_decode_assert(64, max_checkpoint_lag=64))


@served("states")
class TestBranchingOfStates(PrefixCacheBranchingMixin, Kit):
    cache_chunk_size = 192  # of 257 tokens; the states are at every 64th one

    @classmethod
    def send_request_helper(cls, text: str) -> Any:
        """A word is a token: the tiny model has no tokenizer. The prompts part at token 241: at
        257, as in the kit, the first chunk would end before, and always leave a state."""
        ids = [1000 + len(word) + ord(word[-1]) for word in re.findall("hi|this|here|that", text)]
        body = {"input_ids": ids[16:], "sampling_params": {"max_new_tokens": 1}}
        return requests.post(cls.base_url + "/generate", json=body, timeout=60).json()


# ---- what is stored is loaded ----


@mostly_loading
@pytest.mark.parametrize("tokens", [8 * BLOCK, 8 * BLOCK + 1, 2047])
def test_prompt_of_any_length_cold_and_stored_gives_the_answer_of_transformers(
    hybrid: Hybrid, prompt: Make, tokens: int
) -> None:
    ids, live = prompt(tokens), hybrid.live
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


def test_answer_after_a_load_comes_from_the_tree_the_next_time(
    hybrid: Hybrid, prompt: Make
) -> None:
    ids = prompt(12 * BLOCK + 5)
    hybrid.ask_and_store(ids)
    hybrid.check(hybrid.live.ask_flushed(ids), ids)
    again = hybrid.live.ask(ids + prompt(9))
    assert again.loaded == 0
    assert again.cached >= 12 * BLOCK


# ---- computing and loading meet ----


def test_concurrent_requests_for_one_document_give_the_answers_of_transformers(
    hybrid: Hybrid, prompt: Make
) -> None:
    document = prompt(14 * BLOCK)
    hybrid.ask_and_store(document + prompt(1))
    hybrid.live.flush()
    prompts = [document + prompt(tail) for tail in (3, 40, 70, 300)]
    asked = [
        PendingRequest(hybrid.live, ids, new_tokens=8, rid=f"tail-{i}")
        for i, ids in enumerate(prompts)
    ]
    for asking, ids in zip(asked, prompts, strict=True):
        hybrid.check(asking.answer(), ids, 8)


# ---- what is lost or broken ----


def test_lost_end_state_is_computed_and_stored_again(hybrid: Hybrid, prompt: Make) -> None:
    ids = prompt(16 * BLOCK + 5)
    _, end = hybrid.ask_and_store(ids)
    hybrid.live.store.remove(*end)
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded < 16 * BLOCK
    hybrid.live.store.until_end_stored(ids)
    hybrid.check(hybrid.live.ask_flushed(ids), ids)


@only_loading
def test_corrupt_end_state_is_computed_and_set_aside(hybrid: Hybrid, prompt: Make) -> None:
    ids = prompt(16 * BLOCK + 5)
    _, end = hybrid.ask_and_store(ids)
    raw = bytearray(end[-1].read_bytes())
    raw[HEADER_BYTES] ^= 1
    end[-1].write_bytes(raw)
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded < 16 * BLOCK
    assert hybrid.live.store.set_aside(end[-1])


def test_hole_left_of_the_end_gives_the_answer_of_transformers(
    hybrid: Hybrid, prompt: Make
) -> None:
    ids = prompt(16 * BLOCK + 5)
    files, _ = hybrid.ask_and_store(ids)
    hybrid.live.store.remove(files[9], files[3])
    answer = hybrid.live.ask_flushed(ids)
    hybrid.check(answer, ids)
    assert answer.loaded == 6 * BLOCK or hybrid.live.races
    hybrid.live.store.until_stored(ids)  # the holes are filled again


# ---- controls: what is stored decides the answer ----


@only_loading
def test_control_wrong_blocks_change_the_answer(hybrid: Hybrid, prompt: Make) -> None:
    ids = prompt(12 * BLOCK + 1)
    files, end = hybrid.ask_and_store(ids)
    for file in files:
        falsify(file)
    hybrid.assert_changed(ids, files + end)


# ---- windows without a pool of their own ----


@pytest.mark.parametrize(
    ("build", "flags"),
    [
        pytest.param(build_mellum, ["--disable-hybrid-swa-memory"], id="mellum"),
        # SGLang makes no pool of windows for it.
        pytest.param(build_gemma_3, [], id="gemma-3", marks=pytest.mark.breadth),
    ],
)
def test_windows_in_one_pool_stored_prompt_gives_the_answer_of_transformers(
    start: Start,
    folder: Path,
    standins: dict[str, str],
    prompt: Make,
    build: Callable[..., Path],
    flags: list[str],
) -> None:
    """Blocks have the KV of all layers, and a prefix needs no end state."""
    path, ids = folder / f"one-pool-{build.__name__}", prompt(20 * BLOCK + 7)
    model = build(path / "model", window_tokens=WINDOW_TOKENS)
    expected = Transformers(model).answer(ids, NEW_TOKENS)
    env = standins | {"CAKE_TEST_ANY_BACKEND": "1"}
    with start(model, flags_of("load", *flags), store=path / "store", env=env) as live:
        files = live.ask_and_store(ids)
        answer = live.ask_flushed(ids)
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE
        assert answer.loaded == 20 * BLOCK
        for file in files:  # the control
            falsify(file)
        lie = live.ask_flushed(ids)
        assert distance(lie.logprobs, expected.logprobs) > 20 * TOLERANCE
