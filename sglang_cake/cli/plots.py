"""Plots of one request over time, and of the time to first token by prompt length.

matplotlib is imported where it is used: the package does not depend on it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.demo.event_trace import RequestTrace

# Colours of computed KV, of loaded KV, and of the point where they meet.
COMPUTE = "#1f77b4"
LOAD = "#e8720c"
MEET = "#2a8a2a"
_DASHED = {"lw": 1.3, "ls": (0, (5, 3)), "alpha": 0.75}
_WHITE_BOX = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 2}


def plot_meet(
    both: RequestTrace, compute: RequestTrace, load: RequestTrace, title: str, out: Path
) -> list[Path]:
    """Write `out`.svg and `out`.png, and return both paths.

    The plot has `both` in full, and as dashed lines the requests that only computed or only loaded
    the same prompt.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    plane, timeline = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1.1])
    _plot_single_arms(plane, compute, load)
    _plot_spans(plane, both)
    _plot_meets(plane, both)
    _plot_timeline(timeline, both)
    figure.suptitle(title, fontsize=12.5, fontweight="bold")
    timeline.set_xlim(0, max(both.ttft_s, compute.ttft_s, load.ttft_s) * 1.02)
    for axes in (plane, timeline):
        axes.axvline(both.ttft_s, color="black", lw=1.2, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
    paths = [out.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in paths:
        figure.savefig(path, dpi=140)
    return paths


def plot_ttft(prompts: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a plot of the time to first token by prompt length, one line per arm.

    Args:
        prompts: rows with `tokens`, and seconds under `compute`, `load`, `cake` and `optimum`.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        "compute": {"label": "compute", "color": COMPUTE, "marker": "o"},
        "load": {"label": "load", "color": LOAD, "marker": "o"},
        "cake": {"label": "Cake", "color": MEET, "marker": "o"},
        "optimum": {"label": "optimum", "color": "black", "ls": ":"},
    }
    rows = sorted(prompts, key=lambda row: int(row["tokens"]))
    tokens = [row["tokens"] for row in rows]
    for name, style in styles.items():
        axes.plot(tokens, [row[name] for row in rows], **style)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--picture {path}: {error.strerror}") from None


def _plot_spans(axes: Any, trace: RequestTrace) -> None:
    """Position in the prompt over time, coloured from when the KV of a token is present."""
    zero_s = trace.arrive_s
    ttft_s = trace.ttft_s
    for step in trace.steps:
        begin_s = step.begin_s - zero_s
        end_s = step.end_s - zero_s
        corners = [
            (begin_s, step.start),
            (end_s, step.stop),
            (ttft_s, step.stop),
            (ttft_s, step.start),
        ]
        axes.fill(*zip(*corners, strict=True), color=COMPUTE, alpha=0.28, lw=0)
    size = trace.block_tokens
    for load in trace.loads:
        land_s = load.land_s - zero_s
        bars = [(land_s, max(0.0, ttft_s - land_s))]
        axes.broken_barh(bars, (load.block * size, size), color=LOAD, alpha=0.28, lw=0)
    axes.plot(*zip(*_front_line(trace), strict=True), color=COMPUTE, lw=2.4)
    island = _island_line(trace)
    if island:
        axes.plot(*zip(*island, strict=True), color=LOAD, lw=2.4, drawstyle="steps-post")
    text = {"ha": "left", "fontsize": 13, "fontweight": "bold"}
    axes.text(
        0.12 * ttft_s, 0.03 * trace.prompt_tokens, "computed", color=COMPUTE, va="bottom", **text
    )
    axes.text(0.45 * ttft_s, 0.95 * trace.stored_tokens, "loaded", color=LOAD, va="top", **text)
    axes.plot([ttft_s], [trace.prompt_tokens], "*", color="black", ms=14, clip_on=False, zorder=5)
    axes.annotate(
        f"first token: {ttft_s:.2f} s",
        (ttft_s, trace.prompt_tokens),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
        bbox=_WHITE_BOX,
    )
    axes.set_ylim(0, trace.prompt_tokens * 1.04)
    axes.set_ylabel("position in the prompt (tokens)")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _plot_meets(axes: Any, trace: RequestTrace) -> None:
    """An arrow for each jump of the front. The largest jump has a label."""
    for attach in trace.attaches:
        at_s = attach.at_s - trace.arrive_s
        arrow = {"arrowstyle": "-|>", "color": MEET, "lw": 2.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(at_s, attach.stop), xytext=(at_s, attach.start), arrowprops=arrow)
    if not trace.attaches:
        return
    widest = max(trace.attaches, key=lambda attach: attach.stop - attach.start)
    at_s = widest.at_s - trace.arrive_s
    axes.plot([at_s], [widest.start], "o", color=MEET, ms=9, zorder=5)
    axes.annotate(
        f"they meet at token {widest.start:,} after {at_s:.2f} s:\n"
        f"the {widest.stop - widest.start:,} loaded tokens join at once",
        (trace.ttft_s, widest.start),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        color=MEET,
        fontweight="bold",
        bbox=_WHITE_BOX,
    )


def _plot_single_arms(axes: Any, compute: RequestTrace, load: RequestTrace) -> None:
    """The request that only computed and the one that only loaded, until their first tokens."""
    axes.plot(*zip(*_front_line(compute), strict=True), color=COMPUTE, **_DASHED)
    island = _island_line(load)
    if island:
        axes.plot(*zip(*island, strict=True), color=LOAD, **_DASHED)
    text = {"ha": "right", "bbox": _WHITE_BOX}
    label = f"computing only: {compute.ttft_s:.2f} s"
    top = 0.63 * compute.prompt_tokens
    axes.text(0.99 * compute.ttft_s, top, label, color=COMPUTE, va="center", **text)
    label = f"loading only: {load.ttft_s:.2f} s"
    axes.text(0.99 * load.ttft_s, 0.2 * load.prompt_tokens, label, color=LOAD, **text)


def _plot_timeline(axes: Any, trace: RequestTrace) -> None:
    """Use of device and link: a bar per computed step, and a bar per block read."""
    zero_s = trace.arrive_s
    steps = [(step.begin_s - zero_s, step.end_s - step.begin_s) for step in trace.steps]
    reads = [(load.begin_s - zero_s, load.land_s - load.begin_s) for load in trace.loads]
    axes.broken_barh(steps, (1.1, 0.8), color=COMPUTE, edgecolor="white", lw=0.6)
    axes.broken_barh(reads, (0.1, 0.8), color=LOAD, alpha=0.8, edgecolor="white", lw=0.6)
    axes.set_yticks([1.5, 0.5], [f"compute\n({len(steps)} steps)", f"load\n({len(reads)} blocks)"])
    axes.set_ylim(0, 2)
    axes.set_xlabel("time since the request arrived (s)")


def _front_line(trace: RequestTrace) -> list[tuple[float, float]]:
    """(seconds since arrival, token) of the front, which rises in steps and jumps at attaches."""
    corners: list[tuple[float, float]] = [(0.0, 0.0)]
    for step in trace.steps:
        corners.append((step.begin_s - trace.arrive_s, step.start))
        corners.append((step.end_s - trace.arrive_s, step.stop))
    return corners


def _island_line(trace: RequestTrace) -> list[tuple[float, float]]:
    """(seconds since arrival, lowest loaded token) until the last island is attached."""
    landed = sorted((load.land_s, load.block) for load in trace.loads)
    if not landed:
        return []
    lowest = float(trace.stored_tokens)
    corners = [(0.0, lowest)]
    for land_s, block in landed:
        lowest = min(lowest, float(block * trace.block_tokens))
        corners.append((land_s - trace.arrive_s, lowest))
    if trace.attaches:
        corners.append((trace.attaches[-1].at_s - trace.arrive_s, lowest))
    return corners
