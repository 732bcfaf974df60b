"""Who goes first."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.core.keys import Span
from sglang_cake.loading.meet import BlockState, View
from sglang_cake.loading.planner import Outlook
from sglang_cake.loading.priority import AGEING, FcfsSchedule, QueueEntry, order, preempts


def names(*claimants: QueueEntry) -> str:
    return "".join(claimants[i].rid for i in order(claimants))


def test_priority_computed_prompts_first_then_loads_by_length() -> None:
    long, short = QueueEntry("l", 9.0), QueueEntry("s", 1.0)
    new, newer = QueueEntry("a", None), QueueEntry("b", None)
    assert names(long, new, short, newer) == "absl"


def test_priority_nearly_done_prompt_goes_first() -> None:
    done = QueueEntry("d", None, loads_over=True, nearly_done=True)
    assert names(QueueEntry("a", None), done, QueueEntry("s", 0.1)) == "das"


def test_priority_long_waiting_load_goes_before_late_prompts() -> None:
    lead_s = 3.0 / AGEING  # of one that came first, and has three seconds to go
    stored = QueueEntry("s", 3.0, waited_s=100.0)
    before, after = QueueEntry("b", None, 101.0 - lead_s), QueueEntry("a", None, 99.0 - lead_s)
    short = QueueEntry("t", 1.0, waited_s=102.0 - lead_s + 1.0 / AGEING)
    done = QueueEntry("d", None, before.waited_s, loads_over=True, nearly_done=True)
    assert names(stored, before, after, short, done) == "tdbsa"


def test_priority_prompt_is_passed_by_later_ones_within_its_slack_only() -> None:
    stored = QueueEntry("s", 9.0, 5.0, compute_s=8.0, slack_s=12.0)
    earlier, later = QueueEntry("e", None, 6.0), QueueEntry("l", None, 4.0)
    short = QueueEntry("t", 1.0, 5.0)
    small = [QueueEntry(rid, None, 4.0 - int(rid), compute_s=5.0) for rid in "123"]
    assert names(*small, stored) == "12s3"
    assert names(earlier, later, short, stored) == "eslt"
    assert names(earlier, short, stored) == "ets"
    assert preempts(stored, later)
    assert not preempts(later, stored)
    assert preempts(earlier, stored)


def test_priority_late_prompts_in_a_long_queue_look_at_each_other_once() -> None:
    class Counted(QueueEntry):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += 1
            return super().__getattribute__(name)

    counts = []
    for prompts in 100, 400:  # none is passed by a later one, which each has to find out
        reads = 0
        order([Counted(str(n), 1.0 + n, -n * 1.0, slack_s=-1.0, arrival=n) for n in range(prompts)])
        counts.append(reads)
    assert counts[1] < 5 * counts[0]


def test_priority_loads_of_later_prompts_count_against_the_slack_too() -> None:
    """They take the device for no longer than their remaining time. A prompt moves only before
    those of its own round."""
    stored = QueueEntry("s", 9.0, 5.0, slack_s=5.0, arrival=1)
    others = [QueueEntry(str(n), 2.0, 5.0, arrival=n) for n in (2, 3, 4)]
    assert names(*others, stored) == "23s4"
    assert names(*others, stored._replace(slack_s=6.0)) == "234s"
    assert names(*others, stored._replace(slack_s=-1.0)) == "s234"
    assert names(*others, stored._replace(slack_s=-1.0, tenant_round=1)) == "234s"


def test_priority_computed_prompts_keep_their_given_order() -> None:
    """Whatever that is; and a stored prompt gives way to nobody who came late, for an old one that
    this order puts last."""
    late, early = QueueEntry("l", None, waited_s=1.0), QueueEntry("e", None, waited_s=9.0)
    stored = QueueEntry("s", 5.0 * AGEING, waited_s=10.0)  # goes with who has waited for 5 s
    assert names(early, stored, late) == names(stored, early, late) == "esl"
    assert names(late, early, stored) == names(stored, late, early) == "sle"


def test_priority_due_prefill_keeps_its_place_against_higher_priorities() -> None:
    """Computed alone, it would have the device to the end of its prefill. Of one level it is as any
    other prompt."""
    had = QueueEntry("h", None, 9.0, level=1, prefill_due=True)
    loading = QueueEntry("l", 2.0, 8.0, level=1, prefill_due=True)
    urgent = [QueueEntry("u", None, 7.0), QueueEntry("v", 3.0, 9.0)]
    below = QueueEntry("b", None, 10.0, level=1)
    assert names(*urgent, below, loading, had) == "hulvb"
    assert names(*urgent, below, loading._replace(prefill_due=False), had) == "huvbl"
    assert not preempts(urgent[0]._replace(yielded=True), had)
    assert preempts(urgent[0]._replace(yielded=True), had._replace(prefill_due=False))
    assert preempts(urgent[0], loading)
    assert names(urgent[0]._replace(waited_s=9.0), had) == "hu"  # they came between two polls


def is_possible(entry: QueueEntry) -> bool:
    loaded = entry.remaining_s is not None
    return (
        entry.stalled <= loaded
        and entry.loads_over <= (not loaded)
        and entry.nearly_done <= (entry.loads_over or entry.stalled)
    )


claimants = st.builds(
    lambda **fields: QueueEntry("x", **fields),
    remaining_s=st.none() | st.floats(0, 100),
    waited_s=st.floats(0, 1000),
    stalled=st.booleans(),
    loads_over=st.booleans(),
    nearly_done=st.booleans(),
).filter(is_possible)


@given(st.lists(claimants, max_size=20))
def test_priority_order_contains_every_prompt_once(all_of_them: list[QueueEntry]) -> None:
    assert sorted(order(all_of_them)) == list(range(len(all_of_them)))


@given(st.lists(claimants, max_size=20), st.floats(0, 100), st.floats(0, 1000))
def test_queue_order_late_prompts_do_not_starve_a_stored_prompt(
    others: list[QueueEntry], remaining_s: float, waited_s: float
) -> None:
    """Who came T* / AGEING later, or more, does not go first, whatever SGLang's order is."""
    everybody = [*others, QueueEntry("me", remaining_s, waited_s)]
    turns = [everybody[i] for i in order(everybody)]
    me = next(i for i, each in enumerate(turns) if each.rid == "me")
    for other in turns[:me]:
        assert other.waited_s >= waited_s - remaining_s / AGEING - 1e-6


def seen(*states: BlockState, front: int = 0, prompt_tokens: int = 70) -> View:
    return View(front, 0, bytes(states), 16, prompt_tokens, prompt_tokens - 1)


def claimant(
    view: View, *, ever_asked: bool = True, loads: bool = True, stalled: bool = False
) -> QueueEntry:
    return QueueEntry.of(
        "x",
        view,
        loads=loads,
        stalled=stalled,
        outlook=lambda: Outlook(4.0, 5.0, 3.0, 0),
        mode="auto",
        waited_s=1.0,
        ever_asked=ever_asked,
        chunk_tokens=32,
    )


W, L, G, A = BlockState.WANTED, BlockState.LANDED, BlockState.GONE, BlockState.ABSENT


def test_queue_entry_is_derived_from_the_block_states() -> None:
    assert claimant(seen(A, L, W, L)).remaining_s == 3.0
    assert claimant(seen(A, A, W, A), loads=False) == QueueEntry("x", None, 1.0, loads_over=True)
    assert claimant(seen(A, A, W, A), loads=False, ever_asked=False) == QueueEntry("x", None, 1.0)
    # What has landed is not computed, whether or not it has joined the tree.
    done = QueueEntry("x", None, 1.0, loads_over=True, nearly_done=True)
    assert claimant(seen(G, L, L, L)) == claimant(seen(A, A, A, L, front=30)) == done
    assert not claimant(seen(A, A, A, L)).nearly_done
    assert not claimant(seen(A, front=60), ever_asked=False).nearly_done  # it never had anything
    # Blocks of loads that have stalled are computed, as far as known.
    assert not claimant(seen(A, L, W, L), stalled=True).nearly_done
    assert claimant(seen(A, L, W, L, front=30), stalled=True).nearly_done
    assert not claimant(seen(A, L, W, L, front=30)).nearly_done


def test_priority_prompt_with_stalled_loads_is_served_as_if_it_were_not_stored() -> None:
    """Others do not pass it, since its loads gain nothing by that."""
    late = QueueEntry("s", 9.0, 5.0, compute_s=8.0, slack_s=0.0, stalled=True)
    short, before, after = (
        QueueEntry("t", 1.0, 5.0),
        QueueEntry("b", None, 6.0),
        QueueEntry("a", None),
    )
    assert names(before, short, late, after) == "bsta"
    assert preempts(late, after)
    assert not preempts(before, late._replace(waited_s=7.0))
    assert not preempts(short, late)


def test_priority_prompts_of_equal_age_whose_loads_have_stalled_keep_the_order_of_arrival() -> None:
    """Prompts that were being loaded stand behind those that passed them."""
    one, three = (QueueEntry(str(n), 4.0 - n, stalled=True, arrival=n) for n in (1, 3))
    new = [QueueEntry(str(n), None, arrival=n) for n in (2, 4)]
    assert names(*new, three, one) == "1234"
    assert names(*new[::-1], three, one) == "1342"  # SGLang's order of prompts that are not stored


def test_preemption_of_loading_and_computed_prompts_follows_the_order() -> None:
    long, short = QueueEntry("l", 9.0), QueueEntry("s", 1.0)
    plain, other = QueueEntry("a", None), QueueEntry("b", None)
    done, old = (
        QueueEntry("d", None, loads_over=True, nearly_done=True),
        QueueEntry("o", 1.0, waited_s=1000.0),
    )
    assert preempts(plain, long)
    assert preempts(short, long)
    assert not preempts(long, short)
    # One that is only computed:
    assert not preempts(other, plain)
    assert not preempts(short, plain)
    assert preempts(done, plain)
    assert preempts(old, plain)
    assert not preempts(done, done)
    # Tenants: no interrupted prompt is interrupted back.
    assert not preempts(other._replace(tenant_round=0), plain._replace(tenant_round=1))
    assert not preempts(done._replace(tenant_round=1), plain)


def test_priority_prompt_whose_loads_are_over_passes_none_of_its_age_unless_it_is_nearly_done() -> (
    None
):
    """Prompts that arrive during one step are of one age. Most of a prompt with missing blocks may
    be left to compute."""
    stored, short = QueueEntry("s", None, 5.0, loads_over=True), QueueEntry("a", None, 5.0)
    assert names(short, stored) == "as"
    assert names(short, stored._replace(nearly_done=True)) == "sa"


def test_priority_prompt_whose_loads_are_over_goes_before_those_that_passed_it() -> None:
    """They passed it while it was being loaded, and more than a step of it is left to compute."""
    stored = QueueEntry("s", None, waited_s=5.0, loads_over=True)
    later, earlier = QueueEntry("l", None, 4.9), QueueEntry("e", None, 6.0)
    assert names(earlier, later, stored) == "esl"
    assert preempts(stored, later)
    assert not preempts(stored, earlier)
    assert not preempts(later, stored)
    assert not preempts(stored, stored)
    assert not preempts(stored._replace(tenant_round=0), later._replace(tenant_round=1))


def test_preemption_by_higher_priority_interrupts_only_loading_prompts() -> None:
    long, plain = QueueEntry("l", 9.0, level=1), QueueEntry("a", None, level=1)
    above, below = QueueEntry("b", None, level=0), QueueEntry("c", None, level=2)
    assert preempts(above, long)
    assert preempts(QueueEntry("s", 90.0, level=0), long)
    assert not preempts(below, long)
    assert not preempts(QueueEntry("o", 1.0, waited_s=1000.0, level=2), long)
    # SGLang interrupts no computed prompt for a priority; but one that lent its place gets it back.
    assert not preempts(above, plain)
    assert preempts(QueueEntry("s", 90.0, level=0, yielded=True), plain)
    assert not preempts(QueueEntry("s", 0.0, 1000.0, level=2, yielded=True), plain)
    assert names(below, plain, above) == "bac"


possible = st.builds(
    lambda **fields: QueueEntry("x", **fields),
    remaining_s=st.none() | st.floats(0, 100),
    waited_s=st.floats(0, 1000),
    stalled=st.booleans(),
    loads_over=st.booleans(),
    nearly_done=st.booleans(),
    tenant_round=st.integers(0, 2),
    level=st.integers(0, 2),
    yielded=st.booleans(),
).filter(is_possible)


@given(possible, possible)
def test_preemption_of_two_random_prompts_is_never_mutual(
    one: QueueEntry, other: QueueEntry
) -> None:
    assert not (preempts(one, other) and preempts(other, one))


class FcfsServer:
    """A server that computes all prompts, in the order of arrival: its queue, in its own time."""

    def __init__(self) -> None:
        self.live: list[str] = []
        self._queue: list[tuple[str, float]] = []  # with the rest of its time
        self._late_s: dict[str, float] = {}  # how long ago it was computed

    def passes(self, time_s: float) -> None:
        """Some time."""
        self._late_s = {each: late_s + time_s for each, late_s in self._late_s.items()}
        while self._queue and time_s > 0:
            prompt, rest_s = self._queue.pop(0)
            if rest_s > time_s:
                self._queue.insert(0, (prompt, rest_s - time_s))
                return
            time_s -= rest_s
            self._late_s[prompt] = time_s

    def comes(self, prompt: str, cost_s: float) -> None:
        self.live.append(prompt)
        self._queue.append((prompt, cost_s))

    def leaves(self, prompt: str, *, aborted: bool) -> None:
        self.live.remove(prompt)
        if aborted:
            self._queue = [each for each in self._queue if each[0] != prompt]
        if not self.live:
            self._queue.clear()  # of prompts that are over in truth

    def in_tree(self, prompt: str, cost_s: float) -> None:
        """Some of a prompt need not be computed."""
        self._queue = [
            (each, max(0.0, rest_s - cost_s) if each == prompt else rest_s)
            for each, rest_s in self._queue
        ]

    def ends_in_s(self, prompt: str) -> float:
        if prompt in self._late_s:
            return -self._late_s[prompt]
        names = [each for each, _ in self._queue]
        return sum(rest_s for _, rest_s in self._queue[: names.index(prompt) + 1])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["comes", "passes", "held", "aborted", "prefilled", "in_tree"]),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_fcfs_schedule_slack_is_that_of_a_server_that_computes_all_in_order_of_arrival(
    events: list[tuple[str, int]],
) -> None:
    schedule = FcfsSchedule(lambda tokens: float(tokens.tokens))
    server, now_s, names = FcfsServer(), 100.0, itertools.count()
    matched: dict[str, int] = {}
    for kind, number in events:
        went_on = kind != "held"
        now_s += number
        if went_on:
            server.passes(number)
        chosen = server.live[number % len(server.live)] if server.live else None
        if kind == "comes":
            matched[name := f"p{next(names)}"] = 0
            server.comes(name, 10.0)
        elif chosen is not None and kind in ("aborted", "prefilled"):
            if kind == "prefilled":
                schedule.prefilled(chosen)
            server.leaves(chosen, aborted=kind == "aborted")
        elif chosen is not None and kind == "in_tree" and not matched[chosen]:
            matched[chosen] = number
            server.in_tree(chosen, number)
        schedule.polled(
            now_s,
            server.live,
            rest=lambda _: Span(0, 10),
            matched=matched.__getitem__,
            went_on=went_on,
        )
        for each in server.live:
            assert schedule.slack_s(each, 3.0) == pytest.approx(server.ends_in_s(each) - 3.0)


def test_fcfs_schedule_prompt_whose_match_is_evicted_again_has_its_slack_back() -> None:
    schedule = FcfsSchedule(lambda tokens: float(tokens.stop - tokens.start))
    tree = {"a": 0}
    slacks = []
    for found in (0, 80, 0):
        tree["a"] = found
        schedule.polled(
            1.0,
            ["a", "b"],
            rest=lambda prompt: Span(0, 100),
            matched=lambda prompt: tree.get(prompt, 0),
            went_on=False,
        )
        slacks.append((schedule.slack_s("a", 100.0 - found), schedule.slack_s("b", 100.0)))
    assert slacks == [(0.0, 100.0), (0.0, 20.0), (0.0, 100.0)]
