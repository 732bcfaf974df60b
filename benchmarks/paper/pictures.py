"""Draws the experiments; every function takes an experiment's numbers and fills a figure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.paper import tables
from sglang_cake.cli.plots import COMPUTE, LOAD, MEET

GREY = "#888888"
Draw = Callable[[Any, dict[str, Any]], None]


def save(name: str, result: dict[str, Any], folder: Path) -> Path | None:
    """Write the picture of an experiment, if it has one."""
    if name not in PICTURES:
        return None
    return draw(lambda figure: PICTURES[name](figure, result), folder / f"paper-{name}.svg")


def draw(fill: Callable[[Any], None], path: Path, inches: tuple[float, float] = (9.5, 4.2)) -> Path:
    """Write the picture that `fill` makes of an empty figure to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "cake"  # the same numbers give the same file
    figure = plt.figure(figsize=inches, layout="constrained")
    fill(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _tables(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    cells = [cell for table in result["tables"].values() for cell in table["cells"]]
    printed = [cell["over_ideal"] / tables.over_print(cell, "our") for cell in cells]
    ours = [cell["over_ideal"] for cell in cells]
    bins = [0.98 + 0.01 * i for i in range(40)]
    axes.hist(printed, bins=bins, color=GREY, alpha=0.6, label="printed, on the same costs")
    axes.hist(ours, bins=bins, color=MEET, alpha=0.7, label="simulated")
    axes.axvline(1.0, color="black", lw=1)
    axes.set_xlabel("time to first token / clairvoyant optimum")
    axes.set_ylabel(f"cells of Tables 3-7 (of {len(cells)})")
    axes.legend(frameon=False)


def _figure3(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    rates = result["gb_per_s"]
    colours = [COMPUTE if name.startswith("compute") else LOAD for name in rates]
    axes.barh(list(rates), list(rates.values()), color=colours)
    axes.invert_yaxis()
    axes.set_xlabel("KV, GB/s")


def _figure4(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    for gpu, times in result["compute_s"].items():
        axes.plot([1e3 * t for t in times], label=f"compute, {gpu}")
    for name, took_s in result["load_s"].items():
        axes.axhline(1e3 * took_s, color=LOAD, ls=":")
        axes.text(63, 1e3 * took_s, f"load, {name}", color=LOAD, ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("index of the chunk (512 tokens)")
    axes.set_ylabel("ms")
    axes.legend(frameon=False)


def _figure5(figure: Any, result: dict[str, Any]) -> None:
    plane, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    trace = result["trace"]
    for begin, end, start, stop in trace["laps"]:
        plane.plot([begin, end], [start, stop], color=COMPUTE, lw=2)
    landed = [(when_s, 128 * block) for when_s, block in trace["landings"]]
    plane.step(*zip(*landed, strict=True), color=LOAD, lw=2, where="post")
    plane.axvline(trace["ttft_s"], color="black", ls=":")
    plane.axvline(trace["ideal_s"], color=MEET, ls=":")
    plane.text(trace["ideal_s"], 200, "optimum ", color=MEET, ha="right")
    plane.set_ylabel("token")
    lanes.step(*zip(*trace["link_gbps"], strict=True), color=LOAD, where="post")
    lanes.set_ylabel("Gbps", color=LOAD)
    lanes.set_xlabel("s")
    lanes.set_xlim(0, 1.1 * trace["ttft_s"])
    budgets = lanes.twinx()
    budgets.step(
        [begin for begin, *_ in trace["laps"]],
        [stop - start for _, _, start, stop in trace["laps"]],
        color=COMPUTE,
        where="post",
    )
    budgets.set_ylabel("tokens of a step", color=COMPUTE)


def _figure6(figure: Any, result: dict[str, Any]) -> None:
    planes = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, (policy, run) in zip(planes, result["runs"].items(), strict=True):
        bottom = [0.0] * len(run["steps"])
        kinds = (("decodes", GREY), ("plain_tokens", MEET), ("stored_tokens", COMPUTE))
        for kind, colour in kinds:
            values = [step[kind] for step in run["steps"]]
            axes.bar(
                [step["begin_s"] for step in run["steps"]],
                values,
                [step["end_s"] - step["begin_s"] for step in run["steps"]],
                bottom=bottom,
                align="edge",
                color=colour,
                edgecolor="white",
                lw=0.4,
                label=kind.replace("_", " "),
            )
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        axes.axvline(run["finish_s"], color="black", ls=":")
        axes.set_ylabel(f"{policy}\ntokens of a step")
    planes[0].legend(frameon=False, ncols=3, loc="upper right")
    planes[1].set_xlabel("s")


def _figure7(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    for gpu, colour in (("A100", COMPUTE), ("H100", LOAD)):
        plain = result["gpus"][gpu]["step_ms"]
        axes.plot(plain, color=colour, label=f"{gpu}, without Cake")
        added = [ms + result["decisions_ms"] for ms in plain]
        axes.plot(added, "x", color=colour, label=f"{gpu}, with its decisions")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("index of the chunk")
    axes.set_ylabel("ms")
    axes.legend(frameon=False)


def _anonymous5(figure: Any, result: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    cells = result["bandwidths"]
    names = [f"{cell['hardware']}\n{cell['gbps']:g} Gbps" for cell in cells]
    arms = (("compute_s", COMPUTE), ("load_s", LOAD), ("cake_s", MEET), ("ideal_s", "black"))
    for number, (arm, colour) in enumerate(arms):
        at = [i + 0.2 * (number - 1.5) for i in range(len(cells))]
        label = arm.removesuffix("_s")
        left.bar(at, [cell[arm] for cell in cells], 0.2, color=colour, label=label)
    left.set_xticks(range(len(cells)), names, fontsize=8)
    left.set_yscale("log")
    left.set_ylabel("time to first token, s")
    left.legend(frameon=False)
    lengths = [cell["ktokens"] for cell in result["lengths"]]
    share = [100 * cell["computed_share"] for cell in result["lengths"]]
    ratio = [100 * (1 - cell["less_than_compute"]) for cell in result["lengths"]]
    right.plot(lengths, share, "o-", color=COMPUTE, label="tokens computed")
    right.plot(lengths, ratio, "o-", color=MEET, label="time, of compute-only")
    right.set_xlabel("thousand tokens (A100, 10 Gbps)")
    right.set_ylabel("%")
    right.set_ylim(0, 100)
    right.legend(frameon=False)


def _anonymous8(figure: Any, result: dict[str, Any]) -> None:
    planes = figure.subplots(1, 3, sharey=True)
    for axes, util in zip(planes, (0.1, 0.5, 0.9), strict=True):
        here = [c for c in result["cells"] if c["util"] == util and c["ktokens"] == 14]
        for kv, style in (("raw", "-"), ("8 bit", "--"), ("CacheGen", ":")):
            cells = [cell for cell in here if cell["kv"] == kv]
            gbps = [cell["gbps"] for cell in cells]
            axes.plot(gbps, [c["load_s"] for c in cells], style, color=LOAD, label=f"load, {kv}")
            axes.plot(gbps, [c["cake_s"] for c in cells], style, color=MEET, label=f"Cake, {kv}")
        axes.axhline(here[0]["compute_s"], color=COMPUTE, label="compute")
        axes.set_title(f"14k tokens, {util:.0%} of the GPU", fontsize=10)
        axes.set_xlabel("Gbps")
        axes.set_yscale("log")
    planes[0].set_ylabel("time to first token, s")
    planes[2].legend(frameon=False, fontsize=7)


PICTURES: dict[str, Draw] = {
    "tables": _tables,
    "figure3": _figure3,
    "figure4": _figure4,
    "figure5": _figure5,
    "figure6": _figure6,
    "figure7": _figure7,
    "anonymous5": _anonymous5,
    "anonymous8": _anonymous8,
}
