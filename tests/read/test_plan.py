"""How far a step goes: properties of the decision, and races on a virtual clock that it decides."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_cake.read.meet import BlockState, Meet
from sglang_cake.read.plan import Mode, Rates, Step, next_step

# ---- a machine on a virtual clock ----

NEWEST = 0.5  # weight of the newest step, as the coordinator has it


@dataclass(frozen=True, slots=True)
class Machine:
    """Costs in units of one token's compute at the front: see `step_s`."""

    overhead_s: float = 20.0  # per step
    growth: float = 0.6  # how much dearer the token at `scale` is than the first
    scale: int = 16384
    load_s: float = 128.0  # per block

    def tokens_s(self, start: int, stop: int) -> float:
        """Compute of [start, stop) without the overhead of steps."""
        return (stop - start) + self.growth * (stop * stop - start * start) / (2 * self.scale)

    def step_s(self, start: int, stop: int) -> float:
        return self.overhead_s + self.tokens_s(start, stop)

    def compute_s(self, stop: int, chunk: int) -> float:
        """Compute of [0, stop) in whole chunks."""
        return self.tokens_s(0, stop) + self.overhead_s * -(-stop // chunk)


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float
    computed: int
    loaded: int
    steps: int
    waited_s: float


def race(
    machine: Machine,
    prompt: int,
    *,
    chunk: int,
    block: int = 128,
    mode: Mode = "auto",
    rates: Rates | None = None,
    stored: int | None = None,
) -> Result:
    """Restore `prompt` tokens of which the first `stored` blocks are stored.

    Args:
        rates: what the machine is known to do; by default nothing, as after a start.
    """
    meet = Meet(block_tokens=block, page_tokens=1, limit_tokens=prompt - 1, prompt_tokens=prompt)
    count = prompt // block if stored is None else stored
    meet.found([b < count and mode != "compute" for b in range(prompt // block)])
    now, computed, loaded, steps, waited = 0.0, 0, 0, 0, 0.0
    link_free_s, waiting_since = 0.0, None
    rates = rates or Rates()
    while True:
        link_free_s, rates = _land(meet, machine, link_free_s, now, rates)
        while (span := meet.island()) is not None:
            loaded += span.tokens
            meet.attach(span)
        step = next_step(
            meet.ahead(),
            mode=mode,
            front=meet.front,
            limit=meet.limit,
            prompt_tokens=prompt,
            chunk_tokens=chunk,
            block_tokens=block,
            rates=rates,
            waited_s=0.0 if waiting_since is None else now - waiting_since,
        )
        if step.wait:
            waiting_since = now if waiting_since is None else waiting_since
            tick = machine.load_s / 4  # the scheduler polls
            now, waited = now + tick, waited + tick
            continue
        waiting_since = None
        took = machine.step_s(meet.front, step.stop)
        computed, steps = computed + step.stop - meet.front, steps + 1
        rates = _measured(rates, took, step.stop - meet.front, block)
        in_flight = _next(meet)
        meet.claim(step.stop)
        if in_flight is not None and in_flight < meet.fence:
            link_free_s = now  # the read under way is cancelled
        now += took
        if meet.front == prompt:
            return Result(now, computed, loaded, steps, waited)


def _next(meet: Meet) -> int | None:
    """The block that the loader is at."""
    return max((b for b, state in meet.ahead() if state is BlockState.WANTED), default=None)


def _land(
    meet: Meet, machine: Machine, free_s: float, now: float, rates: Rates
) -> tuple[float, Rates]:
    while (block := _next(meet)) is not None and free_s + machine.load_s <= now + 1e-9:
        free_s += machine.load_s
        meet.landed(block)
        rates = Rates(rates.compute_s_per_token, rates.step_floor_s, machine.load_s)
    return (free_s if block is not None else now), rates


def _measured(rates: Rates, took: float, tokens: int, block: int) -> Rates:
    per_token = took / tokens
    if rates.compute_s_per_token:
        weight = NEWEST * min(1.0, tokens / (4 * block))
        old = rates.compute_s_per_token
        per_token = old + weight * (per_token - old)
    floor = min(rates.step_floor_s * 1.05 or took, took)
    return Rates(per_token, floor, rates.load_s_per_block)


def ideal_s(machine: Machine, prompt: int, *, chunk: int, block: int = 128) -> float:
    """The best split in whole tokens, with the step that yields the first token."""
    stored = min(prompt // block * block, prompt - 1)
    per_token = machine.load_s / block
    low, high = 0, stored
    while low < high:  # C grows and the load shrinks with x: the best is where they cross
        x = (low + high) // 2
        if machine.compute_s(x, chunk) < per_token * (stored - x):
            low = x + 1
        else:
            high = x
    both = min(
        max(machine.compute_s(x, chunk), per_token * (stored - x)) for x in {max(0, low - 1), low}
    )
    return both + machine.step_s(stored, prompt)


# ---- races ----

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20)  # load alone / compute alone


def machine_of(ratio: float, prompt: int, chunk: int, growth: float) -> Machine:
    compute_s = Machine(growth=growth).compute_s(prompt, chunk)
    return Machine(growth=growth, load_s=compute_s * ratio / (prompt // 128))


def known(machine: Machine, chunk: int) -> Rates:
    """What the requests before have taught."""
    return Rates(machine.step_s(0, chunk) / chunk, machine.step_s(0, 1), machine.load_s)


@pytest.mark.parametrize("growth", [0.0, 0.6])
@pytest.mark.parametrize("chunk", [512, 1024, 2048])
@pytest.mark.parametrize(
    ("prompt", "bound"),
    # Blocks are whole: the fewer there are, the more a half of one is.
    [(2048 + 57, 1.14), (4096 + 57, 1.06), (8192 + 57, 1.045), (16384 + 57, 1.035)],
)
def test_close_to_the_best_split(prompt: int, bound: float, chunk: int, growth: float) -> None:
    for ratio in RATIOS:
        machine = machine_of(ratio, prompt, chunk, growth)
        result = race(machine, prompt, chunk=chunk, rates=known(machine, chunk))
        assert result.computed + result.loaded == prompt
        assert result.seconds <= bound * ideal_s(machine, prompt, chunk=chunk), ratio
        compute_s = race(machine, prompt, chunk=chunk, mode="compute").seconds
        load_s = race(machine, prompt, chunk=chunk, mode="load").seconds
        assert result.seconds <= 1.001 * min(compute_s, load_s), ratio


@pytest.mark.parametrize("chunk", [512, 2048])
def test_not_knowing_the_machine_costs_a_step_at_most(chunk: int) -> None:
    prompt = 8192 + 57
    for ratio in RATIOS:
        machine = machine_of(ratio, prompt, chunk, 0.6)
        result = race(machine, prompt, chunk=chunk)
        ideal = ideal_s(machine, prompt, chunk=chunk)
        assert result.seconds <= 1.045 * ideal + machine.step_s(0, chunk), ratio


def test_the_arms_do_what_their_names_say() -> None:
    machine = machine_of(1.0, 4153, 512, 0.6)
    compute = race(machine, 4153, chunk=512, mode="compute")
    assert (compute.computed, compute.steps, compute.waited_s) == (4153, 9, 0.0)
    assert compute.seconds == pytest.approx(machine.compute_s(4153, 512))
    load = race(machine, 4153, chunk=512, mode="load")
    assert (load.computed, load.loaded, load.steps) == (57, 4096, 1)
    assert load.waited_s == pytest.approx(32 * machine.load_s, rel=0.01)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(
    prompt=st.integers(1, 3000),
    chunk=st.integers(1, 700),
    block=st.sampled_from([16, 64, 128]),
    load_s=st.floats(1, 1e5),
    overhead_s=st.floats(0, 1000),
    mode=st.sampled_from(["auto", "both", "compute"]),
    stored=st.integers(0, 200),
)
def test_every_race_ends_with_every_token(
    prompt: int, chunk: int, block: int, load_s: float, overhead_s: float, mode: Mode, stored: int
) -> None:
    machine = Machine(overhead_s=overhead_s, load_s=load_s)
    result = race(machine, prompt, chunk=chunk, block=block, mode=mode, stored=stored)
    assert result.computed + result.loaded == prompt
    assert result.loaded <= stored * block


# ---- the decision itself ----

WAITING, LANDED, GONE, ABSENT = (
    BlockState.WANTED,
    BlockState.LANDED,
    BlockState.GONE,
    BlockState.ABSENT,
)
rate = st.one_of(st.just(0.0), st.floats(1e-6, 10))


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    block = draw(st.sampled_from([1, 16, 64]))
    prompt = draw(st.integers(1, 20 * block))
    front = draw(st.integers(0, prompt - 1))
    limit = draw(st.integers(0, prompt - 1))
    first = front // block
    count = max(0, min(prompt // block, -(-limit // block)) - first)
    ahead = draw(
        st.lists(st.sampled_from([WAITING, LANDED, GONE, ABSENT]), min_size=count, max_size=count)
    )
    if ahead and ahead[0] is LANDED:
        ahead[0] = GONE  # settled: the front touches no island
    return {
        "ahead": [(first + i, state) for i, state in enumerate(ahead)],
        "front": front,
        "limit": limit,
        "prompt_tokens": prompt,
        "chunk_tokens": draw(st.integers(1, 8 * block)),
        "block_tokens": block,
        "rates": Rates(draw(rate), draw(rate), draw(rate)),
        "waited_s": draw(st.floats(0, 5)),
    }


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(now=situations(), mode=st.sampled_from(["auto", "both"]))
def test_a_step_goes_on_and_stays_inside(now: dict, mode: Mode) -> None:
    step = next_step(mode=mode, **now)
    front, block, rates = now["front"], now["block_tokens"], now["rates"]
    if step.wait:
        assert step.stop == front
        assert WAITING in {s for _, s in now["ahead"]}
        smallest = max(rates.step_floor_s, rates.compute_s_per_token * block)
        assert now["waited_s"] < smallest
        return
    islands = [b * block for b, s in now["ahead"] if s is LANDED]
    assert front < step.stop <= min([front + now["chunk_tokens"], now["prompt_tokens"], *islands])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(now=situations())
def test_who_has_waited_long_enough_computes(now: dict) -> None:
    rates: Rates = now["rates"]
    longest = max(rates.step_floor_s, rates.compute_s_per_token * now["block_tokens"])
    assert not next_step(mode="auto", **{**now, "waited_s": longest}).wait


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(now=situations())
def test_load_alone_waits_as_long_as_something_is_to_come(now: dict) -> None:
    wanted = any(s is WAITING for _, s in now["ahead"])
    assert next_step(mode="load", **now).wait is wanted


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(now=situations(), mode=st.sampled_from(["auto", "both", "load"]))
def test_with_nothing_to_come_a_step_is_full(now: dict, mode: Mode) -> None:
    now["ahead"] = [(b, GONE if s is WAITING else s) for b, s in now["ahead"]]
    islands = [b * now["block_tokens"] for b, s in now["ahead"] if s is LANDED]
    edge = min([now["front"] + now["chunk_tokens"], now["prompt_tokens"], *islands])
    assert next_step(mode=mode, **now) == Step(edge)


def decide(states: list[BlockState], *, front: int = 0, **options: object) -> Step:
    """A prompt of blocks of 100 tokens and 50 tokens more, with a chunk that fits it all."""
    given = {"mode": "auto", "chunk_tokens": 10_000, "rates": Rates(), "waited_s": 0.0} | options
    return next_step(
        list(enumerate(states))[front // 100 :],
        front=front,
        limit=len(states) * 100,
        prompt_tokens=len(states) * 100 + 50,
        block_tokens=100,
        **given,  # type: ignore[arg-type]
    )


def test_who_knows_nothing_goes_half_way() -> None:
    assert decide([WAITING] * 10) == Step(500)
    assert decide([WAITING] * 10, rates=Rates(compute_s_per_token=1.0)) == Step(500)
    assert decide([WAITING] * 10, rates=Rates(load_s_per_block=1.0)) == Step(500)


def test_the_split_follows_the_rates() -> None:
    assert decide([WAITING] * 10, rates=Rates(1.0, 0.0, 400.0)) == Step(800)
    assert decide([WAITING] * 10, rates=Rates(4.0, 0.0, 100.0)) == Step(200)
    assert decide([WAITING] * 10, rates=Rates(1.0, 0.0, 400.0), chunk_tokens=250) == Step(200)
    assert decide([WAITING] * 10, rates=Rates(1.0, 0.0, 400.0), chunk_tokens=50) == Step(50)


def test_what_has_landed_is_no_work_for_either() -> None:
    assert decide([WAITING] * 4 + [LANDED] * 6) == Step(200)
    assert decide([GONE] * 4 + [LANDED] * 6) == Step(400)
    # The loader has its two blocks before the four that compute must do anyway are done.
    assert decide([GONE] * 4 + [WAITING] * 2 + [LANDED] * 4) == Step(400)


def test_a_quick_loader_is_waited_for_and_not_for_ever() -> None:
    quick = Rates(1.0, 0.0, 1.0)
    assert decide([WAITING] * 10, rates=quick, waited_s=99.0) == Step(0, wait=True)
    assert decide([WAITING] * 10, rates=quick, waited_s=100.0) == Step(100)
    floor = Rates(1.0, 300.0, 1.0)
    assert decide([WAITING] * 10, rates=floor, waited_s=299.0) == Step(0, wait=True)
    assert decide([WAITING] * 10, rates=floor, waited_s=300.0) == Step(100)


def test_no_block_is_begun_that_could_be_loaded() -> None:
    slow = Rates(1.0, 0.0, 1e6)
    assert decide([WAITING] * 10, rates=slow, chunk_tokens=350) == Step(300)
    assert decide([WAITING] * 10, front=330, rates=slow, chunk_tokens=350) == Step(600)
    assert decide([WAITING] * 10, front=330, rates=slow, chunk_tokens=50) == Step(380)
    assert decide([GONE] * 10, chunk_tokens=350) == Step(350)


def test_blocks_past_the_limit_do_not_count() -> None:
    step = next_step(
        [(0, GONE), (1, WAITING), (2, LANDED)],
        mode="auto",
        front=0,
        limit=100,
        prompt_tokens=300,
        chunk_tokens=1000,
        block_tokens=100,
        rates=Rates(),
        waited_s=0.0,
    )
    assert step == Step(300)
