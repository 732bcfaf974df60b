"""One replay of a trace each: what the processes of bench_eviction share."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.lecar import LecarPolicy
from sglang_cake.sim.offline import BeladyPolicy, seconds_bound
from sglang_cake.sim.replay import Replay
from sglang_cake.sim.traces import Trace, head, read_trace
from sglang_cake.sim.ttft import SHAPES, SavedTime
from sglang_cake.store.eviction import Usage, Worth, new_policy
from sglang_cake.store.eviction.admission import ALL, Admission
from sglang_cake.store.eviction.base import EvictionPolicy
from sglang_cake.store.eviction.cake import PREFIX_WEIGHT, CakePolicy, CakePrefixPolicy
from sglang_cake.store.eviction.reuse import Kind, ReuseModel
from sglang_cake.store.eviction.workload import WorkloadPolicy, kind_of

# File, and blocks of it per 512 tokens: capacities are compared at equal tokens.
TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl.zst", 1),
    "synthetic": ("mooncake_synthetic_trace.jsonl.zst", 1),
    "A-like": ("synthetic_traceA_like_blksz16.jsonl.zst", 32),
}
CAPACITIES = (1000, 2000, 4000, 8000, 16000, 32000, 64000)
BY_SHAPE = ("gdfs", "cake", "cake-prefix")  # decide by cost: one run for each shape
ONE_CLASS: Kind = ("", 1, 0)


def by_turn(usage: Usage) -> Kind:
    """The paper's classes: request type x turn."""
    return kind_of(usage)[0], kind_of(usage)[1], 0


def by_length(usage: Usage) -> Kind:
    """Powers of two of the prompt's blocks instead of turns."""
    return usage.use.workload, usage.use.reach.bit_length(), min(usage.uses, 1)


class WithoutOffset(WorkloadPolicy):
    """`workload` that looks at the probability alone."""

    def value(
        self, lane: tuple[Hashable, ...], usage: Usage, log_reuse: float
    ) -> tuple[float, ...]:
        return (log_reuse,)


def workload(
    classes: Callable[[Usage], Kind] = kind_of,
    *,
    life_s: float = 30.0,
    trust: float = 0.5,
    **model: Any,
) -> EvictionPolicy:
    return WorkloadPolicy(ReuseModel(**model), life_s, classes, trust)


class PrefixOf(CakePrefixPolicy):
    """`cake-prefix` with another weight of the seconds: 0 counts hits alone, 1 seconds alone."""

    def __init__(self, worth: Worth, weight: float) -> None:
        super().__init__(worth)
        self._weight = weight

    def log_worth(self, usage: Usage) -> float:
        return super().log_worth(usage) * self._weight / PREFIX_WEIGHT


class CakeOf(CakePolicy):
    """`cake` with another worth of a block."""

    def __init__(self, worth: Worth, saved_s: Callable[[Worth, Usage], float]) -> None:
        super().__init__(worth)
        self._saved_s = saved_s

    def log_worth(self, usage: Usage) -> float:
        return math.log(max(1e-12, self._saved_s(self.worth, usage)) / max(1, usage.stored_bytes))


def heads_worth(share: float) -> Callable[[Worth, Usage], float]:
    """Blocks left of the meet keep this share of what computing them takes."""

    def saved_s(worth: Worth, usage: Usage) -> float:
        position, reach = usage.use.position, usage.use.reach
        left = position + 1 <= worth.meet(reach)
        return worth.compute_s(position) * (share if left else 1.0)

    return saved_s


def less_the_load(worth: Worth, usage: Usage) -> float:
    """What computing the block takes, less what loading it does."""
    return worth.compute_s(usage.use.position) - worth.load_s


ADMISSIONS = {f"cake-prefix, admission {n}": Admission(n) for n in (0.1, 0.3, 1.0)}
HEAD_FIRST = "workload, head first"  # without the offset: of a request the head is the oldest
VARIANTS: dict[str, Callable[[Worth], EvictionPolicy]] = {
    "one class (is LRU)": lambda worth: workload(lambda usage: ONE_CLASS),
    "distribution alone": lambda worth: workload(by_turn, life_s=1e5, trust=1.0),
    "and life (the paper's)": lambda worth: workload(by_turn, life_s=300.0, trust=1.0),
    "and a short life": lambda worth: workload(by_turn, trust=1.0),
    "and reads": lambda worth: workload(trust=1.0),
    "and half trust (workload)": lambda worth: workload(),
    HEAD_FIRST: lambda worth: WithoutOffset(),
    **{f"life {life} s": lambda worth, n=life: workload(life_s=n) for life in (5, 100, 300, 1000)},
    **{f"trust {n}": lambda worth, n=n: workload(trust=n) for n in (0.0, 0.25, 0.75)},
    **{f"window {n} s": lambda worth, n=n: workload(window_s=float(n)) for n in (300, 900, 3600)},
    "least samples 500": lambda worth: workload(least_samples=500),
    "gaps from 0 s on": lambda worth: workload(shortest_gap_s=0.0),
    "classes by length": lambda worth: workload(by_length),
    "classes by reads alone": lambda worth: workload(lambda u: ("", 1, min(u.uses, 1))),
    "cake-prefix, LRU's reuse": lambda worth: CakePrefixPolicy(worth, trust=0.0),
    **{f"cake-prefix, weight {n}": lambda worth, n=n: PrefixOf(worth, n) for n in (0.0, 0.25, 1.0)},
    **{f"cake, heads {n}": lambda worth, n=n: CakeOf(worth, heads_worth(n)) for n in (0.01, 0.5)},
    "cake, less the load": lambda worth: CakeOf(worth, less_the_load),
    "LeCaR": lambda worth: LecarPolicy([new_policy("lru"), new_policy("lfu")]),
    "LeCaR, workload and cake-prefix": lambda worth: LecarPolicy(
        [new_policy("workload"), new_policy("cake-prefix", worth)]
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
    return head(trace, requests) if requests else trace


def run_cell(cell: Cell, folder: Path, requests: int) -> dict[str, Any]:
    """One row of the result."""
    file, scale = TRACES[cell.trace]
    trace = loaded(folder / file, requests)
    capacity = cell.capacity * scale
    clocks = [SavedTime(shape, trace.block_tokens) for shape in SHAPES.values()]
    worth = SHAPES[cell.shape or "8b"].worth(trace.block_tokens)
    if cell.policy == "belady":
        policy: EvictionPolicy = BeladyPolicy(trace)
    elif cell.policy in VARIANTS:
        policy = VARIANTS[cell.policy](worth)
    else:
        policy = new_policy(cell.policy, worth)
    admission = ADMISSIONS.get(cell.policy, ALL)
    replay = Replay(
        trace,
        policy,
        capacity,
        clocks=clocks,
        admission=admission,
        worth=worth,
        head_last=cell.policy != HEAD_FIRST,
    )
    out = replay.run()
    saved = dict(zip(SHAPES, out.saved_s, strict=True))
    row: dict[str, Any] = {
        "trace": cell.trace,
        "policy": cell.policy,
        "capacity": cell.capacity,
        "capacity_blocks": capacity,
        "refs": out.refs,
        "hits": out.hits,
        "hit_ratio": round(out.hit_ratio, 6),
        "second_half_hit_ratio": round(out.late_hit_ratio, 6),
        "byte_hit_ratio": round(out.byte_hit_ratio, 6),
        "island_hit_ratio": round(out.island_hit_ratio, 6),
        "seconds_saved": {
            name: round(seconds, 2) for name, seconds in saved.items() if cell.shape in ("", name)
        },
        "evictions": out.evictions,
        "written_blocks": out.written,
        "write_amplification": round(out.write_amplification, 4),
        "us_per_eviction": round(out.us_per_eviction, 2),
    }
    if cell.policy == "belady":
        bounds = [seconds_bound(trace, capacity, clock) for clock in clocks]
        row["seconds_bound"] = dict(zip(SHAPES, (round(b, 2) for b in bounds), strict=True))
    return row
