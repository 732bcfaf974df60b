"""How far a step goes: properties of the decision, and prompts on a virtual clock."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.core.keys import Span
from sglang_cake.loading.cost_model import (
    LoadCost,
    LoadFit,
    PrefillCost,
    PrefillFit,
    PromptCosts,
    StepWork,
    work_of,
)
from sglang_cake.loading.meet import BlockState, View
from sglang_cake.loading.planner import (
    COMPUTE_SLACK,
    PASSING_COST,
    LoadProgress,
    Mode,
    Outlook,
    StepPlan,
    device_work,
    is_overdue,
    is_stalled,
    look_ahead,
    next_step,
    overlap_span,
    passing_tokens,
    should_load,
)
from sglang_cake.simulator.machine import Knowledge, Machine
from sglang_cake.simulator.simulated_server import simulate_prompt

WANTED, LANDED, GONE, ABSENT = (
    BlockState.WANTED,
    BlockState.LANDED,
    BlockState.GONE,
    BlockState.ABSENT,
)


def costs(
    block_s: float,
    *,
    token_s: float = 1.0,
    fixed_s: float = 0.0,
    error: float = 0.0,
    coming_s: float = 0.0,
) -> PromptCosts:
    return PromptCosts(
        PrefillCost(fixed_s, token_s, 0.0, error=error),
        LoadCost(0.0, block_s, error=error, coming_s=coming_s),
    )


def view_of(states: list[BlockState], *, front: int = 0, block: int = 100, rest: int = 50) -> View:
    """A prompt of blocks of 100 tokens and 50 tokens more."""
    first = min(front // block, len(states))
    prompt = len(states) * block + rest
    return View(front, first, bytes(states[first:]), block, prompt, limit=prompt - 1)


def decide(
    states: list[BlockState],
    known: PromptCosts,
    *,
    mode: Mode = "auto",
    chunk: int = 10_000,
    front: int = 0,
    progress: LoadProgress | None = None,
) -> StepPlan:
    return next_step(
        view_of(states, front=front),
        mode=mode,
        chunk_tokens=chunk,
        costs=known,
        progress=progress or LoadProgress(),
    )


# ---- what is predicted ----


def test_planner_outlook_gives_compute_load_and_split_times() -> None:
    outlook = look_ahead(
        view_of([WANTED] * 10),
        chunk_tokens=500,
        costs=costs(100, fixed_s=10),
        progress=LoadProgress(),
    )
    assert outlook.compute_s == 1050 + 3 * 10
    assert outlook.load_s == 10 * 100 + 60
    assert outlook.meet_token == 500
    assert outlook.both_s == 510 + 60
    assert outlook.best_s == outlook.both_s


def test_planner_outlook_landed_blocks_are_free_and_gone_ones_computed() -> None:
    states = [WANTED, WANTED, LANDED, GONE, LANDED, WANTED]
    outlook = look_ahead(
        view_of(states), chunk_tokens=500, costs=costs(100), progress=LoadProgress(any_landed=True)
    )
    assert outlook.compute_s == 200 + 100 + 150
    assert outlook.load_s == 300 + 100 + 50


def test_planner_outlook_with_overlap_shortens_the_load_time() -> None:
    def outlook(last: int, **settings: float) -> Outlook:
        load = replace(costs(100).load, coming_s=settings.pop("coming_s", 100))
        known = replace(costs(100), load=load, **settings)
        view = view_of([WANTED] * 10, rest=last)
        return look_ahead(view, chunk_tokens=500, costs=known, progress=LoadProgress())

    # Compute and load meet in the middle as before, the last step being a border's time at most.
    assert outlook(40).load_s == 1000 + 40
    assert outlook(40, overlap_share=0.75).load_s == 1000 - 30 + 40
    assert outlook(300, overlap_share=0.75).load_s == 1000 - 75 + 300  # while one block comes
    assert outlook(300, overlap_share=0.75, coming_s=400).load_s == 1000 - 187.5 + 300  # or several
    assert outlook(40, overlap_share=0.75, coming_s=0).load_s == 1000 + 40  # not reported
    assert outlook(40, overlap_share=0.75, coming_s=4).load_s == 1000 - 3 + 40  # all at once
    assert outlook(600, overlap_share=0.75).load_s == 1000 + 600  # two steps
    assert outlook(40, overlap_share=0.75, others_s=1.0).load_s == 1040  # others want the device
    assert outlook(40, overlap_share=0.75).compute_s == outlook(40).compute_s
    # 500 tokens computed, 500 loaded. Nothing would be won by beginning early: compute ends then.
    assert outlook(40, overlap_share=0.75).both_s == 500 + 40
    odd = view_of([WANTED] * 11, rest=40)
    plain, early = (
        look_ahead(odd, chunk_tokens=500, costs=known, progress=LoadProgress())
        for known in (costs(100), replace(costs(100, coming_s=100), overlap_share=0.75))
    )
    assert (plain.meet_token, plain.both_s) in [(500, 640), (600, 640)]
    assert (early.meet_token, early.both_s) == (500, 570 + 40)


def test_planner_outlook_beside_others_rounds_loads_up_to_their_step() -> None:
    def loading_s(known: PromptCosts) -> float:
        view = view_of([WANTED] * 10)
        return look_ahead(view, chunk_tokens=500, costs=known, progress=LoadProgress()).load_s

    others = StepWork(tokens=30)  # of every step; ours ends with 50 tokens
    assert loading_s(costs(100)) == 1000 + 50
    assert loading_s(costs(100).beside(StepWork())) == 1000 + 50
    assert loading_s(costs(100).beside(others)) == 34 * 30 + 30 + 50
    assert loading_s(costs(100, error=0.1).beside(others)) == 1000 + 30 / 2 + 30 + 50
    # Pipelined, it is planned when a step of theirs begins, and begins when that is over.
    pipelined = replace(costs(100), pipelined=True)
    assert loading_s(pipelined.beside(StepWork())) == 1000 + 50
    assert loading_s(pipelined.beside(others)) == 34 * 30 + 30 + 30 + 50
    pipelined = replace(costs(100, error=0.1), pipelined=True)
    assert loading_s(pipelined.beside(others)) == 1000 + 30 / 2 + 30 + 30 + 50


@given(st.data())
def test_planner_outlook_random_fronts_and_limits_leave_each_token_of_a_hole_to_compute(
    data: st.DataObject,
) -> None:
    states = data.draw(st.lists(st.sampled_from([WANTED, LANDED, GONE]), min_size=1, max_size=8))
    size, prompt = 8, 8 * len(states) + data.draw(st.integers(1, 20))
    limit = 8 * len(states) - data.draw(st.integers(0, 7))  # in the last block
    front = data.draw(st.integers(0, prompt - 1))
    first = min(front // size, len(states))
    prefill = PrefillCost(0.0, 1.0, 0.01, error=0.0)
    found = look_ahead(
        View(front, first, bytes(states[first:]), size, prompt, limit),
        chunk_tokens=data.draw(st.integers(1, 30)),
        costs=PromptCosts(prefill, LoadCost(0.0, 0.0, error=0.0)),
        progress=LoadProgress(),
    )

    def without_s(*held: BlockState) -> float:
        there = [at < limit and states[at // size] in held for at in range(prompt)]
        return sum(prefill.step_s(at, at + 1) for at in range(front, prompt) if not there[at])

    assert found.compute_s == pytest.approx(without_s(LANDED))
    assert found.load_s == pytest.approx(without_s(LANDED, WANTED))


@given(st.data())
def test_planner_outlook_random_prompts_find_the_best_border(data: st.DataObject) -> None:
    states = data.draw(st.lists(st.sampled_from([WANTED, LANDED, GONE]), max_size=12))
    if WANTED not in states:
        states.append(WANTED)
    chunk = data.draw(st.integers(50, 800))
    alone = PrefillCost(data.draw(st.floats(0, 50)), 1.0, data.draw(st.floats(0, 0.01)), error=0.0)
    block_s, pipelined = data.draw(st.floats(1, 1000)), data.draw(st.booleans())
    overlap = data.draw(st.sampled_from([0.0, 0.75]))
    coming_s = data.draw(st.sampled_from([0.0, 0.1, 1.0, 4.0])) * block_s
    load = LoadCost(0.0, block_s, error=0.0, coming_s=coming_s)
    known = PromptCosts(alone, load, pipelined=pipelined, overlap_share=overlap)
    known = known.beside(StepWork(tokens=data.draw(st.integers(0, 400))))
    prefill = known.prefill

    # Islands between holes that take less time than another step count as computed.
    later, block = [state in (WANTED, LANDED) for state in states], 0
    for there, group in itertools.groupby(list(later)):
        begin, block = block, block + len(list(group))
        fixed_s = prefill.work_s(StepWork(prefix_tokens=block * 100))
        short = prefill.step_s(begin * 100, block * 100) - fixed_s < fixed_s
        if there and begin and block < len(states) and short:
            later[begin:block] = [False] * (block - begin)
    landed = [state == LANDED for state in states]

    def compute_s(start: int, stop: int, *, held: list[bool]) -> float:
        total, run = 0.0, start
        for block in range(start // 100, 13):
            at = min(stop, max(start, block * 100))
            if at >= stop:
                break
            if block < len(states) and held[block]:
                total += prefill.span_s(run, at, chunk)
                run = (block + 1) * 100
        return total + prefill.span_s(run, stop, chunk)

    def both_s(border: int) -> float:
        x, end = border * 100, len(states) * 100 + 50
        device_s = compute_s(0, x, held=landed)
        link_s = known.load.load_s(states[border:].count(WANTED))
        held = [state in (WANTED, LANDED) for state in states[border:]]
        stop = len(states) - next((i for i, it in enumerate(reversed(states)) if it != GONE), 0)
        if WANTED in states[border:] and all(held[: max(0, stop - border)]):
            last_s = prefill.step_s(stop * 100, end)
            if end - stop * 100 <= chunk and not known.others_s:
                window_s = min(coming_s, (coming_s + block_s) / 2)
                link_s = max(0.0, link_s - overlap * min(window_s, last_s))
        if turn_s := known.others_s:
            # Pipelined: the step is planned when the step begins that ends at x.
            before = x - (x - 1) % chunk - 1
            planned_s = compute_s(0, before, held=landed) if pipelined and x else 0.0
            if link_s > (planned_s if pipelined else device_s):
                steps = max(0, ceil((link_s - device_s) / turn_s)) + pipelined
                link_s = device_s + steps * turn_s
        return max(device_s, link_s) + compute_s(x, end, held=later)

    last = max(b for b, state in enumerate(states) if state is WANTED)
    best_s = min(both_s(border) for border in range(last + 2))
    outlook = look_ahead(view_of(states), chunk_tokens=chunk, costs=known, progress=LoadProgress())
    # A hole right of the meeting point may be better computed earlier than bisection sees.
    present = len(states) - states.count(WANTED)
    slack_s = 1e-6
    if present:
        slack_s += prefill.step_s(0, 1250) + prefill.span_s(0, 100 * present, chunk)
    assert best_s - 1e-6 <= outlook.both_s <= best_s + slack_s
    assert outlook.compute_s == pytest.approx(compute_s(0, len(states) * 100 + 50, held=landed))


# ---- the decision ----


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    block = draw(st.sampled_from([1, 16, 64]))
    count = draw(st.integers(0, 20))
    states = draw(
        st.lists(st.sampled_from([WANTED, LANDED, GONE, ABSENT]), min_size=count, max_size=count)
    )
    rest = draw(st.integers(1, 2 * block))
    front = draw(st.integers(0, count * block + rest - 1))
    view = view_of(states, front=front, block=block, rest=rest)
    if view.states and view.states[0] == LANDED:  # settled: the front touches no island
        view = replace(view, states=bytes([GONE]) + view.states[1:])
    cost = st.one_of(st.just(0.0), st.floats(1e-6, 10))
    error = draw(st.floats(0, 1))
    return {
        "view": view,
        "chunk_tokens": draw(st.integers(1, 8 * block)),
        "costs": PromptCosts(
            PrefillCost(draw(cost), draw(cost), draw(cost), error=error),
            LoadCost(draw(cost), draw(cost), draw(cost), error),
            overlap_share=draw(st.sampled_from([0.0, 0.9])),
        ),
        "progress": LoadProgress(draw(st.floats(0, 5)), draw(st.booleans())),
    }


def edge_of(now: dict, mode: Mode, *, loads: bool) -> int:
    """In mode auto, islands between holes are computed if that is sooner than jumping over them.
    One that grows while blocks are loaded is no such island."""
    view: View = now["view"]
    size, chunk, front = view.block_tokens, now["chunk_tokens"], view.front
    cost: PrefillCost = now["costs"].prefill
    landed = [BlockState(s) == LANDED for s in view.states]
    runs = [list(run) for yes, run in itertools.groupby(range(len(landed)), landed.__getitem__)]
    islands = [
        ((view.first + run[0]) * size, min((view.first + run[-1] + 1) * size, view.limit))
        for run in runs
        if landed[run[0]] and (view.first + run[0]) * size < view.limit
    ]
    ends = [start for start, _ in islands[1:]] + [view.prompt_tokens] * bool(islands)
    for (start, stop), end in zip(islands, ends, strict=True):
        share = (-(start - front) % chunk - (stop - start)) / chunk
        saves = cost.step_s(start, stop) >= (1 + share) * cost.work_s(StepWork())
        if end == view.prompt_tokens:
            jump_s = cost.span_s(front, start, chunk) + cost.span_s(stop, end, chunk)
            saves = jump_s <= cost.span_s(front, end, chunk)
        grows = loads and view.states[start // size - view.first - 1] == WANTED
        if mode != "auto" or grows or saves:
            return min(front + chunk, view.prompt_tokens, start)
    return min(front + chunk, view.prompt_tokens)


@given(now=situations(), mode=st.sampled_from(["auto", "both"]))
def test_planner_random_situations_step_advances_within_its_limit(now: dict, mode: Mode) -> None:
    step, view = next_step(mode=mode, **now), now["view"]
    if step.wait:
        assert step.stop == view.front
        assert WANTED in view.states
    else:
        loads = step.load_from is not None
        assert view.front < step.stop <= edge_of(now, mode, loads=loads)
    if mode == "both":
        assert step.load_from is not None


@given(now=situations(), mode=st.sampled_from(["auto", "both"]), any_landed=st.booleans())
def test_planner_random_situations_very_late_loads_are_not_waited_for(
    now: dict, mode: Mode, any_landed: bool
) -> None:
    least_s = now["costs"].prefill.step_s(0, now["view"].prompt_tokens)
    now["progress"] = LoadProgress(1e6 * (1 + least_s), any_landed, load_from=0)
    assert not next_step(mode=mode, **now).wait


@given(now=situations())
def test_planner_mode_load_waits_while_a_block_is_wanted(now: dict) -> None:
    assert next_step(mode="load", **now).wait is (WANTED in now["view"].states)


@given(now=situations(), mode=st.sampled_from(["auto", "both", "load"]))
def test_planner_without_wanted_blocks_takes_a_full_step(now: dict, mode: Mode) -> None:
    view = now["view"]
    now["view"] = replace(view, states=view.states.replace(bytes([WANTED]), bytes([GONE])))
    assert next_step(mode=mode, **now) == StepPlan(edge_of(now, mode, loads=False))


def test_planner_step_ends_at_an_island_only_if_the_rest_takes_longer_without_it() -> None:
    """To stop at block 1 takes four steps of 150 tokens, as without it, or one more of 300."""
    known = costs(1.0, token_s=0.01, fixed_s=10.0)
    for chunk, stop in ((150, 100), (300, 300), (1000, 550)):
        assert decide([GONE, LANDED, GONE, GONE, GONE], known, chunk=chunk).stop == stop
    # Loads that are given up let no island grow, so the last step is not split at it.
    late = LoadProgress(since_s=1e6, load_from=0)
    assert decide([WANTED] * 4 + [LANDED], known, chunk=1000, progress=late) == StepPlan(
        550, load_from=None, ends_loads=True
    )


def test_planner_split_follows_the_costs() -> None:
    assert decide([WANTED] * 10, costs(400)) == StepPlan(800, load_from=8)
    assert decide([WANTED] * 10, costs(100, token_s=4)) == StepPlan(200, load_from=2)
    assert decide([WANTED] * 10, costs(400), chunk=250) == StepPlan(250, load_from=8)
    assert decide([WANTED] * 10, costs(400), chunk=50) == StepPlan(50, load_from=8)


def test_planner_uncertain_costs_shorten_the_step() -> None:
    assert decide([WANTED] * 10, costs(400, error=0.25)) == StepPlan(600, load_from=8)
    # Unless another step costs more than being wrong.
    assert decide([WANTED] * 10, costs(400, error=0.25, fixed_s=150), mode="both").stop == 800
    # Loads below the meeting point may be worth it after all.
    far = decide([WANTED] * 10, costs(400, error=0.25), chunk=200)
    assert far == StepPlan(200, load_from=7)


def test_planner_landed_blocks_are_left_out_of_the_split() -> None:
    assert decide([WANTED] * 4 + [LANDED] * 6, costs(100)).stop == 200
    assert decide([GONE] * 4 + [LANDED] * 6, costs(100)).stop == 400
    # The loader has its two blocks before the four that compute must do anyway are done.
    assert decide([GONE] * 4 + [WANTED] * 2 + [LANDED] * 4, costs(100)).stop == 400


def test_planner_fast_link_is_waited_for_until_it_is_late() -> None:
    quick = costs(1)
    wait = StepPlan(0, wait=True)
    assert decide([WANTED] * 10, quick) == wait
    assert (
        decide([WANTED] * 10, quick, progress=LoadProgress(10, any_landed=True, load_from=0))
        == wait
    )
    assert not decide(
        [WANTED] * 10, quick, progress=LoadProgress(100, any_landed=True, load_from=0)
    ).wait


def test_planner_small_gain_neither_begins_nor_ends_loading() -> None:
    blocks, hopeless = [WANTED] * 10, costs(990)  # one block is saved, at the very end
    assert decide(blocks, hopeless) == StepPlan(1050, load_from=None)
    assert decide(blocks, hopeless, progress=LoadProgress(load_from=0)).load_from == 9
    short = [ABSENT] * 99 + [WANTED]
    gain = 100 / (99 * 100 + 150)
    assert gain < COMPUTE_SLACK
    assert decide(short, costs(1)) == StepPlan(10_000, load_from=None)
    assert decide(short, costs(1), progress=LoadProgress(load_from=0)).load_from is not None
    assert decide(short, costs(1), mode="both").load_from is not None


def test_planner_guessed_compute_cost_is_measured_with_one_step() -> None:
    """A guess that is too high would never be put right: nothing would be computed."""
    blocks = [WANTED] * 10
    guess, quick = PrefillCost(0.0, 1.0, 0.0), LoadCost(0.0, 0.1, error=0.0)
    assert guess.guessed
    assert decide(blocks, PromptCosts(guess, quick)) == StepPlan(100, load_from=0)
    assert decide(blocks, PromptCosts(guess, quick), front=100) == StepPlan(200, load_from=1)
    assert decide(blocks, PromptCosts(guess, quick), chunk=30) == StepPlan(30, load_from=0)
    known = replace(guess, error=0.25)
    assert decide(blocks, PromptCosts(known, quick)).wait
    assert decide(blocks, PromptCosts(guess, quick), mode="load").wait
    assert decide(blocks, PromptCosts(guess, quick), mode="both").wait


def test_planner_slow_load_or_small_gain_is_not_worth_loading() -> None:
    def worth(states: list[bool], known: PromptCosts, front: int = 0) -> bool:
        view = view_of([ABSENT] * len(states), front=front).found(states)
        return should_load(
            view, mode="auto", chunk_tokens=500, costs=known, progress=LoadProgress()
        )

    assert worth([True] * 10, costs(100))
    assert not worth([True] * 10, costs(1100))
    assert not worth([False] * 99 + [True], costs(1))
    assert not worth([True] * 10, costs(100), front=1000)
    assert worth([False] * 9 + [True], costs(1), front=700)


@pytest.mark.parametrize("busy", [StepWork(tokens=400), StepWork(decodes=40)])
def test_planner_busy_device_makes_loading_worth_it(busy: StepWork) -> None:
    view = view_of([WANTED] * 10)
    known = costs(1100)
    known = replace(known, prefill=replace(known.prefill, decode_s=10.0))

    def worth(known: PromptCosts) -> bool:
        return should_load(
            view, mode="auto", chunk_tokens=100, costs=known, progress=LoadProgress()
        )

    assert not worth(known)
    assert worth(known.beside(busy))
    assert worth(replace(known, backlog_s=known.prefill.queue_s(StepWork(tokens=5000), 100)))


def test_planner_backlog_moves_the_meeting_point_to_the_left() -> None:
    view, known = view_of([WANTED] * 10), replace(costs(100, fixed_s=10), backlog_s=700.0)
    outlook = look_ahead(view, chunk_tokens=500, costs=known, progress=LoadProgress())
    assert outlook.compute_s == 700 + 1050 + 3 * 10
    assert outlook.load_s == 1000 + 60
    # A hundred tokens computed after 700 s, while nine blocks come.
    assert (outlook.meet_token, outlook.both_s) == (100, 900 + 60)
    late = replace(known, backlog_s=5000.0)
    assert look_ahead(view, chunk_tokens=500, costs=late, progress=LoadProgress()).best_s == 5060


@given(now=situations(), backlog_s=st.floats(0, 1e4), load_from=st.sampled_from([None, 0]))
def test_planner_worth_loading_with_equal_costs_does_not_change(
    now: dict, backlog_s: float, load_from: int | None
) -> None:
    """Whichever it was before: with the same costs the next poll says the same again."""
    now["costs"] = replace(now["costs"], backlog_s=backlog_s)
    now["progress"] = LoadProgress(load_from=load_from)
    loads = should_load(mode="auto", **now)
    now["progress"] = LoadProgress(load_from=0 if loads else None)
    assert should_load(mode="auto", **now) == loads


def test_planner_silent_link_is_marked_late_and_a_slow_link_is_not() -> None:
    blocks, quick = [WANTED] * 10, costs(1)
    silent = decide(blocks, quick, progress=LoadProgress(5000, any_landed=True, load_from=0))
    assert (silent.load_from, silent.ends_loads) == (None, True)
    slow = decide(blocks, costs(1100), progress=LoadProgress(5, any_landed=True, load_from=0))
    assert (slow.load_from, slow.ends_loads) == (None, False)


@pytest.mark.parametrize(
    ("states", "keep", "tokens"),
    [
        ([WANTED] * 10, None, 1000),
        ([WANTED] * 10, 8, 800),
        ([WANTED] * 10, 0, 50),
        ([ABSENT] * 10, 0, 1000),
        ([WANTED] * 4 + [ABSENT] * 6, 0, 650),
        ([WANTED] * 4 + [ABSENT] * 2 + [LANDED] + [WANTED] * 3, 2, 400),
    ],
)
def test_device_work_counts_the_tokens_that_are_not_loaded(
    states: list[BlockState], keep: int | None, tokens: int
) -> None:
    assert device_work(view_of(states, front=50), keep).tokens == tokens


def test_planner_only_the_last_step_before_the_meet_ends_with_a_block() -> None:
    slow = costs(900)
    assert decide([WANTED] * 10, slow, mode="both", chunk=350).stop == 350
    assert decide([WANTED] * 10, slow, mode="both", front=330, chunk=350).stop == 680
    unsure = costs(900, error=0.3)
    assert decide([WANTED] * 10, unsure, mode="both").stop == 600
    assert decide([WANTED] * 10, unsure, mode="both", front=330).stop == 700


@pytest.mark.parametrize(("relied_s", "waits"), [(0.0, True), (60.0, True), (61.0, False)])
def test_planner_wait_beside_others_leaves_time_for_a_step_of_theirs(
    relied_s: float, waits: bool
) -> None:
    """A prompt may lose one step of 160 s, and waits for one of theirs, which takes 100 s."""
    known = replace(costs(1.0, fixed_s=0.0), load=LoadCost(200.0, 1.0, error=0.0))
    known = known.beside(StepWork(100))
    progress = LoadProgress(load_from=0, relied_from=0, relied_s=relied_s)
    assert decide([WANTED] * 10, known, chunk=60, progress=progress).wait == waits


# ---- prompts on a virtual clock ----

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20)  # load alone / compute alone


def machine_of(ratio: float, prompt: int, chunk: int, growth: float) -> Machine:
    """`growth`: how much dearer the token at 16k is than the first."""
    prefill = PrefillCost(20.0, 1.0, growth / 16384)
    block_s = prefill.span_s(0, prompt, chunk) * ratio / (prompt // 128)
    return Machine(prefill, LoadCost(0.0, block_s))


def ideal_s(machine: Machine, prompt: int) -> float:
    """The best split in whole tokens, with the step that yields the first token."""
    stored = min(prompt // 128 * 128, prompt - 1)
    per_token_s = machine.load.block_s / 128
    low, high = 0, stored
    while low < high:  # C grows and the load shrinks with x: the best is where they cross
        x = (low + high) // 2
        if machine.prefill.span_s(0, x, 2**31) < per_token_s * (stored - x):
            low = x + 1
        else:
            high = x
    return per_token_s * (stored - low) + machine.prefill.step_s(stored, prompt)


@pytest.mark.parametrize(("chunk", "growth"), [(512, 0.6), (2048, 0.0)])
@pytest.mark.parametrize(
    ("prompt", "bound"),
    # Blocks are whole: the fewer there are, the more a half of one is.
    [(2048 + 57, 1.14), (4096 + 57, 1.08), (8192 + 57, 1.055), (16384 + 57, 1.045)],
)
def test_planner_race_is_close_to_the_best_split(
    prompt: int, bound: float, chunk: int, growth: float
) -> None:
    for ratio in RATIOS:
        machine = machine_of(ratio, prompt, chunk, growth)
        result = simulate_prompt(machine, prompt, chunk_tokens=chunk)
        assert result.computed_tokens + result.loaded_tokens == prompt
        best_s = min(ideal_s(machine, prompt), machine.prefill.span_s(0, prompt, chunk))
        assert result.ttft_s <= bound * best_s, ratio


@pytest.mark.parametrize("chunk", [512, 2048])
@pytest.mark.parametrize("prompt", [2048 + 57, 16384 + 57])
def test_planner_race_is_at_most_two_percent_behind_either_mode_alone(
    prompt: int, chunk: int
) -> None:
    for ratio in RATIOS:
        machine = machine_of(ratio, prompt, chunk, 0.6)
        alone_s = [
            simulate_prompt(machine, prompt, chunk_tokens=chunk, mode=mode).ttft_s
            for mode in ("compute", "load")
        ]
        assert simulate_prompt(machine, prompt, chunk_tokens=chunk).ttft_s <= 1.02 * min(alone_s), (
            ratio
        )


@pytest.mark.parametrize("chunk", [512, 2048])
def test_planner_race_with_wrong_priors_costs_one_step_at_most(chunk: int) -> None:
    prompt = 8192 + 57
    for ratio in RATIOS:
        machine = machine_of(ratio, prompt, chunk, 0.6)
        strangers = Knowledge(
            PrefillFit(PrefillCost(1.0, 0.2, 0.2 / 6000)),
            LoadFit(LoadCost(0.0, machine.load.block_s / 50)),
        )
        result = simulate_prompt(machine, prompt, chunk_tokens=chunk, knowledge=strangers)
        best_s = min(ideal_s(machine, prompt), machine.prefill.span_s(0, prompt, chunk))
        assert result.ttft_s <= 1.055 * best_s + machine.prefill.step_s(0, chunk), ratio


def test_planner_race_modes_compute_or_load_everything() -> None:
    machine = machine_of(1.0, 4153, 512, 0.6)
    compute = simulate_prompt(machine, 4153, chunk_tokens=512, mode="compute")
    assert (compute.computed_tokens, len(compute.steps), compute.waited_s) == (4153, 9, 0.0)
    assert compute.ttft_s == pytest.approx(machine.prefill.span_s(0, 4153, 512))
    load = simulate_prompt(machine, 4153, chunk_tokens=512, mode="load")
    assert (load.computed_tokens, load.loaded_tokens, len(load.steps)) == (57, 4096, 1)
    assert load.waited_s == pytest.approx(32 * machine.load.block_s, rel=0.01)


@settings(max_examples=150)
@given(
    prompt=st.integers(1, 3000),
    chunk=st.integers(1, 700),
    block=st.sampled_from([16, 64, 128]),
    block_s=st.floats(1, 1e5),
    fixed_s=st.floats(0, 1000),
    mode=st.sampled_from(["auto", "both", "compute"]),
    stored=st.integers(0, 200),
)
def test_planner_random_races_fill_every_token(
    prompt: int, chunk: int, block: int, block_s: float, fixed_s: float, mode: Mode, stored: int
) -> None:
    machine = Machine(PrefillCost(fixed_s, 1.0, 1e-4), LoadCost(0.0, block_s))
    result = simulate_prompt(
        machine, prompt, chunk_tokens=chunk, block_tokens=block, mode=mode, stored_blocks=stored
    )
    assert result.computed_tokens + result.loaded_tokens == prompt
    assert result.loaded_tokens <= stored * block


def test_planner_race_with_useless_blocks_equals_mode_compute() -> None:
    # Eight blocks are stored, but the logits of the last token are wanted: another step.
    machine = Machine(PrefillCost(0.03, 6e-5, 0.0), LoadCost(0.0, 0.06))
    compute_s = simulate_prompt(machine, 1024, chunk_tokens=512, mode="compute").ttft_s
    assert simulate_prompt(machine, 1024, chunk_tokens=512).ttft_s == compute_s


# ---- models with end states ----


def end_view(states: list[BlockState], end_wanted: int, *, front: int = 0) -> View:
    """A prompt whose end state is three blocks."""
    return replace(view_of(states, front=front), end_blocks=3, end_wanted=end_wanted)


def test_planner_outlook_end_blocks_are_loaded_whatever_is_computed() -> None:
    outlook = look_ahead(
        end_view([WANTED] * 10, 3), chunk_tokens=500, costs=costs(100), progress=LoadProgress()
    )
    assert outlook.compute_s == 1050
    assert outlook.load_s == 13 * 100 + 50
    assert (
        outlook.both_s == 700 + 50
    )  # seven blocks and the end meet six or seven that are computed


def test_planner_outlook_landed_blocks_before_a_missing_end_are_not_free() -> None:
    def compute_s(states: list[BlockState], end_wanted: int) -> float:
        view = end_view(states, end_wanted)
        return look_ahead(
            view, chunk_tokens=500, costs=costs(100), progress=LoadProgress()
        ).compute_s

    assert compute_s([LANDED] * 3, 0) == 50
    assert compute_s([LANDED] * 3, 1) == 350
    assert compute_s([WANTED, LANDED, LANDED], 0) == 350


@pytest.mark.parametrize(("end_wanted", "loads"), [(1, True), (3, False)])
def test_planner_prompt_is_not_loaded_if_its_end_takes_longer_than_computing(
    end_wanted: int, loads: bool
) -> None:
    """Four blocks are computed in 450 s, and a block is loaded in 160 s."""
    now = {"chunk_tokens": 500, "costs": costs(160), "progress": LoadProgress()}
    assert should_load(end_view([WANTED] * 4, end_wanted), mode="auto", **now) == loads


def test_planner_step_waits_before_landed_blocks_whose_end_is_near() -> None:
    view = end_view([LANDED] * 5, 1)
    progress = LoadProgress(since_s=1.0, any_landed=True, load_from=0)
    step = next_step(view, mode="auto", chunk_tokens=500, costs=costs(10), progress=progress)
    assert step.wait


@pytest.mark.parametrize(
    ("since_s", "others_wait", "stop"),
    [(210, False, 500), (190, True, 500), (210, True, 1050)],
)
def test_planner_step_is_whole_where_others_would_fill_it_and_loads_have_stalled(
    since_s: float, others_wait: bool, stop: int
) -> None:
    step = next_step(
        view_of([WANTED] * 10),
        mode="auto",
        chunk_tokens=10_000,
        costs=replace(costs(100), others_wait=others_wait),
        progress=LoadProgress(since_s, any_landed=True, load_from=0),
    )
    assert step.stop == stop


def test_planner_prompt_whose_loads_have_stalled_waits_only_if_no_other_prompt_does() -> None:
    progress = LoadProgress(210.0, any_landed=True, load_from=0)
    for others_wait in (False, True):
        step = next_step(
            view_of([WANTED]),
            mode="auto",
            chunk_tokens=10_000,
            costs=replace(costs(100, token_s=10.0), others_wait=others_wait),
            progress=progress,
        )
        assert step.wait != others_wait


def test_planner_silence_of_a_store_counts_for_prompts_behind_the_first_when_it_has_stalled() -> (
    None
):
    view, progress = view_of([WANTED] * 10), LoadProgress(load_from=0)
    healthy = look_ahead(view, chunk_tokens=500, costs=costs(10), progress=progress)
    for silence_s, stalled in ((19.0, False), (21.0, True)):
        silent = replace(costs(10), silence_s=silence_s)
        outlook = look_ahead(view, chunk_tokens=500, costs=silent, progress=progress)
        assert is_stalled(view, silent, progress) is stalled
        assert (outlook.load_s > healthy.load_s) is stalled


@pytest.mark.parametrize("mode", ["auto", "both"])
def test_planner_step_computes_landed_blocks_whose_end_is_overdue(mode: Mode) -> None:
    view = end_view([LANDED] * 5, 1)
    progress = LoadProgress(since_s=10_000.0, any_landed=True, load_from=0)
    step = next_step(view, mode=mode, chunk_tokens=500, costs=costs(10), progress=progress)
    assert not step.wait
    assert step.stop > 100


@pytest.mark.parametrize("state", [WANTED, LANDED])
def test_planner_step_does_not_wait_for_an_overdue_end_of_an_island_that_is_not_worth_a_step(
    state: BlockState,
) -> None:
    progress = LoadProgress(since_s=10_000.0, any_landed=True, load_from=0)
    step = next_step(
        end_view([ABSENT, ABSENT, state, ABSENT], 1),
        mode="both",
        chunk_tokens=500,
        costs=costs(10, fixed_s=150.0),
        progress=progress,
    )
    assert not step.wait
    assert step.stop == 300


def test_planner_step_ends_where_the_front_can_jump_to_the_end() -> None:
    states = [ABSENT, ABSENT, LANDED, LANDED]
    for end_wanted, stop in ((0, 200), (1, 450)):
        step = next_step(
            end_view(states, end_wanted),
            mode="auto",
            chunk_tokens=500,
            costs=costs(1000),
            progress=LoadProgress(load_from=0),
        )
        assert step.stop == stop


def test_planner_end_block_alone_can_be_overdue() -> None:
    late = LoadProgress(since_s=11.0, any_landed=True, load_from=4)
    assert is_overdue(end_view([LANDED] * 4, 1), costs(10), late)
    assert not is_overdue(end_view([LANDED] * 4, 0), costs(10), late)
    assert not is_overdue(end_view([LANDED] * 4, 1), costs(10), replace(late, load_from=None))


def test_planner_last_step_over_an_end_does_not_begin_early() -> None:
    for view, span in ((view_of([WANTED]), (0, 100)), (end_view([WANTED], 0), None)):
        known = costs(10)
        assert overlap_span(view, missing_shares={0: 0.5}, chunk_tokens=500, costs=known) == span


def test_planner_outlook_of_a_prompt_with_an_end_has_no_overlap() -> None:
    load = replace(costs(100).load, coming_s=100)
    known = replace(costs(100), load=load, overlap_share=0.75)
    outlook = look_ahead(
        end_view([WANTED] * 10, 0), chunk_tokens=500, costs=known, progress=LoadProgress()
    )
    assert outlook.load_s == 1000 + 50


# ---- prompts that pass ----


def passes(
    ends_s: list[float],
    *,
    chunk: int = 1000,
    waiting: int = 1,
    work: StepWork | None = None,
    backlog_s: float = 0.0,
    pause_s: float = 0.0,
    last_ends_s: Sequence[float] = (),
) -> int | None:
    """A token takes a second, and a step ten seconds more."""
    return passing_tokens(
        Span(0, 4000),
        chunk,
        ends_s=ends_s,
        last_ends_s=last_ends_s,
        waiting=waiting,
        work=work or StepWork(),
        cost=PrefillCost(10.0, 1.0, 0.0),
        backlog_s=backlog_s,
        pause_s=pause_s,
    )


@pytest.mark.parametrize(
    ("ends_s", "tokens"),
    [
        ([], None),
        ([1010.0], None),  # the step is over by then
        ([990.0], None),  # one prompt would gain less than the other loses three times
        ([500.0], 490),
        ([500.0, 300.0, 400.0], 290),
        ([11.0], 1),
        ([10.0], 0),  # no step ends by then
    ],
)
def test_passing_tokens_step_ends_when_loads_do(ends_s: list[float], tokens: int | None) -> None:
    assert passes(ends_s) == tokens


def test_passing_tokens_loads_that_end_before_the_device_is_free_leave_no_step() -> None:
    assert passes([400.0], backlog_s=400.0) == 0
    assert passes([411.0], backlog_s=400.0) == 1
    assert passes([1400.0], backlog_s=400.0) is None


def test_passing_tokens_last_step_of_a_loaded_prompt_is_not_longer_for_others() -> None:
    last = work_of(3990, 4000)
    assert passes([20.0], chunk=990, work=last) == 0
    assert passes([20.0], chunk=30, work=last) is None


def test_passing_tokens_pause_after_a_step_counts_as_part_of_it() -> None:
    assert passes([200.0], chunk=100) is None
    assert passes([200.0], chunk=100, pause_s=300.0) == 0
    assert passes([1200.0], pause_s=300.0) == 890
    assert passes([1310.0], pause_s=300.0) is None
    before = StepWork(tokens=500)
    assert passes([810.0], chunk=30, pause_s=300.0, work=before) is None
    assert passes([810.0], chunk=31, pause_s=300.0, work=before) == 0


def test_passing_tokens_pause_after_a_last_step_is_lost_by_those_held_back() -> None:
    assert passes([], last_ends_s=[20.0], chunk=100) == 10
    assert passes([], last_ends_s=[20.0], chunk=100, pause_s=30.0) is None, "90 s for 120"
    assert passes([], last_ends_s=[20.0], chunk=300, pause_s=30.0) == 10
    assert passes([], last_ends_s=[20.0], chunk=300, pause_s=30.0, waiting=3) is None


def test_planner_pause_after_each_step_lets_no_step_end_at_one_landed_block() -> None:
    view = view_of([WANTED] * 4 + [LANDED])
    slow = PromptCosts(PrefillCost(1.0, 1.0, 0.0, error=0.0), LoadCost(0.0, 1e4, error=0.0))

    def stop(pause_s: float) -> int:
        progress = LoadProgress(any_landed=True, load_from=0, relied_from=0, relied_s=1e3)
        costs = slow.beside(StepWork(), pause_s)
        return next_step(view, mode="auto", chunk_tokens=1000, costs=costs, progress=progress).stop

    assert stop(0.0) == 400
    assert stop(200.0) == view.prompt_tokens


def test_passing_tokens_many_prompts_that_wait_lose_more_than_one_gains() -> None:
    assert passes([500.0], waiting=16) == 490
    assert passes([500.0], waiting=17) is None


def test_passing_tokens_time_of_what_comes_before_in_the_step_is_no_gain() -> None:
    before = StepWork(tokens=500)
    assert passes([100.0], chunk=30, work=before) is None
    assert passes([100.0], chunk=31, work=before) == 0


def test_passing_tokens_another_step_that_projects_the_prefix_again_costs_more() -> None:
    def limit(prefix_s: float) -> int | None:
        return passing_tokens(
            Span(1000, 2000),
            1000,
            ends_s=[500.0],
            waiting=1,
            work=StepWork(),
            cost=PrefillCost(10.0, 1.0, 0.0, prefix_s=prefix_s),
            backlog_s=0.0,
        )

    assert limit(0.0) == 490
    assert limit(0.2) == 290
    assert limit(0.25) is None


@given(
    start=st.integers(0, 20000),
    tokens=st.integers(1, 20000),
    chunk=st.integers(1, 8192),
    ends_s=st.lists(st.floats(0, 3), max_size=4),
    waiting=st.integers(1, 50),
    before=st.integers(0, 4000),
    backlog_s=st.floats(0, 2),
)
def test_passing_tokens_limit_costs_less_than_one_prompt_gains(
    start: int,
    tokens: int,
    chunk: int,
    ends_s: list[float],
    waiting: int,
    before: int,
    backlog_s: float,
) -> None:
    cost = PrefillCost(0.006, 3e-5, 1e-10)
    rest, work = Span(start, start + tokens), StepWork(before)

    def end_s(computed: int) -> float:
        return backlog_s + cost.work_s(work + work_of(start, start + computed))

    found = passing_tokens(
        rest,
        chunk,
        ends_s=ends_s,
        waiting=waiting,
        work=work,
        cost=cost,
        backlog_s=backlog_s,
    )
    whole = min(chunk, tokens)
    least_s = end_s(0) if before else backlog_s
    if found is None:
        gains = [end_s(whole) - max(each_s, least_s) for each_s in ends_s]
        assert all(gain_s <= PASSING_COST * waiting * cost.fixed_s + 1e-9 for gain_s in gains)
        return
    assert 0 <= found < whole
    ended = [each_s for each_s in ends_s if found == 0 or each_s >= end_s(found)]
    assert any(
        end_s(whole) - max(each_s, least_s) > PASSING_COST * waiting * cost.fixed_s - 1e-9
        and each_s <= end_s(found + 1)
        for each_s in ended
    )


class CountedCost(PrefillCost):
    """Counts predictions of spans."""

    predicted = 0

    def span_s(self, start: int, stop: int, chunk_tokens: int) -> float:
        CountedCost.predicted += 1
        return super().span_s(start, stop, chunk_tokens)


def predictions_with_holes(blocks: int, *, others_s: float) -> int:
    """How many spans are predicted to plan a step of a prompt that lacks random blocks."""
    draw = random.Random(0)
    states = [BlockState.WANTED, BlockState.GONE, BlockState.LANDED]
    size = 128
    CountedCost.predicted = 0
    next_step(
        View(0, 0, bytes(draw.choices(states, k=blocks)), size, blocks * size + 1, blocks * size),
        mode="auto",
        chunk_tokens=2048,
        costs=PromptCosts(
            CountedCost(0.01, 1e-4, 1e-9), LoadCost(0.01, 0.02), others_s=others_s, pipelined=True
        ),
        progress=LoadProgress(any_landed=True, load_from=0),
    )
    return CountedCost.predicted


def test_next_step_predictions_grow_no_faster_than_the_holes() -> None:
    """A store that has lost random blocks of a long prompt does not hold up the scheduler."""
    few, many = (predictions_with_holes(blocks, others_s=0.05) for blocks in (200, 800))
    assert many <= 6 * few


def test_next_step_beside_others_needs_hardly_more_predictions_with_holes_than_alone() -> None:
    alone, beside = (predictions_with_holes(800, others_s=others_s) for others_s in (0.0, 0.05))
    assert beside <= 1.2 * alone


def test_next_step_predictions_do_not_grow_with_the_length_of_a_prompt_without_its_head() -> None:
    """Eviction takes the heads of long prompts first."""
    cost = CountedCost(0.01, 1e-4, 1e-9)
    counts = []
    for blocks in (400, 3200):
        size = 128
        stop = blocks * size
        load = LoadCost(0.01, cost.span_s(0, stop, 2048) / blocks / 2)
        head = bytes([BlockState.GONE]) * (blocks // 2)
        tail = bytes([BlockState.WANTED]) * (blocks // 2)
        CountedCost.predicted = 0
        next_step(
            View(0, 0, head + tail, size, stop + 1, stop),
            mode="auto",
            chunk_tokens=2048,
            costs=PromptCosts(cost, load, others_s=0.5, pipelined=True),
            progress=LoadProgress(any_landed=True, load_from=0),
        )
        counts.append(CountedCost.predicted)
    assert counts[1] <= counts[0] + 10
