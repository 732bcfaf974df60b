"""One replay of a trace each: what the processes of bench_eviction share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.lecar import LecarPolicy
from sglang_cake.simulator.eviction_replay import (
    SHAPES,
    BeladyPolicy,
    Replay,
    SavedTime,
    seconds_bound,
)
from sglang_cake.simulator.request_traces import Trace, read_trace
from sglang_cake.stores.eviction import new_policy
from sglang_cake.stores.eviction.policy import Benefit, EvictionPolicy, Usage
from sglang_cake.stores.eviction.reuse_model import RequestClass
from sglang_cake.stores.eviction.reuse_policies import (
    PREFIX_BENEFIT_EXPONENT,
    CakePolicy,
    CakePrefixPolicy,
    ReusePolicy,
    WorkloadPolicy,
)

# File, and blocks of it per 512 tokens: capacities are compared at equal tokens.
TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl.zst", 1),
    "synthetic": ("mooncake_synthetic_trace.jsonl.zst", 1),
    "A-like": ("synthetic_traceA_like_blksz16.jsonl.zst", 32),
}
CAPACITIES = (1000, 2000, 4000, 8000, 16000, 32000, 64000)
BY_SHAPE = ("gdfs", "cake", "cake-prefix")  # decide by cost: one run for each shape
ONE_CLASS: RequestClass = ("", 1, 0)


def by_turn(usage: Usage) -> RequestClass:
    """The paper's classes: request type x turn."""
    request_class = ReusePolicy.class_of(usage)
    return request_class[0], request_class[1], 0


def by_length(usage: Usage) -> RequestClass:
    """Powers of two of the prompt's blocks instead of turns."""
    return usage.context.workload, usage.context.reach.bit_length(), min(usage.uses, 1)


class WithoutOffset(WorkloadPolicy):
    """`workload` that looks at the probability alone."""

    def value(self, benefit_step: int, usage: Usage, log_reuse: float) -> tuple[float, ...]:
        return (log_reuse,)


def workload(
    classes: Callable[[Usage], RequestClass] = ReusePolicy.class_of,
    *,
    life_s: float = 30.0,
    class_weight: float = 0.5,
    **model: Any,
) -> EvictionPolicy:
    policy = WorkloadPolicy()
    policy.class_of = classes
    policy.life_s = life_s
    policy.class_weight = class_weight
    for name, value in model.items():
        setattr(policy.model, name, value)
    return policy


class ByRecency(CakePrefixPolicy):
    """`cake-prefix` by the reuse of all classes together, which orders blocks as LRU does."""

    class_weight = 0.0


class PrefixOf(CakePrefixPolicy):
    """`cake-prefix` with another weight of the seconds: 0 counts hits alone, 1 seconds alone."""

    def __init__(self, benefit: Benefit, weight: float) -> None:
        super().__init__(benefit)
        self._weight = weight

    def log_benefit(self, usage: Usage) -> float:
        return super().log_benefit(usage) * self._weight / PREFIX_BENEFIT_EXPONENT


class CakeOf(CakePolicy):
    """`cake` with another benefit of a block."""

    def __init__(self, benefit: Benefit, saved_s: Callable[[Benefit, Usage], float]) -> None:
        super().__init__(benefit)
        self._saved_s = saved_s

    def log_benefit(self, usage: Usage) -> float:
        return math.log(max(1e-12, self._saved_s(self.benefit, usage)) / max(1, usage.stored_bytes))


def head_benefit(share: float) -> Callable[[Benefit, Usage], float]:
    """Blocks left of the meet keep this share of what computing them takes."""

    def saved_s(benefit: Benefit, usage: Usage) -> float:
        position, reach = usage.context.position, usage.context.reach
        left = position + 1 <= benefit.meeting_block(reach)
        return benefit.compute_s(position) * (share if left else 1.0)

    return saved_s


def less_the_load(benefit: Benefit, usage: Usage) -> float:
    """What computing the block takes, less what loading it does."""
    return benefit.compute_s(usage.context.position) - benefit.load_s


ADMISSIONS = {f"cake-prefix, admission {n}": n for n in (0.1, 0.3, 1.0)}
HEAD_FIRST = "workload, head first"  # without the offset: of a request the head is the oldest
VARIANTS: dict[str, Callable[[Benefit], EvictionPolicy]] = {
    "one class (is LRU)": lambda _: workload(lambda usage: ONE_CLASS),
    "distribution alone": lambda _: workload(by_turn, life_s=1e5, class_weight=1.0),
    "and life (the paper's)": lambda _: workload(by_turn, life_s=300.0, class_weight=1.0),
    "and a short life": lambda _: workload(by_turn, class_weight=1.0),
    "and reads": lambda _: workload(class_weight=1.0),
    "and half trust (workload)": lambda _: workload(),
    HEAD_FIRST: lambda _: WithoutOffset(),
    **{f"life {life} s": lambda _, n=life: workload(life_s=n) for life in (5, 100, 300, 1000)},
    **{f"trust {n}": lambda _, n=n: workload(class_weight=n) for n in (0.0, 0.25, 0.75)},
    **{f"window {n} s": lambda _, n=n: workload(window_s=float(n)) for n in (300, 900, 3600)},
    "least samples 500": lambda _: workload(min_samples=500),
    "gaps from 0 s on": lambda _: workload(min_gap_s=0.0),
    "classes by length": lambda _: workload(by_length),
    "classes by reads alone": lambda _: workload(lambda u: ("", 1, min(u.uses, 1))),
    "cake-prefix, LRU's reuse": ByRecency,
    **{
        f"cake-prefix, weight {n}": lambda benefit, n=n: PrefixOf(benefit, n)
        for n in (0.0, 0.25, 1.0)
    },
    **{
        f"cake, heads {n}": lambda benefit, n=n: CakeOf(benefit, head_benefit(n))
        for n in (0.01, 0.5)
    },
    "cake, less the load": lambda benefit: CakeOf(benefit, less_the_load),
    "LeCaR": lambda _: LecarPolicy([new_policy("lru"), new_policy("lfu")]),
    "LeCaR, workload and cake-prefix": lambda benefit: LecarPolicy(
        [new_policy("workload"), new_policy("cake-prefix", benefit)]
    ),
    **dict.fromkeys(ADMISSIONS, CakePrefixPolicy),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    trace: str
    policy: str  # or a variant, or "belady"
    capacity: int  # of 512-token blocks
    shape: str  # whose costs it decides by; "" where it does not matter


@lru_cache(maxsize=1)
def loaded(path: Path, requests: int) -> Trace:
    trace = read_trace(path)
    return Trace(trace.block_tokens, trace.requests[:requests]) if requests else trace


def run_cell(cell: Cell, folder: Path, requests: int) -> dict[str, Any]:
    """One row of the result."""
    file, scale = TRACES[cell.trace]
    trace = loaded(folder / file, requests)
    capacity = cell.capacity * scale
    clocks = [SavedTime(shape, trace.block_tokens) for shape in SHAPES.values()]
    benefit = SHAPES[cell.shape or "8b"].benefit(trace.block_tokens)
    if cell.policy == "belady":
        policy: EvictionPolicy = BeladyPolicy(trace)
    elif cell.policy in VARIANTS:
        policy = VARIANTS[cell.policy](benefit)
    else:
        policy = new_policy(cell.policy, benefit)
    replay = Replay(
        trace,
        policy,
        capacity,
        clocks=clocks,
        min_benefit_ratio=ADMISSIONS.get(cell.policy, 0.0),
        benefit=benefit,
        head_last=cell.policy != HEAD_FIRST,
    )
    out = replay.run()
    saved = dict(zip(SHAPES, out.saved_s, strict=True))
    row: dict[str, Any] = {
        "trace": cell.trace,
        "policy": cell.policy,
        "capacity": cell.capacity,
        "capacity_blocks": capacity,
        **{name: round(value, 6) for name, value in out.figures().items()},
        "seconds_saved": {
            name: round(seconds, 2) for name, seconds in saved.items() if cell.shape in ("", name)
        },
    }
    if cell.policy == "belady":
        bounds = [seconds_bound(trace, capacity, clock) for clock in clocks]
        row["seconds_bound"] = dict(zip(SHAPES, (round(b, 2) for b in bounds), strict=True))
    return row
