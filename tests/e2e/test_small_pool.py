"""A pool that is too small for all requests: page 16, mixed chunks, no overlap scheduling, mode
`auto`."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import (
    BLOCK,
    TOLERANCE,
    Answer,
    Live,
    PendingRequest,
    Start,
    assert_same,
    distance,
    falsify,
)
from polling import until

Make = Callable[[int], list[int]]
POOL = 2048
# With `ignore_eos`, SGLang reserves slots for all tokens of an answer and never retracts. Answers
# without it have their full length too, since the model has no end-of-sequence token.
HOPEFUL = {"ignore_eos": False}


@pytest.fixture(scope="module")
def small(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    flags = (
        *("--dtype", "float32", "--max-total-tokens", str(POOL), "--page-size", "16"),
        *("--enable-mixed-chunk", "--disable-overlap-schedule"),
        *("--enable-metrics", "--schedule-conservativeness", "0.05"),
    )
    store, bandwidth = folder / "store-small", "50MB/s"  # `auto` is to load, on any machine
    with start(models["first"], flags, store=store, bandwidth=bandwidth) as live:
        yield live


def test_small_pool_mode_auto_loads_and_falsified_kv_changes_the_answer(
    small: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(24 * BLOCK + 9)
    files = small.ask_and_store(ids)
    assert_same(until_loaded(small, ids), plain.reference(ids))
    for file in files:  # the control
        falsify(file)
    lie = until_loaded(small, ids)
    small.store.remove(*files)
    assert distance(lie.logprobs, plain.reference(ids).logprobs) > 20 * TOLERANCE


def until_loaded(live: Live, ids: list[int], tries: int = 20) -> Answer:
    """Ask until `auto` loads: it has to measure its costs first."""
    for _ in range(tries):
        answer = live.ask_flushed(ids)
        if answer.loaded:
            return answer
    raise AssertionError("nothing was ever loaded")


def test_small_pool_mixed_chunks_give_the_plain_answers(
    small: Live, plain: Live, prompt: Make
) -> None:
    document = prompt(9 * BLOCK + 20)
    small.ask_and_store(document)
    small.flush()
    prompts = [document + prompt(n) for n in (1, 40, 70)]
    asked = [
        PendingRequest(small, ids, new_tokens=24, rid=f"mixed-{i}") for i, ids in enumerate(prompts)
    ]
    for asking, ids in zip(asked, prompts, strict=True):
        assert_same(asking.answer(), plain.reference(ids, 24))


def test_small_pool_retracted_requests_give_the_plain_answers(
    small: Live, plain: Live, prompt: Make
) -> None:
    """Three requests that outgrow the pool together, each over a stored prompt."""
    prompts = [prompt(9 * BLOCK + i) for i in range(3)]
    for ids in prompts:
        small.ask_and_store(ids)
    # 300 slots of the pool are left. The last request needs few enough that SGLang admits it when
    # each of the others has 120. All three need more than 300 before one has ended.
    new_tokens = (190, 190, 130)
    pending = [
        PendingRequest(plain, ids, new_tokens=new)
        for ids, new in zip(prompts, new_tokens, strict=True)
    ]
    references = [asking.answer() for asking in pending]

    def retracted() -> bool:
        small.flush()
        asked = []
        for ids, new in zip(prompts, new_tokens, strict=True):
            # One by one, since SGLang would not admit all of them at once.
            rid = f"retract-{next(turns)}"
            asked.append(PendingRequest(small, ids, new_tokens=new, rid=rid, sampling=HOPEFUL))
            asked[-1].until("done")
        for asking, reference in zip(asked, references, strict=True):
            assert asking.answer().tokens == reference.tokens
        return "Retract requests" in small.server.logs()

    turns = itertools.count()
    until(retracted, "requests are retracted")  # one may have ended before the last one came
    small.flush()


def test_small_pool_prompt_that_waits_for_memory_is_loaded_meanwhile(
    small: Live, plain: Live, prompt: Make
) -> None:
    """Long answers of other requests have the memory that it needs until they are over."""
    stored, new = prompt(20 * BLOCK), 200
    small.ask_and_store(stored)
    until_loaded(small, stored)
    for turn in range(20):  # `auto` may find that computing is quicker on a busy machine
        small.flush()
        runners = [prompt(4 * BLOCK) for _ in range(3)]
        asked = [
            PendingRequest(small, ids, new_tokens=new, rid=f"runner-{turn}-{i}", sampling=HOPEFUL)
            for i, ids in enumerate(runners)
        ]
        asked[-1].until("done")
        answer = PendingRequest(small, stored, rid=f"late-{turn}").answer()
        assert_same(answer, plain.reference(stored))
        references = [PendingRequest(plain, ids, new_tokens=new) for ids in runners]
        for asking, reference in zip(asked, references, strict=True):
            assert asking.answer().tokens == reference.answer().tokens
        small.flush()
        if answer.loaded >= 15 * BLOCK:
            return
    raise AssertionError("it was never loaded")


def test_small_pool_prompt_that_is_evicted_while_it_waits_is_loaded(
    small: Live, plain: Live, prompt: Make
) -> None:
    """The tree has all of it when it arrives. Other requests have the memory for its answer until
    they are over, and need that of its prefix."""
    stored, new = prompt(20 * BLOCK), 300
    small.ask_and_store(stored)
    until_loaded(small, stored)
    reference = PendingRequest(plain, stored, new_tokens=new).answer()
    for turn in range(20):  # `auto` may find that computing is quicker on a busy machine
        small.flush()
        small.ask(stored)
        asked = [
            PendingRequest(
                small, prompt(3 * BLOCK), new_tokens=150, rid=f"grows-{turn}-{i}", sampling=HOPEFUL
            )
            for i in range(3)
        ]
        asked[-1].until("done")
        answer = PendingRequest(small, stored, new_tokens=new, rid=f"loses-{turn}").answer()
        assert answer.tokens == reference.tokens
        for asking in asked:
            asking.answer()
        if answer.loaded >= 15 * BLOCK:
            return
    raise AssertionError("it was never loaded")


def test_small_pool_prompt_that_fills_it_gives_the_plain_answer(
    small: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(POOL - 3 * BLOCK)
    small.ask_and_store(ids)
    answer = small.ask_flushed(ids)
    assert_same(answer, plain.reference(ids))
    tail = prompt(7 * BLOCK)
    small.ask_and_store(tail)  # evicts
    small.ask_flushed(tail)
    assert_same(small.ask(ids), plain.reference(ids))
    small.flush()


def test_small_pool_abort_while_full_leaks_nothing(small: Live, prompt: Make) -> None:
    ids = prompt(24 * BLOCK)
    small.ask_and_store(ids)
    small.flush()
    asked = [PendingRequest(small, ids[i:], new_tokens=64, rid=f"full-{i}") for i in range(3)]
    asked[0].until("fetch", 2)
    for asking in asked:
        small.post("/abort_request", rid=asking.rid)
    for asking in asked:
        asking.answer()
    small.flush()
    small.check_log()


def test_small_pool_burst_of_stored_prompts_gives_the_plain_answers(
    small: Live, plain: Live, prompt: Make
) -> None:
    """Prompts that are computed, loaded, put back and admitted beside each other, where the pool
    has slots for two of them."""
    documents = [prompt(12 * BLOCK) for _ in range(4)]
    for ids in documents:
        small.ask_and_store(ids)
    small.flush()
    prompts = [ids + prompt(9) for _ in range(4) for ids in documents]
    asked = [
        PendingRequest(small, ids, new_tokens=4, rid=f"burst-{i}") for i, ids in enumerate(prompts)
    ]
    for asking, ids in zip(asked, prompts, strict=True):
        assert_same(asking.answer(), plain.reference(ids, 4))
    small.flush()
