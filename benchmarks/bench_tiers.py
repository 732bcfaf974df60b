"""Prompts whose blocks are in several tiers, with the real tiers, loader and coordinator in virtual
time.

Random prompts of 4,000 to 32,000 tokens on an H100 with Llama-3.1-8B (modelled): chunks of 512 to
8,192 tokens, and two or three tiers that are 3 times as slow to 50 times as fast as computing. The
server knows the cost of each tier. The rule `one average cost` predicts all loads of a prompt with
an average block.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from benchmarks import documents, facts
from benchmarks.command_line import parser_of
from benchmarks.harness.virtual_tiers import virtual_tiers
from sglang_cake.integration import step_costs
from sglang_cake.loading.cost_model import PromptCosts, TierLoads
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import Mode, with_loads
from sglang_cake.testing.scheduler_loop import prompt
from sglang_cake.testing.virtual_gpu import (
    BLOCK_TOKENS,
    LLAMA_8B,
    GpuModel,
    VirtualScheduler,
    VirtualStore,
    virtual_scheduler,
)

DRAWS = 60
READS = 4  # at once, of each tier
LAYOUTS = ("parts", "stripes", "random")
RULES = ("as built", "one average cost")


@dataclass(frozen=True)
class Draw:
    """Prompts that come together, with the tier of each of their blocks.

    Attributes:
        speeds: of the tiers, over that of computing, the fastest first.
    """

    model: GpuModel
    speeds: Sequence[float]
    latencies_s: Sequence[float]
    prompts: Sequence[Sequence[int]]

    @classmethod
    def of(cls, seed: int, layout: str, prompts: int) -> "Draw":
        draw = random.Random(f"{seed} {layout} {prompts}")
        model = replace(LLAMA_8B, chunk_tokens=draw.choice((512, 2048, 8192)))
        count = draw.choice((2, 2, 3))
        speeds = sorted((10 ** draw.uniform(-0.5, 1.7) for _ in range(count)), reverse=True)
        latencies_s = sorted(10 ** draw.uniform(-4, -2) for _ in range(count))
        places = []
        for _ in range(prompts):
            blocks = draw.choice((4000, 8000, 16_000, 32_000)) // BLOCK_TOKENS
            order = draw.sample(range(count), count)
            cuts = [draw.random() for _ in range(count - 1)]
            weights = [draw.random() for _ in range(count)]
            stripe = draw.choice((4, 16))
            by_layout = {
                "parts": lambda n, b=blocks, o=order, c=cuts: o[sum(n / b > cut for cut in c)],
                "stripes": lambda n, o=order, s=stripe: o[n // s % len(o)],
                "random": lambda n, w=weights: draw.choices(range(count), w)[0],
            }
            places.append([by_layout[layout](number) for number in range(blocks)])
        return cls(model, speeds, latencies_s, places)

    @property
    def block_compute_s(self) -> float:
        return self.model.prefill.span_s(0, 8192, self.model.chunk_tokens) * BLOCK_TOKENS / 8192

    @contextmanager
    def server(self, mode: Mode) -> Iterator[tuple[VirtualScheduler, list[VirtualStore]]]:
        size_bytes = self.model.layout.block_bytes
        with virtual_scheduler(self.model, link_bytes_per_s=1.0, mode=mode) as loop:
            block_s = [self.block_compute_s / speed for speed in self.speeds]
            stores = [
                VirtualStore(loop.io, size_bytes, size_bytes / each_s, latency_s)
                for each_s, latency_s in zip(block_s, self.latencies_s, strict=True)
            ]
            known = [  # a read occupies its place for its latency, too
                replace(store.cost, block_s=max(each_s, (latency_s + each_s) / READS))
                for store, each_s, latency_s in zip(stores, block_s, self.latencies_s, strict=True)
            ]
            with virtual_tiers(loop, stores, [READS] * len(stores)):
                loop.loader.forget_costs()
                loop.step_costs.recall(replace(self.model.prefill, error=0.02), known)
                loop.io.until(loop.io.now_s)
                yield loop, stores

    def first_tokens_s(self, mode: Mode) -> list[float]:
        with self.server(mode) as (loop, stores):
            arrivals = []
            for number, places in enumerate(self.prompts):
                req = prompt(number, len(places) * BLOCK_TOKENS)
                for key, place in zip(loop.keys(req.origin_input_ids), places, strict=False):
                    stores[place].keys.add(key)
                arrivals.append((number * 0.001, req))
            return [run.ttft_s for run in loop.serve(arrivals)]


def _averaged(costs: PromptCosts, view: View, tiers: TierLoads) -> PromptCosts:
    return replace(with_loads(costs, view, tiers), tiers=None)


def ratios(rule: str, draws: Sequence[Draw]) -> tuple[list[float], int]:
    """The time to the first token of each prompt over that of computing all of them, and how many
    came more than a step and 2 % later."""
    found, late = [], 0
    loads = with_loads if rule == RULES[0] else _averaged
    with mock.patch.object(step_costs, "with_loads", loads):
        for draw in draws:
            step_s = draw.model.prefill.step_s(32_000 - draw.model.chunk_tokens, 32_000)
            computed = draw.first_tokens_s("compute")
            for auto_s, compute_s in zip(draw.first_tokens_s("auto"), computed, strict=True):
                found.append(auto_s / compute_s)
                late += auto_s > 1.02 * compute_s + step_s
    return found, late


def main() -> int:
    """Compute, print, and write the table into the document."""
    parser = parser_of("bench_tiers", __doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of each row; default {DRAWS}")
    parser.add_argument("--docs", action="store_true", help="write it into reports/stores.md")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "tiers.json")
    args = parser.parse_args()
    rows, cells = [], []
    for prompts in (1, 3):
        for layout in LAYOUTS:
            draws = [Draw.of(seed, layout, prompts) for seed in range(args.draws)]
            by_rule = {rule: ratios(rule, draws) for rule in RULES}
            means = {
                rule: math.exp(statistics.mean(map(math.log, found)))
                for rule, (found, _) in by_rule.items()
            }
            late = {rule: count for rule, (_, count) in by_rule.items()}
            built, average = (means[rule] for rule in RULES)
            cells.append({"prompts": prompts, "layout": layout, "means": means, "late": late})
            rows.append(
                [
                    f"{prompts}",
                    layout,
                    f"{built:.3f}",
                    f"{average:.3f}",
                    f"{built / average:.3f}",
                    f"{late[RULES[0]]}, {late[RULES[1]]} of {len(by_rule[RULES[0]][0])}",
                ]
            )
    text = documents.table(
        ["prompts", "blocks of a tier", *RULES, "ratio", "later than computing"], rows
    )
    facts.write(args.out, facts.header("tiers", draws=args.draws) | {"cells": cells})
    if args.docs:
        documents.update({"tiers": text}, facts.REPORTS / "stores.md")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
