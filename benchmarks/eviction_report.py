"""reports/eviction-tables.md, and pictures for docs/eviction.md, from the result of bench_eviction.

python -m benchmarks.eviction_report [--result FILE]
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.eviction_cells import CAPACITIES, TRACES, VARIANTS
from benchmarks.facts import REPORTS, RESULTS, ROOT
from sglang_cake.simulator.eviction_replay import SHAPES
from sglang_cake.stores.eviction import POLICIES

Row = dict[str, Any]
FIGURES: dict[str, tuple[str, Callable[[Row], float]]] = {
    "hits": ("Hit ratio, %", lambda row: 100 * row["hit_ratio"]),
    "second half": ("Hit ratio of the second half, %", lambda r: 100 * r["second_half_hit_ratio"]),
    "islands": ("Resident blocks of all references, %", lambda r: 100 * r["island_hit_ratio"]),
}
COLOURS = {"lru": "0.4", "workload": "C0", "cake-prefix": "C3", "cake": "C1", "gdfs": "C2"}


class Results:
    """Rows of one part, found by what they are of."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(r["trace"], r["policy"], r["capacity"], s): r for r in rows for s in _of(r)}

    def row(self, trace: str, policy: str, capacity: int, shape: str) -> Row | None:
        return self._rows.get((trace, policy, capacity, shape))


def _of(row: Row) -> list[str]:
    return list(row["seconds_saved"])


def tables(results: Results) -> Iterable[str]:
    for trace in TRACES:
        yield f"\n### {trace}\n"
        for heading, figure in FIGURES.values():
            yield from table(results, trace, heading, figure, "8b")
        for shape in SHAPES:
            seconds = partial(seconds_saved, shape)
            yield from table(results, trace, f"Seconds saved, {shape}", seconds, shape)
        yield from table(results, trace, "Hits, % of the offline optimum's", share(results), "8b")


def seconds_saved(shape: str, row: Row) -> float:
    return float(row["seconds_saved"][shape])


def share(results: Results) -> Callable[[Row], float]:
    def of(row: Row) -> float:
        best = results.row(row["trace"], "belady", row["capacity"], "8b")
        return 100 * row["hits"] / best["hits"] if best else float("nan")

    return of


def table(
    results: Results, trace: str, heading: str, figure: Callable[[Row], float], shape: str
) -> Iterable[str]:
    """One of a trace: policies down, capacities across. What was not measured is left out."""
    yield f"\n{heading}:\n"
    yield "| | " + " | ".join(f"{capacity:,}" for capacity in CAPACITIES) + " |"
    yield "|---|" + "---|" * len(CAPACITIES)
    for policy in (*POLICIES, "belady"):
        rows = [results.row(trace, policy, capacity, shape) for capacity in CAPACITIES]
        if any(rows):
            cells = ("–" if row is None else number(figure(row)) for row in rows)
            yield f"| {policy} | " + " | ".join(cells) + " |"
    bounds = [results.row(trace, "belady", capacity, shape) for capacity in CAPACITIES]
    if heading.startswith("Seconds") and any(bounds):
        cells = ("–" if row is None else number(row["seconds_bound"][shape]) for row in bounds)
        yield "| bound | " + " | ".join(cells) + " |"


def number(value: float) -> str:
    if math.isnan(value):  # what it is compared with was not measured
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def plain(rows: Iterable[Row]) -> Iterable[Row]:
    """What the variants are compared with."""
    return (row for row in rows if row["policy"] in ("lru", "cake-prefix"))


def variants(results: Results) -> Iterable[str]:
    """Hit ratio and seconds of every variant, at the capacities they were run at."""
    places = [(t, c) for t in ("conversation", "synthetic") for c in (1000, 4000, 16000)]
    yield "\n| | " + " | ".join(f"{trace} {capacity:,}" for trace, capacity in places) + " |"
    yield "|---|" + "---|" * len(places)
    for name in ("lru", *VARIANTS, "cake-prefix"):
        rows = [results.row(trace, name, capacity, "8b") for trace, capacity in places]
        if any(rows):
            cells = ("–" if row is None else outcome(row) for row in rows)
            yield f"| {name} | " + " | ".join(cells) + " |"


def outcome(row: Row) -> str:
    return f"{100 * row['hit_ratio']:.2f} ({row['seconds_saved']['8b']:,.0f})"


def writes(results: Results) -> Iterable[str]:
    """What admission saves of the disk."""
    names = ["cake-prefix", *(name for name in VARIANTS if "admission" in name)]
    yield "\n| admission, trace, capacity | hit ratio | seconds | written | write amplification |"
    yield "|---|---|---|---|---|"
    for name in names:
        short = "off" if name == "cake-prefix" else name.rpartition(" ")[2]
        for trace in ("conversation", "synthetic"):
            for capacity in (1000, 4000, 16000):
                row = results.row(trace, name, capacity, "8b")
                if row:
                    yield (
                        f"| {short}, {trace}, {capacity:,} "
                        f"| {100 * row['hit_ratio']:.2f} | {row['seconds_saved']['8b']:,.0f} "
                        f"| {row['written_blocks']:,} | {row['write_amplification']:.2f} |"
                    )


def totals(results: Results) -> Iterable[str]:
    """Seconds over all capacities; worst hit ratio beside LRU's."""
    yield "\n| trace | policy | seconds, 8b | seconds, 70b | worst hit ratio beside LRU, points |"
    yield "|---|---|---|---|---|"
    for trace in TRACES:
        for policy in POLICIES:
            sums, worst = [], float("inf")
            for shape in SHAPES:
                rows = [results.row(trace, policy, c, shape) for c in CAPACITIES]
                whole = all(rows)
                sums.append(
                    f"{sum(r['seconds_saved'][shape] for r in rows if r):,.0f}" if whole else "–"
                )
                for row in filter(None, rows):
                    lru = results.row(trace, "lru", row["capacity"], shape)
                    if lru:
                        worst = min(worst, 100 * (row["hit_ratio"] - lru["hit_ratio"]))
            if worst < float("inf"):
                yield f"| {trace} | {policy} | {sums[0]} | {sums[1]} | {worst:+.2f} |"


def pace(rows: Iterable[Row]) -> Iterable[str]:
    yield "\n| policy | queues | µs, policy alone, a new instant each | µs, in the store's books |"
    yield "|---|---|---|---|"
    for row in rows:
        alone, books = row["us_per_eviction_policy"], row["us_per_eviction_store"]
        yield f"| {row['policy']} | {row['lanes']} | {alone:.1f} | {books:.0f} |"


def draw(results: Results, folder: Path) -> None:
    """Beside LRU: hit ratio and seconds saved, by capacity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "cake"
    for name, ylabel, of in (
        ("hits", "hit ratio beside LRU's, points", lambda row: 100 * row["hit_ratio"]),
        ("seconds", "seconds saved beside LRU's, 8b", lambda row: row["seconds_saved"]["8b"]),
    ):
        figure, axes = plt.subplots(1, len(TRACES), figsize=(12, 3.6))
        for trace, axis in zip(TRACES, axes, strict=True):
            for policy, colour in COLOURS.items():
                if name == "hits" and policy == "cake":
                    continue  # far below: it keeps islands
                points = []
                for capacity in CAPACITIES:
                    row = results.row(trace, policy, capacity, "8b")
                    lru = results.row(trace, "lru", capacity, "8b")
                    if row and lru:
                        points.append((capacity, of(row) - of(lru)))
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=colour, label=policy, ms=3)
            axis.set(xscale="log", title=trace, xlabel="capacity, blocks of 512 tokens")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(ylabel)
        axes[0].legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(folder / f"eviction-{name}.svg", metadata={"Date": None})
        plt.close(figure)


HEAD = """# Eviction: the tables

Made by `python -m benchmarks.eviction_report` from `benchmarks/results/eviction.json`, measured at
{commits}. [eviction.md](../../docs/eviction.md) says what the words mean. A dash was
not measured. Capacities are blocks of 512 tokens, 32 times as many of the
16-token blocks of A-like.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--result", type=Path, default=RESULTS / "eviction.json")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    replay = Results(result.get("replay", []))
    parts = Results([*result.get("parts", []), *plain(result.get("replay", []))])
    measured = [*result.get("replay", []), *result.get("parts", [])]
    commits = sorted({row["commit"] for row in measured})
    lines = [HEAD.format(commits=" and ".join(commits)), "## In all", *totals(replay)]
    lines += ["\n## Every policy and capacity", *tables(replay)]
    lines += ["\n## Parts: hit ratio (seconds saved, 8b)", *variants(parts)]
    lines += ["\n## Admission", *writes(parts), "\n## An eviction", *pace(result.get("pace", []))]
    (REPORTS / "eviction-tables.md").write_text("\n".join(lines) + "\n")
    draw(replay, ROOT / "docs" / "img")


if __name__ == "__main__":
    main()
