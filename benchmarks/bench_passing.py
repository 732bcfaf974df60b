"""What later prompts cost and gain that pass a prompt which is being loaded, simulated.

Random streams of 30 prompts on an H100 with Llama-3.1-8B (modelled): 500 to 40,000 tokens, stored
wholly, in part or not at all; chunks of 1,024 to 8,192 tokens; links 3 times as slow to 20 times as
fast as computing. Each number compares with the same server that computes everything, first come,
first served.
"""

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import documents, facts
from benchmarks.command_line import parser_of
from sglang_cake.loading import planner, priority
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.priority import QueueEntry
from sglang_cake.simulator import simulated_server
from sglang_cake.simulator.hardware import GPUS, PLAN_S, prefill_cost
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.shapes import find_shape
from sglang_cake.simulator.simulated_server import Policy, Prompt, PromptResult, serve

MODEL = find_shape("llama-3.1-8b")
BLOCK = 128
PROMPTS = 30
STREAMS = 200
LOOPS = {"step by step": None, "overlap loop": PLAN_S}


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm: see `planner.PASSING_COST`. Attributes: slack: whether prompts have one, which bounds
    how long others pass them."""

    cost: float = planner.PASSING_COST
    slack: bool = True
    policy: Policy = "adaptive"


ARMS = {
    "as built": Arm(),
    "whole steps": Arm(cost=math.inf),
    "shorter steps at any cost": Arm(cost=0.0),
    "no limit on passing": Arm(slack=False),
    "first come, first served": Arm(policy="fcfs"),
}


@dataclass(slots=True)
class Tally:
    """Of the prompts of an arm.

    Attributes:
        late: more than a step and 2 % later than by computing.
        latest_steps: how many steps later than by computing the last of all is.
    """

    stored: list[float] = field(default_factory=list)  # logarithms of the ratio to computing
    new: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)  # of each stream
    late: int = 0
    latest_steps: float = 0.0

    def add(
        self, found: Iterable[PromptResult], computed: Iterable[PromptResult], step_s: float
    ) -> None:
        """The same stream in this arm and with all computed."""
        pairs = list(zip(found, computed, strict=True))
        for a, b in pairs:
            ratios = self.new if a.prompt.stored_blocks == 0 else self.stored
            ratios.append(math.log(a.ttft_s / b.ttft_s))
            self.late += a.ttft_s > 1.02 * b.ttft_s + step_s
            self.latest_steps = max(self.latest_steps, (a.ttft_s - b.ttft_s) / step_s)
        self.mean.append(sum(a.ttft_s for a, _ in pairs) / sum(b.ttft_s for _, b in pairs))

    @property
    def cells(self) -> dict[str, float]:
        return {
            "stored": math.exp(statistics.mean(self.stored)),
            "new": math.exp(statistics.mean(self.new)),
            "mean": statistics.mean(self.mean),
            "late": self.late / (len(self.stored) + len(self.new)),
            "latest_steps": self.latest_steps,
        }


def drawn(seed: int, plan_s: float | None) -> tuple[Machine, int, list[Prompt]]:
    """A machine, the length of its chunks, and a stream of prompts."""
    draw = random.Random(seed)
    chunk = draw.choice((1024, 2048, 8192))
    cost = prefill_cost(MODEL, GPUS["h100"], chunk_tokens=chunk)
    computed_s = cost.span_s(0, 8192, chunk) / (8192 // BLOCK)
    load = LoadCost(10 ** draw.uniform(-3.3, -1.3), computed_s * 10 ** draw.uniform(-1.3, 0.5))
    busy, at_s, prompts = draw.choice((0.3, 0.6, 0.9)), 0.0, []
    for number in range(PROMPTS):
        tokens = int(10 ** draw.uniform(2.7, 4.6))
        stored = draw.choice((None, None, 0, draw.randint(0, tokens // BLOCK)))
        prompts.append(Prompt(tokens, at_s, stored, rid=str(number)))
        alone = draw.random() < 0.6
        gap_s = draw.expovariate(busy / cost.span_s(0, tokens, chunk))
        at_s += gap_s if alone else draw.uniform(0, 0.003)  # a burst
    return Machine(cost, load, plan_s=plan_s), chunk, prompts


def _without_slack(entries: Sequence[QueueEntry]) -> list[int]:
    return priority.order([each._replace(slack_s=math.inf) for each in entries])


def tallies(streams: int, plan_s: float | None) -> dict[str, Tally]:
    """Of each arm, on so many streams."""
    found = {name: Tally() for name in ARMS}
    for seed in range(streams):
        machine, chunk, prompts = drawn(seed, plan_s)
        run = partial(serve, machine, prompts, chunk_tokens=chunk)
        computed = run(mode="compute").results
        step_s = machine.prefill.step_s(32768, 32768 + chunk)
        for name, arm in ARMS.items():
            planner.PASSING_COST = arm.cost
            simulated_server.order = priority.order if arm.slack else _without_slack
            found[name].add(run(policy=arm.policy).results, computed, step_s)
    return found


def main() -> int:
    """Compute, print, and write the table into the document."""
    parser = parser_of("bench_passing", __doc__)
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"default {STREAMS}")
    parser.add_argument("--docs", action="store_true", help="write it into reports/scheduling.md")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "passing.json")
    args = parser.parse_args()
    found = {loop: tallies(args.streams, plan_s) for loop, plan_s in LOOPS.items()}
    cells = {
        loop: {name: each.cells for name, each in arms.items()} for loop, arms in found.items()
    }
    rows = [
        [
            loop,
            name,
            f"{cell['stored']:.2f}",
            f"{cell['new']:.2f}",
            f"{cell['mean']:.2f}",
            f"{cell['late']:.1%}",
            f"{cell['latest_steps']:.1f}",
        ]
        for loop, arms in cells.items()
        for name, cell in arms.items()
    ]
    text = documents.table(["loop", "rule", "stored", "new", "mean", "late", "latest"], rows)
    facts.write(args.out, facts.header("passing", streams=args.streams) | {"cells": cells})
    if args.docs:
        documents.update({"passing": text}, facts.REPORTS / "scheduling.md")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
