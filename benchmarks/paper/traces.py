"""Section 5.7: budget and bandwidth that change all the time; and 5.8: a burst of others."""

import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper import costs
from benchmarks.paper.costs import CHUNK, K, Setting
from sglang_cake.simulator.machine import Machine, Speed
from sglang_cake.simulator.simulated_server import Policy, Prompt, serve, simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound

TRACES = 200
SETTING = Setting(model="LongAlpaca-7B", gbps=25.0)
PERIOD_S = 0.2  # a bandwidth holds for so long
STEPS = 400  # of the trace, then it begins again
LEAST = 0.02  # of the link; none at all would be no link

BURST = Setting(model="LongAlpaca-7B", gbps=32.0)
SHORTS = 22
SPIKES_S = (0.10, 0.40, 0.70)
DECODED = 8


def fluctuating(seed: int, period_steps: int = 1) -> Machine:
    """Figure 5's machine: budget 0-512 tokens per step, bandwidth 0-25 Gbps, both uniform."""
    draw = random.Random(seed)
    budgets = [draw.randint(0, CHUNK) for _ in range(STEPS)]
    times = tuple(i * PERIOD_S for i in range(STEPS))
    speeds = tuple(max(LEAST, draw.random()) for _ in times)
    return replace(
        costs.machine(SETTING),
        others=lambda step: CHUNK - budgets[step // period_steps % STEPS],
        link=Speed(times, speeds),
    )


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Seconds to the first token on one trace."""

    compute_s: float
    load_s: float
    cake_s: float
    ideal_s: float
    wasted_share: float

    @property
    def over_ideal(self) -> float:
        return self.cake_s / self.ideal_s

    @property
    def over_single(self) -> float:
        return self.cake_s / min(self.compute_s, self.load_s)


def run_trace(seed: int, period_steps: int = 1, tokens: int = 16 * K) -> TraceResult:
    """All arms and the optimum on the trace of `seed`."""
    machine = fluctuating(seed, period_steps)
    results = [
        simulate_prompt(machine, tokens, chunk_tokens=CHUNK, mode=mode)
        for mode in ("compute", "load", "auto")
    ]
    ideal = ttft_lower_bound(machine, tokens, chunk_tokens=CHUNK)
    wasted = results[2].wasted_blocks * costs.BLOCK / tokens
    return TraceResult(*(result.ttft_s for result in results), ideal.ttft_s, wasted)


def fluctuations(traces: int = TRACES) -> dict[str, Any]:
    """Figure 5: many traces, budgets new at every step and new every 10 steps."""
    found = {}
    for name, period in (("new budget every step", 1), ("new budget every 10 steps", 10)):
        results = [run_trace(seed, period) for seed in range(traces)]
        over = sorted(result.over_ideal for result in results)
        single = sorted(result.over_single for result in results)
        found[name] = {
            "traces": traces,
            "over_ideal_median": round(statistics.median(over), 4),
            "over_ideal_p90": round(over[int(0.9 * traces)], 4),
            "over_ideal_max": round(over[-1], 4),
            "over_single_median": round(statistics.median(single), 4),
            "over_single_max": round(single[-1], 4),
            "wasted_share": round(statistics.mean(r.wasted_share for r in results), 5),
        }
    return found


# ---- section 5.8 ----


def burst(seed: int = 0, stored_mode_tokens: int = 16 * K) -> list[Prompt]:
    """A stored prompt, and 22 prompts of 32 to 448 tokens that nobody has stored, in spikes."""
    draw = random.Random(seed)
    prompts = [Prompt(stored_mode_tokens, new_tokens=DECODED, rid="stored")]
    for number in range(SHORTS):
        arrive_s = SPIKES_S[number * len(SPIKES_S) // SHORTS] + 0.02 * draw.random()
        tokens = int(draw.triangular(32, 448, 96))
        prompts.append(Prompt(tokens, arrive_s, 0, DECODED, f"short-{number}"))
    return prompts


def run_burst(policy: Policy, seed: int = 0) -> dict[str, Any]:
    """One policy: when everything was finished, times to first token, and the steps."""
    server = serve(costs.machine(BURST), burst(seed), chunk_tokens=CHUNK, policy=policy)
    first, *others = server.results
    short_s = sorted(result.ttft_s for result in others)
    return {
        "policy": policy,
        "finish_s": round(max(result.finish_s for result in server.results), 4),
        "stored_ttft_s": round(first.ttft_s, 4),
        "stored_finish_s": round(first.finish_s, 4),
        "short_ttft_mean_s": round(statistics.mean(short_s), 4),
        "short_ttft_max_s": round(short_s[-1], 4),
        "finish_times_s": [round(result.finish_s, 4) for result in server.results],
        "steps": [
            {
                "begin_s": round(step.begin_s, 4),
                "end_s": round(step.end_s, 4),
                "decodes": step.decodes,
                "plain_tokens": step.plain_tokens,
                "stored_tokens": step.stored_tokens,
            }
            for step in server.steps
        ],
    }


def bursts(seeds: int = 50) -> dict[str, Any]:
    """Section 5.8 under both policies, and how much that varies with the draw."""
    one = {policy: run_burst(policy) for policy in ("fcfs", "adaptive")}
    gains = []
    for seed in range(seeds):
        runs = [run_burst(policy, seed) for policy in ("fcfs", "adaptive")]
        gains.append(runs[0]["finish_s"] / runs[1]["finish_s"])
    gains.sort()
    return {
        "runs": one,
        "gain": round(one["fcfs"]["finish_s"] / one["adaptive"]["finish_s"], 3),
        "gain_median": round(statistics.median(gains), 3),
        "gain_min": round(gains[0], 3),
        "gain_max": round(gains[-1], 3),
        "seeds": seeds,
    }
