"""One prompt on a virtual clock: the decisions are the package's, the machine is arithmetic."""

from dataclasses import dataclass

from sglang_cake.read.meet import BlockState, Meet
from sglang_cake.read.plan import Mode, Rates, next_step

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
    meet = Meet(
        block_tokens=block, page_tokens=1, limit_tokens=prompt - 1, prompt_tokens=prompt
    )
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
            tick = machine.load_s / 16  # the scheduler polls
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
