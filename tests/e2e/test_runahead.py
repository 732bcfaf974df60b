"""KV-Runahead in two real servers on one machine."""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
from live import BLOCK, DEADLINE_S, VOCAB, Answer, Live, PendingRequest, Start, assert_same
from polling import until

from sglang_cake.cli import main
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.runahead.partition_table import load_table

PAGE = 16
LONG = 1200
TROUBLE_LAYER = 2  # of 4
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "6000", "--page-size", str(PAGE)),
    *("--chunked-prefill-size", "4096", "--enable-metrics"),
)


class Pair:
    """Two servers. `owner` loads nothing; `helper` loads blocks of prompts that it owns itself."""

    def __init__(self, owner: Live, helper: Live, trouble: "Trouble") -> None:
        self.owner, self.helper, self.trouble = owner, helper, trouble

    def until_together(self) -> None:
        for live in (self.owner, self.helper):
            until(lambda one=live: together(one), "both members are there")


def together(live: Live) -> bool:
    """Whether the last change of the connection was its start. Being left out is no change."""
    lines = live.server.logs().splitlines()
    changes = [line for line in lines if "runahead: member" in line and " is left out" not in line]
    return bool(changes) and changes[-1].endswith("is here")


@pytest.fixture(scope="module")
def pair(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[Pair]:
    trouble = Trouble(folder / "trouble")
    peers = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    with contextlib.ExitStack() as stack:
        lives = [
            stack.enter_context(
                start(
                    models["first"],
                    (
                        *FLAGS,
                        *("--cake-runahead-rank", str(rank), "--cake-runahead-peers", peers),
                        *("--cake-mode", "both" if rank else "compute"),
                    ),
                    store=folder / f"runahead-{rank}",
                    bandwidth="2MB/s",
                    env={
                        "XDG_CACHE_HOME": str(folder / "cache"),
                        "XDG_CONFIG_HOME": str(
                            folder / "config"
                        ),  # the first server makes a secret here
                        **standins,
                        **({"CAKE_TEST_LAYERS": str(trouble.folder)} if rank else {}),
                    },
                )
            )
            for rank in range(2)
        ]
        both = Pair(lives[0], lives[1], trouble)
        both.until_together()
        yield both


@pytest.fixture
def ids(request: pytest.FixtureRequest) -> list[int]:
    source = random.Random(request.node.nodeid)
    return [source.randrange(VOCAB) for _ in range(LONG)]


def shared(inner: Sequence[int], stop: int = LONG) -> dict[str, Any]:
    """Parameters of a request for this partition."""
    return {"sampling": {"custom_params": {"cake_runahead": [*inner, stop]}}}


def alone() -> dict[str, Any]:
    return {"sampling": {"custom_params": {"cake_runahead": "alone"}}}


def share(pair: Pair, ids: list[int], bounds: Sequence[int]) -> Answer:
    def ask() -> Answer:
        pair.helper.flush()
        return pair.owner.ask_flushed(ids, **shared(bounds))

    return until_helped(ask)


def until_helped(ask: Callable[[], Answer]) -> Answer:
    """Ask until the other member helps. On a busy machine its answer may be late, and then it is
    left out for a while."""

    def with_help() -> Answer | None:
        answer = ask()
        return answer if helped(answer) else None

    return until(with_help, "an answer with help", 2 * DEADLINE_S)


def helped(answer: Answer) -> int:
    return int(answer.meta["cake"].get("helped_tokens", 0))


@pytest.mark.parametrize("split", [PAGE, pytest.param(640, marks=pytest.mark.breadth), 1184])
def test_runahead_two_servers_give_the_answer_of_one(
    pair: Pair, plain: Live, ids: list[int], split: int
) -> None:
    answer = share(pair, ids, [split])
    assert_same(answer, plain.reference(ids))
    assert helped(answer) == split
    until(lambda: pair.owner.metric("helped_tokens_total") >= split, "it was counted")
    again = pair.owner.ask(ids)  # received KV is in the tree like any KV
    assert again.cached >= LONG - 2 * PAGE
    assert_same(again, plain.reference(ids))
    on_helper = pair.helper.ask([*ids[:split], *ids[:8]], **alone())
    assert on_helper.cached == split


def test_runahead_member_with_released_memory_does_not_help(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    """SGLang unmaps the memory on a GPU. A forward there would end the server."""

    def memory(action: str) -> None:
        url = f"{pair.helper.url}/{action}_memory_occupation"
        requests.post(url, json={"tags": ["kv_cache"]}, timeout=60).raise_for_status()

    assert helped(share(pair, ids, [640])) == 640
    pair.helper.flush()
    memory("release")
    try:
        for _ in range(3):
            answer = pair.owner.ask_flushed(ids, **shared([640]))
            assert helped(answer) == 0
            assert_same(answer, plain.reference(ids))
    finally:
        memory("resume")
    assert helped(share(pair, ids, [640])) == 640


def test_runahead_control_other_first_half_changes_the_answer(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    """Control of the test above: with another first half, the answer differs."""
    other = [*reversed(ids[:640]), *ids[640:]]
    assert pair.owner.ask(other).tokens != plain.reference(ids).tokens


def test_runahead_tokens_in_the_owners_tree_are_not_sent(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    pair.helper.ask(ids[:800], **alone())

    def ask() -> Answer:
        pair.owner.ask_flushed(ids[:512], **alone())
        return pair.owner.ask(ids, **shared([640]))

    answer = until_helped(ask)
    assert answer.cached == 512
    assert helped(answer) == 128
    assert_same(answer, plain.reference(ids))
    # 4 layers, K and V, 2 heads of 32 dimensions in float32
    assert answer.meta["cake"]["received_bytes"] == 128 * 4 * 2 * 2 * 32 * 4
    until(lambda: pair.helper.metric("runahead_sent_bytes_total") > 0, "it was counted")


def test_runahead_helper_with_a_colder_tree_refuses(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    pair.helper.flush()
    pair.owner.ask_flushed(ids[:512], **alone())
    answer = pair.owner.ask(ids, **shared([640]))
    assert helped(answer) == 0
    assert_same(answer, plain.reference(ids))


def test_runahead_input_logprobs_of_the_front_are_computed_alone(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    extra = {"logprob_start_len": 100}
    answer = pair.owner.ask_flushed(ids, **shared([640]), **extra)
    assert helped(answer) == 0
    assert_same(answer, plain.ask(ids, **extra))
    tail = {"logprob_start_len": LONG - 20}
    assert_same(pair.owner.ask_flushed(ids, **shared([640]), **tail), plain.ask(ids, **tail))


def test_runahead_short_prompt_is_computed_by_the_owner_alone(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    short = ids[: BLOCK - 1]  # below --cake-min-load-tokens
    answer = pair.owner.ask_flushed(short)
    assert_same(answer, plain.reference(short))
    assert helped(answer) == 0


def test_runahead_beside_loads_answers_exactly_and_stores_once(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    loads, helps = pair.helper, pair.owner  # the member that loads owns this prompt
    assert loads.store is not None
    assert helps.store is not None
    before = len(loads.store.blocks()), len(helps.store.blocks())

    def ask(*inner: int, stop: int = LONG) -> Answer:
        helps.flush()
        return loads.ask_flushed(ids, **shared(inner, stop=stop))

    until_helped(lambda: ask(640))
    loads.ask(ids)  # has the blocks stored that the other member computed: a split is for measuring
    loads.store.until_stored(ids)
    after = len(loads.store.blocks()), len(helps.store.blocks())
    assert (after[0] - before[0], after[1] - before[1]) == (LONG // BLOCK, 0)

    def beside_loads() -> Answer | None:
        answer = until_helped(lambda: ask(256, stop=512))
        assert_same(answer, plain.reference(ids))
        return answer if answer.loaded else None

    answer = until(beside_loads, "an answer with help and loads")
    assert helped(answer) == 256
    assert answer.computed >= 512
    assert answer.loaded > 0
    assert answer.computed + answer.loaded == LONG
    assert len(loads.store.blocks()) == after[0]


def test_runahead_prompt_with_a_given_split_is_not_stored(pair: Pair, ids: list[int]) -> None:
    store = pair.owner.store
    assert store is not None
    before = len(store.blocks())
    assert helped(share(pair, ids, [640])) == 640
    other = [*reversed(ids)]
    pair.owner.ask(other, **alone())  # stored after what was computed before it
    store.until_stored(other)
    assert len(store.blocks()) - before == LONG // BLOCK


def test_runahead_search_result_is_used_by_the_running_server(
    pair: Pair, ids: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    search = ["runahead", "search", "--url", pair.owner.url, "--lengths", "512", "--repeats", "1"]
    assert main(search) == 0
    (path,) = (folder / "cache" / "sglang_cake" / "runahead").iterdir()  # and no journal
    first = round(load_table(path).entries[2][512][0] * 512)

    def shared_as() -> object:
        pair.helper.flush()
        asked = {"sampling": {"custom_params": {"cake_runahead": "table"}}}
        return pair.owner.ask_flushed(ids[:512], **asked).meta["cake"].get("bounds")

    until(lambda: shared_as() == [0, first, 512], "the owner has read the table")


def test_runahead_two_owners_asking_at_once_answer_exactly(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    for _ in range(3):
        pair.owner.flush()
        pair.helper.flush()
        asked = [PendingRequest(live, ids, **shared([640])) for live in (pair.owner, pair.helper)]
        for each in asked:
            assert_same(each.answer(), plain.reference(ids))


class Trouble:
    """Makes the helper's next span fail at a given layer in a given way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @property
    def reached(self) -> bool:
        return (self.folder / "reached").exists()

    @property
    def pid(self) -> int:
        """The process of the helper that has reached the layer."""
        return int((self.folder / "reached").read_text())

    def order(self, what: str, layer: int) -> None:
        for name in ("reached", "go"):
            (self.folder / name).unlink(missing_ok=True)
        draft = self.folder / "draft"
        draft.write_text(f"{what} {layer}")
        draft.rename(self.folder / "order")

    def go(self) -> None:
        (self.folder / "go").touch()


def ask_into_trouble(pair: Pair, ids: list[int], what: str) -> PendingRequest:
    """Ask the owner. When this returns, the helper's span fails at TROUBLE_LAYER."""
    pair.trouble.order(what, TROUBLE_LAYER)
    attempts = itertools.count()

    def ask() -> PendingRequest | None:
        pair.owner.flush()
        asking = PendingRequest(pair.owner, ids, rid=f"{what}-{next(attempts)}", **shared([640]))
        until(lambda: pair.trouble.reached or not asking.is_running, f"{what}, or an answer")
        if pair.trouble.reached:
            return asking
        pair.helper.flush()
        return None

    return until(ask, "a helper in trouble", 2 * DEADLINE_S)


def failed(pair: Pair) -> float:
    """Chains that failed on the owner. On a busy machine a chain may be late before the helper
    fails, or the helper's answer may be late: the owner counts a refusal then."""
    reasons = ("late", "broken", "refused")
    return sum(pair.owner.metric("runahead_failures_total", reason=each) for each in reasons)


def aborted(pair: Pair) -> float:
    return pair.owner.metric("runahead_failures_total", reason="aborted")


@pytest.mark.parametrize("what", ["raise", "hold", "stop"])
def test_runahead_helper_failing_midway_leaves_the_owner_to_compute(
    pair: Pair, plain: Live, ids: list[int], what: str
) -> None:
    """The helper runs out of memory, is too slow, or hangs so that its connections are silent."""
    before = failed(pair)
    helped_before = pair.owner.metric("helped_tokens_total")
    asking = ask_into_trouble(pair, ids, what)
    try:
        answer = asking.answer()  # while the helper still is at that layer
        assert_same(answer, plain.reference(ids))
        assert helped(answer) == 0
        until(lambda: failed(pair) > before, "it was counted")
        assert pair.owner.metric("helped_tokens_total") == helped_before
    finally:
        pair.trouble.go()
        os.kill(pair.trouble.pid, signal.SIGCONT)
    pair.until_together()
    pair.helper.flush()  # waits until nothing runs, and checks for leaks
    assert_same(share(pair, ids, [640]), plain.reference(ids))  # the helper helps again


def test_runahead_abort_midway_stops_owner_and_helper(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    before = aborted(pair)
    said = "ended early: cancelled: "  # an abort may come before the owner's own step
    for _ in range(5):
        asking = ask_into_trouble(pair, ids, "hold")
        ends = pair.helper.server.logs().count(said)
        requests.post(f"{pair.owner.url}/abort_request", json={"rid": asking.rid}, timeout=60)
        answer = asking.answer()  # while the helper is held
        pair.trouble.go()
        if not answer.tokens:
            break
        share(pair, ids, [640])  # the owner was faster than the abort: wait until it asks again
    assert answer.meta["finish_reason"]["type"] == "abort"
    assert answer.tokens == []
    until(lambda: aborted(pair) == before + 1, "it was counted")
    until(lambda: pair.helper.server.logs().count(said) == ends + 1, "the helper has stopped")
    pair.owner.flush()
    pair.helper.flush()
    assert pair.owner.ask(ids[:640], **alone()).cached == 0  # the tree has none of its KV
    pair.owner.flush()
    assert_same(share(pair, ids, [640]), plain.reference(ids))


def test_runahead_aborts_at_three_times_leave_both_members_working(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    for wait_s in (0.0, 0.02, 0.1):
        pair.owner.flush()
        with contextlib.suppress(Exception):
            asking = PendingRequest(pair.owner, ids, rid=f"aborted-{wait_s}", **shared([640]))
            time.sleep(wait_s)  # different moments are the point of this test
            requests.post(f"{pair.owner.url}/abort_request", json={"rid": asking.rid}, timeout=60)
            asking.answer()
    pair.owner.flush()  # waits until nothing runs, and checks for leaks
    pair.helper.flush()
    assert_same(share(pair, ids, [640]), plain.reference(ids))


def test_runahead_helper_killed_midway_leaves_the_owner_to_compute(
    pair: Pair, plain: Live, ids: list[int]
) -> None:
    """The last test of the pair, since the helper is killed."""
    pair.helper.flush()
    pair.helper.check_log()
    pair.helper.killed = True
    before = failed(pair)
    answer = ask_into_trouble(pair, ids, "kill").answer()
    assert_same(answer, plain.reference(ids))
    assert helped(answer) == 0
    until(lambda: failed(pair) > before, "it was counted")
    answer = pair.owner.ask_flushed(ids, **shared([640]))
    assert helped(answer) == 0
    assert_same(answer, plain.reference(ids))
