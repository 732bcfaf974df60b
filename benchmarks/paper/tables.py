"""Tables 3 to 7 of Cake (ICML): each printed cell, simulated on fitted costs, and the optimum."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.paper import costs
from benchmarks.paper.costs import PRINTED, Setting
from sglang_cake.loading.meet import View
from sglang_cake.loading.planner import StepPlan, island_start
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.simulator.simulated_server import simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound

Cell = dict[str, Any]
TABLES = ("table3", "table4", "table5", "table6", "table7")
OVERLAP = "-overlap"  # ends the name of a table with SGLang's overlap loop
OVERLAPPED = tuple(name + OVERLAP for name in TABLES)
TITLES = {
    "table3": "Table 3: hardware, utilisation, bandwidth (LongAlpaca-13B, 16k tokens, chunk 512)",
    "table4": "Table 4: chunk sizes (1xA100, 100 %, 16k tokens, 32 Gbps)",
    "table5": "Table 5: prompt lengths (LongAlpaca-13B, chunk 512)",
    "table6": "Table 6: models (2xA100, 16k tokens, chunk 512)",
    "table7": "Table 7: bits of a stored KV value (2xA100, 100 %, LongAlpaca-13B, 16k tokens)",
}
ROUNDING = 0.005  # of a printed speedup


@cache
def cells(table: str) -> tuple[Cell, ...]:
    """All cells of a table, simulated. `repeat`: an earlier table prints the same."""
    printed = table.removesuffix(OVERLAP)
    plan_s = None if table == printed else PLAN_S
    earlier = {
        Setting.of(cell, name)
        for name in TABLES[: TABLES.index(printed)]
        for cell in PRINTED[name]["cells"]
    }
    found = []
    for cell in PRINTED[printed]["cells"]:
        setting = Setting.of(cell, printed)
        labels = {"repeat": setting in earlier, "fitted_to": costs.fitted_to(setting, printed)}
        found.append({**_cell(setting, cell, plan_s), **labels})
    return tuple(found)


def whole_chunks(view: View, *, chunk_tokens: int, **_: object) -> StepPlan:
    """The rule of the paper (Cake, Algorithm 1): compute chunk after chunk until what is loaded
    from the other end is met."""
    return StepPlan(min(view.front + chunk_tokens, view.prompt_tokens, island_start(view)))


def _cell(setting: Setting, printed: Cell, plan_s: float | None) -> Cell:
    machine = replace(costs.machine(setting), plan_s=plan_s)
    tokens, chunk = setting.tokens, setting.chunk
    compute, load, cake = (
        simulate_prompt(machine, tokens, chunk_tokens=chunk, mode=mode)
        for mode in ("compute", "load", "auto")
    )
    theirs = simulate_prompt(machine, tokens, chunk_tokens=chunk, mode="both", rule=whole_chunks)
    ideal = ttft_lower_bound(machine, tokens, chunk_tokens=chunk)
    # The paper's load baseline ends when everything is loaded, without the step after it. Whether
    # its own times have that step does not say: with it, its rule gives what it prints.
    alone_s = {"io": load.kv_s, "comp": compute.ttft_s}
    cake_s = {"rule": theirs.ttft_s, "our": cake.ttft_s, "ideal": ideal.ttft_s}
    cake_s |= {"rule_kv": theirs.kv_s, "our_kv": cake.kv_s}
    speedups = {
        f"{arm}_{side}": round(alone_s[side] / took_s, 3)
        for arm, took_s in cake_s.items()
        for side in ("io", "comp")
    }
    return {
        **printed,
        "compute_s": round(compute.ttft_s, 4),
        "load_s": round(load.ttft_s, 4),
        "rule_s": round(theirs.ttft_s, 4),
        "cake_s": round(cake.ttft_s, 4),
        "ideal_s": round(ideal.ttft_s, 4),
        "over_ideal": round(cake.ttft_s / ideal.ttft_s, 4),
        "over_single": round(cake.ttft_s / min(compute.ttft_s, load.ttft_s), 4),
        **speedups,
        "steps": len(cake.steps),
        "computed_share": round(cake.computed_tokens / tokens, 3),
        "wasted_blocks": cake.wasted_blocks,
    }


def lower(cell: Cell, arm: str) -> int:
    """How many of an arm's two speedups are below those printed, beyond rounding: 0, 1 or 2."""
    return sum(cell[f"{arm}_{side}"] < cell[side] - ROUNDING for side in ("io", "comp"))


def over_print(cell: Cell, arm: str) -> float:
    """An arm's time over the printed one: the mean of both, which two baselines give."""
    return math.sqrt(cell["io"] / cell[f"{arm}_io"] * cell["comp"] / cell[f"{arm}_comp"])


def beside(chosen: Sequence[Cell], arm: str) -> dict[str, float]:
    """An arm beside what is printed of these cells."""
    over = [over_print(cell, arm) for cell in chosen]
    below = [lower(cell, arm) for cell in chosen]
    return {
        "cells": len(over),
        "mean": round(statistics.mean(over), 4),
        "off": round(statistics.mean(abs(ratio - 1) for ratio in over), 4),
        "both_lower": below.count(2),
        "one_lower": below.count(1),
    }


def summary(chosen: Sequence[Cell]) -> dict[str, float]:
    """Of some cells."""
    over = sorted(cell["over_ideal"] for cell in chosen)
    return {
        "cells": len(over),
        "over_ideal_median": round(statistics.median(over), 4),
        "over_ideal_p90": over[min(len(over) - 1, int(0.9 * len(over)))],
        "over_ideal_max": over[-1],
        "over_single_max": max(cell["over_single"] for cell in chosen),
        "below_printed": sum(lower(cell, "our") > 0 for cell in chosen),
    }


def distinct() -> list[Cell]:
    """The cells of all tables, each once."""
    return [cell for name in TABLES for cell in cells(name) if not cell["repeat"]]


def table(name: str) -> dict[str, Any]:
    """The experiment of one table."""
    found = list(cells(name))
    title = TITLES[name.removesuffix(OVERLAP)]
    if name in OVERLAPPED:
        title += ", with SGLang's overlap loop"
    return {"title": title, "summary": summary(found), "cells": found}


def by_length() -> dict[int, dict[str, float]]:
    """Tables 3 and 5 together, by thousands of tokens."""
    both = [c for name in ("table3", "table5") for c in cells(name) if not c["repeat"]]
    lengths = sorted({cell.get("ktokens", 16) for cell in both})
    return {k: summary([c for c in both if c.get("ktokens", 16) == k]) for k in lengths}


# ---- as Markdown, in the papers' layout ----

LAYOUT = {
    "table3": (("hardware", "util"), "bw_gbps", "{} Gbps"),
    "table4": (("chunk",), "model", "{}"),
    "table5": (("hardware", "bw_gbps", "util"), "ktokens", "{}k tokens"),
    "table6": (("util", "bw_gbps"), "model", "{}"),
    "table7": (("bw_gbps",), "bits", "{} bit"),
}
HEADS = {"hardware": "hardware", "util": "util", "bw_gbps": "Gbps", "chunk": "chunk"}


def markdown(name: str) -> str:
    """Printed io\\comp, then what the paper's rule gives here, then ours, then T/T* in brackets."""
    rows, column, head = LAYOUT[name.removesuffix(OVERLAP)]
    found = cells(name)
    columns = list(dict.fromkeys(cell[column] for cell in found))
    lines = ["| " + " | ".join([*(HEADS[r] for r in rows), *map(head.format, columns)]) + " |"]
    lines.append("|" + "---|" * (len(rows) + len(columns)))
    for key in dict.fromkeys(tuple(cell[row] for row in rows) for cell in found):
        texts = [f"{v:.1%}" if row == "util" else str(v) for row, v in zip(rows, key, strict=True)]
        for value in columns:
            chosen = [
                c for c in found if c[column] == value and tuple(c[row] for row in rows) == key
            ]
            texts.append(_text(chosen[0]) if chosen else "")
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _text(cell: Cell) -> str:
    texts = [f"{cell[f'{arm}io']:.2f}\\\\{cell[f'{arm}comp']:.2f}" for arm in ("", "rule_", "our_")]
    return f"{' → '.join(texts)} [{cell['over_ideal']:.3f}]" + " (!)" * (lower(cell, "our") > 0)
