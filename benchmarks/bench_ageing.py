"""How fast a waiting prompt should age: mean and longest waits of several rates, simulated.

Stored prompts of 4k to 32k tokens arrive at random moments and share one device and one link. Each
number is a mean over draws of the ratio to SGLang's first come, first served.
"""

import random
import statistics
from pathlib import Path

from benchmarks import documents, facts
from benchmarks.command_line import parser_of
from sglang_cake.loading import priority
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.simulated_server import Policy, Prompt, serve

MACHINE = Machine(PrefillCost(0.01, 1e-4, 1e-9, 1e-4), LoadCost(0.02, 0.015))
CHUNK = 512
SIZES = (4096, 8192, 16384, 32768)
RATES = {"0.1 s": 0.1, "0.2 s": 0.2, "1/3 s": 1 / 3, "0.5 s": 0.5, "1 s": 1.0}
SITUATIONS = {  # prompts, share of the time that they need alone, share of new ones
    "90 % busy": (60, 0.9, 0.0),
    "95 % busy": (60, 0.95, 0.0),
    "90 %, a third new": (80, 0.9, 1 / 3),
    "120 %": (60, 1.2, 0.0),
}
DRAWS = 6


def ttfts(prompts: list[Prompt], policy: Policy) -> list[float]:
    """Seconds from arrival to the first token of each."""
    return [r.ttft_s for r in serve(MACHINE, prompts, chunk_tokens=CHUNK, policy=policy).results]


def drawn(seed: int, count: int, busy: float, new_share: float) -> list[Prompt]:
    """Prompts at random moments; new ones are an eighth as long, and not stored."""
    draw, at_s, found = random.Random(seed), 0.0, []
    mean_s = statistics.mean(ttfts([Prompt(tokens)], "adaptive")[0] for tokens in SIZES)
    for i in range(count):
        new = draw.random() < new_share
        tokens = draw.choice(SIZES) // (8 if new else 1)
        found.append(Prompt(tokens, at_s, 0 if new else None, rid=str(i)))
        at_s += draw.expovariate(busy / mean_s)
    return found


def main() -> int:
    """Compute, print, and write the table into the document."""
    parser = parser_of("bench_ageing", __doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"default {DRAWS}")
    parser.add_argument("--docs", action="store_true", help="write it into reports/scheduling.md")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "ageing.json")
    args = parser.parse_args()
    cells: dict[str, dict[str, dict[str, float]]] = {rate: {} for rate in RATES}
    for situation, (count, busy, new_share) in SITUATIONS.items():
        draws = [drawn(seed, count, busy, new_share) for seed in range(args.draws)]
        first_s = [ttfts(prompts, "fcfs") for prompts in draws]
        for rate, priority.AGEING in RATES.items():
            found_s = [ttfts(prompts, "adaptive") for prompts in draws]
            pairs = list(zip(found_s, first_s, strict=True))
            cells[rate][situation] = {
                "mean": statistics.mean(sum(a) / sum(b) for a, b in pairs),
                "longest": statistics.mean(max(a) / max(b) for a, b in pairs),
            }
            print(f"{situation}, {rate}: {cells[rate][situation]}", flush=True)
    rows = [
        [rate, *(f"{each['mean']:.2f} ({each['longest']:.2f})" for each in row.values())]
        for rate, row in cells.items()
    ]
    text = documents.table(["a second of waiting is worth", *SITUATIONS], rows)
    facts.write(args.out, facts.header("ageing", draws=args.draws) | {"cells": cells})
    if args.docs:
        documents.update({"ageing": text}, facts.REPORTS / "scheduling.md")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
