"""Speculative decoding: a loaded prompt has the KV of the draft model too.

A wrong or missing draft KV changes no answer, since the target checks each token. It shows in the
number of tokens that are accepted at once, so each test compares that number with the one after
computing. Tokens are compared with those of transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hybrids import EXTRA_BUFFER, NO_BUFFER, STATES, STATES_ENV
from live import (
    BLOCK,
    DEADLINE_S,
    DRAFT_CHAIN,
    TOLERANCE,
    Answer,
    Live,
    PendingRequest,
    Start,
    accepted,
    distance,
    falsify_draft,
    forge,
)
from tiny_drafts import (
    VOCAB,
    build_dflash,
    build_eagle,
    build_eagle3,
    build_mimo,
    build_qwen3_next_mtp,
    build_qwen3_next_of_llama,
)
from tiny_hybrids import Transformers, build_mellum

from sglang_cake.codecs.frame import HEADER_BYTES

Make = Callable[[int], list[int]]
NEW_TOKENS = 40
POOL_TOKENS = 4096
WINDOWS = ("--swa-full-tokens-ratio", "0.25")
TRACKED = (*EXTRA_BUFFER, "--mamba-track-interval", "64")  # states of answers, too


@dataclass(frozen=True, slots=True)
class Kind:
    """A server with one algorithm.

    Attributes:
        target: mellum has sliding windows, in a pool of their own, and a qwen3-next has states.
        draft: a model with files of its own.
        next_tokens: behind a block, that its key covers.
    """

    algorithm: str
    mode: str
    flags: tuple[str, ...] = ()
    target: str = "llama"
    draft: str | None = None
    next_tokens: int = 1

    @property
    def has_states(self) -> bool:
        return self.target.startswith("qwen3-next")

    @property
    def has_ends(self) -> bool:
        return self.target == "mellum" or self.has_states


# The first three are CROWDED: pytest orders parameters by their place.
KINDS = {
    "eagle-both": Kind("EAGLE", "both", DRAFT_CHAIN, draft="eagle"),
    "standalone-windows-load": Kind(
        "STANDALONE", "load", (*DRAFT_CHAIN, *WINDOWS), target="mellum", draft="mellum"
    ),
    "mtp-states-both": Kind(
        "NEXTN", "both", (*DRAFT_CHAIN, *STATES, *TRACKED), target="qwen3-next"
    ),
    "standalone-states-load": Kind(
        "STANDALONE",
        "load",
        (*DRAFT_CHAIN, *STATES, *NO_BUFFER),
        target="qwen3-next-of-llama",
        draft="llama-of-one-layer",
    ),
    "ngram-both": Kind("NGRAM", "both", next_tokens=0),
    "ngram-windows-both": Kind("NGRAM", "both", WINDOWS, target="mellum", next_tokens=0),
    "eagle3-load": Kind(
        "EAGLE3", "load", (*DRAFT_CHAIN, "--page-size", "16"), target="llama3", draft="eagle3"
    ),
    "mtp-load": Kind("NEXTN", "load", DRAFT_CHAIN, target="mimo"),
    "ngram-states-load": Kind(
        "NGRAM", "load", (*STATES, *TRACKED), target="qwen3-next", next_tokens=0
    ),
    "mtp-states-load": Kind(
        "NEXTN", "load", (*DRAFT_CHAIN, *STATES, *NO_BUFFER), target="qwen3-next"
    ),
    "dflash-load": Kind(
        "DFLASH", "load", ("--disable-overlap-schedule",), target="llama-dflash", draft="dflash"
    ),
    "eagle3-states-load": Kind(
        "EAGLE3",
        "load",
        (*DRAFT_CHAIN, *STATES, *TRACKED),
        target="qwen3-next-of-llama",
        draft="eagle3-of-one-layer",
    ),
}
CROWDED = [*KINDS][:3]  # a chain, windows, and states
# Algorithms and pools that other kinds have in another combination.
BREADTH = {
    *("standalone-states-load", "ngram-windows-both", "ngram-states-load", "mtp-load"),
    *("mtp-states-load", "eagle3-states-load"),
}


@dataclass(slots=True)
class Speculating:
    """A running server, and its target by transformers."""

    kind: Kind
    live: Live
    model: Transformers
    known: dict[str, list[int]] = field(default_factory=dict)

    def computed(self, ids: list[int], new_tokens: int = NEW_TOKENS) -> Answer:
        """The answer to a prompt that is not stored."""
        salt = f"computed {len(self.known)} {ids[0]}"
        answer = self.answer(ids, new_tokens, cache_salt=salt)
        assert answer.loaded == 0
        return answer

    def answer(self, ids: list[int], new_tokens: int = NEW_TOKENS, **extra: Any) -> Answer:
        """The answer, with an empty tree, which is that of transformers."""
        self.live.flush()
        if self.kind.algorithm == "NGRAM":  # its drafts are of earlier answers since the flush
            self.live.ask(ids, new_tokens, cache_salt="teacher")
        answer = self.live.ask(ids, new_tokens, **extra)
        assert answer.tokens == self.expected(ids, new_tokens)
        return answer

    def expected(self, ids: list[int], new_tokens: int) -> list[int]:
        name = f"{ids} {new_tokens}"
        if name not in self.known:
            self.known[name] = self.model.answer(ids, new_tokens).tokens
        return self.known[name]


@pytest.fixture(scope="module")
def tiny_models(folder: Path) -> dict[str, Path]:
    llama, eagle = build_eagle(folder / "eagle" / "model", folder / "eagle-draft" / "model")
    llama3, eagle3 = build_eagle3(folder / "eagle3" / "model", folder / "eagle3-draft" / "model")
    llama_dflash, dflash = build_dflash(
        folder / "dflash" / "model", folder / "dflash-draft" / "model"
    )
    names = ("qwen3-next-of-llama", "llama-of-one-layer", "eagle3-of-one-layer")
    of_llama = build_qwen3_next_of_llama(*(folder / name / "model" for name in names))
    return {
        **dict(zip(names, of_llama, strict=True)),
        "llama": llama,
        "eagle": eagle,
        "llama3": llama3,
        "eagle3": eagle3,
        "llama-dflash": llama_dflash,
        "dflash": dflash,
        "mimo": build_mimo(folder / "mimo" / "model"),
        "mellum": build_mellum(folder / "mellum-drafts" / "model", window_tokens=BLOCK),
        "qwen3-next": build_qwen3_next_mtp(folder / "qwen3-next-mtp" / "model"),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.breadth] * (kind in BREADTH)) for kind in KINDS],
)
def speculating(
    request: pytest.FixtureRequest,
    start: Start,
    folder: Path,
    tiny_models: dict[str, Path],
    standins: dict[str, str],
) -> Iterator[Speculating]:
    kind = KINDS[request.param]
    target = tiny_models[kind.target]
    draft: tuple[str, ...] = ()
    if kind.draft is not None:
        draft = ("--speculative-draft-model-path", str(tiny_models[kind.draft]))
    flags = (
        *("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)),
        *("--enable-metrics", "--enable-cache-report", "--cake-mode", kind.mode),
        *("--speculative-algorithm", kind.algorithm, "--max-running-requests", "8"),
        *draft,
        *kind.flags,
    )
    env = standins | {"CAKE_TEST_SPECULATIVE": "1"}
    if kind.has_states:
        env |= STATES_ENV
    if kind.mode == "both":  # else a busy machine may compute faster than it loads, each time
        env |= {"CAKE_TEST_TOKEN_S": "0.0005"}
    store = folder / f"store-{request.param}"
    with start(target, flags, store=store, env=env) as live:
        live.races = kind.mode != "load"
        assert live.store is not None
        live.store.next_tokens = kind.next_tokens
        yield Speculating(kind, live, Transformers(target))


@pytest.fixture(autouse=True)
def no_alarm_of_speculation(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "speculating" in request.fixturenames:
        live = request.getfixturevalue("speculating").live
        live.flush()  # waits until nothing runs; then SGLang checks all its counts of memory
        live.check_log()


@pytest.fixture
def tiny(prompt: Make) -> Make:
    """Random prompts of the tiny model's vocabulary."""
    return lambda tokens: [token % VOCAB for token in prompt(tokens)]


def until_loaded(speculating: Speculating, ids: list[int], **more: Any) -> Answer:
    """Ask until blocks are loaded: a server that races may compute all of them first."""
    for _ in range(20):
        answer = speculating.answer(ids, **more)
        if answer.loaded:
            return answer
    raise AssertionError("nothing was ever loaded")


@pytest.mark.parametrize("tokens", [8 * BLOCK, 8 * BLOCK + 9])
def test_loaded_prompt_has_the_tokens_and_the_acceptance_of_a_computed_one(
    speculating: Speculating, tiny: Make, tokens: int
) -> None:
    if speculating.kind.has_ends and tokens % BLOCK <= speculating.kind.next_tokens:
        pytest.skip("the only end state of such a prompt is behind what may be loaded for it")
    ids = tiny(tokens)
    computed = speculating.computed(ids)
    speculating.live.ask_and_store(ids)
    loaded = until_loaded(speculating, ids)
    assert accepted(loaded) == accepted(computed)
    assert sum(accepted(loaded)[1:]) > sum(accepted(loaded)) / 2
    if not speculating.live.races:
        assert loaded.loaded >= (tokens - 1) // BLOCK * BLOCK - 16


def test_generated_tokens_in_the_next_turn_are_loaded_with_their_drafts(
    speculating: Speculating, tiny: Make
) -> None:
    """Rows of rejected drafts are never stored: tokens and acceptance would change."""
    ids = tiny(4 * BLOCK + 1)
    # Of an answer, SGLang keeps the last state that it tracks. The key of the block before it needs
    # one more token with KV.
    behind = 8 if speculating.kind.has_states else 0
    first = speculating.live.ask(ids, 3 * BLOCK + behind)
    turn = ids + first.tokens + tiny(20)
    # Without extra buffers SGLang drops an answer that ends inside of accepted drafts.
    drops = set(NO_BUFFER) <= set(speculating.kind.flags)
    kept = ids if drops else ids + first.tokens[:-1]
    speculating.live.store.until_stored(kept)
    if speculating.kind.has_states and not speculating.live.races:
        speculating.live.store.until_end_stored(kept)
    loaded = until_loaded(speculating, turn)
    assert accepted(loaded) == accepted(speculating.computed(turn))
    if not speculating.live.races:
        assert loaded.loaded >= (len(kept) - speculating.kind.next_tokens) // BLOCK * BLOCK


def test_wrong_draft_kv_gives_the_same_tokens_and_less_acceptance(
    speculating: Speculating, tiny: Make
) -> None:
    """The control."""
    if not speculating.kind.next_tokens or speculating.live.races:
        pytest.skip("needs a draft model, and a server that loads all blocks")
    ids = tiny(16 * BLOCK + 9)
    computed = speculating.computed(ids)
    files = speculating.live.ask_and_store(ids)
    for file in files:
        falsify_draft(file)
    lie = until_loaded(speculating, ids)
    speculating.live.store.remove(*files)
    assert lie.loaded == 16 * BLOCK
    # Steps for the same tokens. Windows of a draft model are not in blocks, and stay right.
    more = 1.25 if speculating.kind.target == "mellum" else 1.5
    assert sum(accepted(lie)) > more * sum(accepted(computed))


def test_wrong_recurrent_states_change_the_answer(speculating: Speculating, tiny: Make) -> None:
    """The control."""
    if not speculating.kind.has_states or speculating.live.races:
        pytest.skip("needs states, and a server that loads all blocks")
    ids, other = (tiny(12 * BLOCK + 9) for _ in range(2))
    computed = speculating.computed(ids)
    store = speculating.live.store
    ends = []
    for each in (ids, other):
        speculating.live.ask_and_store(each)
        ends.append(store.until_end_stored(each))
    assert distance(until_loaded(speculating, ids).logprobs, computed.logprobs) <= TOLERANCE
    for file, source in zip(*ends, strict=True):
        forge(file, source.read_bytes()[HEADER_BYTES:])
    lie = speculating.live.ask_flushed(ids, NEW_TOKENS)
    store.remove(*ends[0])
    assert lie.loaded == 12 * BLOCK
    assert distance(lie.logprobs, computed.logprobs) > 20 * TOLERANCE


def test_prompts_that_differ_behind_a_block_have_their_own_drafts(
    speculating: Speculating, tiny: Make
) -> None:
    """The last draft row of a block depends on the token behind it."""
    document = tiny(6 * BLOCK)
    one, other = ([*document, token, *tiny(30)] for token in (1, 2))
    computed = speculating.computed(other)
    speculating.live.ask_and_store(one)
    speculating.live.flush()  # else a tree without bigrams has the document's drafts of `one`
    speculating.live.ask_and_store(other)
    files = [speculating.live.store.files(ids) for ids in (one, other)]
    assert files[0][:5] == files[1][:5]
    assert (files[0][5] == files[1][5]) == (speculating.kind.next_tokens == 0)
    assert accepted(until_loaded(speculating, other)) == accepted(computed)


def test_third_prompt_with_a_beginning_is_loaded_up_to_where_they_part(
    speculating: Speculating, tiny: Make
) -> None:
    """The second one stores the end there, whose key covers the token behind it."""
    if not speculating.kind.has_ends:
        pytest.skip("needs end states")
    beginning = tiny(8 * BLOCK + 9)
    for question in (4 * BLOCK, 4 * BLOCK + 20):
        speculating.live.flush()
        speculating.live.ask_and_store(beginning + tiny(question))
    speculating.live.store.until_end_stored(beginning)
    ids = beginning + tiny(100)
    computed = speculating.computed(ids)
    loaded = until_loaded(speculating, ids)
    assert accepted(loaded) == accepted(computed)
    assert loaded.loaded == 8 * BLOCK or speculating.live.races


def test_computed_and_loaded_parts_that_meet_have_the_acceptance_of_computing(
    speculating: Speculating, tiny: Make
) -> None:
    if speculating.kind.mode != "both":
        pytest.skip("only mode both is certain to compute and to load")
    ids = tiny(36 * BLOCK + 5)
    computed = speculating.computed(ids)
    speculating.live.ask_and_store(ids)
    for _ in range(20):
        answer = until_loaded(speculating, ids)
        if answer.computed > BLOCK:
            break
    assert answer.computed > BLOCK
    assert answer.meta["cake"]["meet_token"] is not None
    assert accepted(answer) == accepted(computed)


@pytest.mark.parametrize("speculating", CROWDED, indirect=True)
def test_many_requests_in_a_small_pool_with_aborts_give_the_answers_of_transformers(
    speculating: Speculating, tiny: Make
) -> None:
    live = speculating.live
    new_tokens = 2 * BLOCK  # all together need more than the pool has
    prompts = [tiny(10 * BLOCK + i) for i in range(6)]
    for ids in prompts:
        live.ask_and_store(ids)
    live.flush()
    asked = [
        PendingRequest(live, ids, new_tokens=new_tokens, rid=f"many {i} {ids[0]}")
        for i, ids in enumerate(prompts)
    ]
    for asking in asked[::2]:
        asking.until("arrive")
        assert live.post("/abort_request", DEADLINE_S, rid=asking.rid).status_code == 200
    for asking, ids in list(zip(asked, prompts, strict=True))[1::2]:
        assert asking.answer().tokens == speculating.expected(ids, new_tokens)
    for asking, ids in list(zip(asked, prompts, strict=True))[::2]:
        tokens = asking.answer().tokens
        assert tokens == speculating.expected(ids, new_tokens)[: len(tokens)]
