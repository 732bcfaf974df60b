"""Draws one request: the front rising, the loaded blocks coming down, and where they meet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.testing.trace import RequestTrace

COMPUTE = "#1f77b4"
LOAD = "#e8720c"
MEET = "#2a8a2a"
ALONE = {"lw": 1.3, "ls": (0, (5, 3)), "alpha": 0.75}
WHITE_BOX = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 2}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A traced request and the instant of its first token (same clock as the trace)."""

    trace: RequestTrace
    first_token_s: float

    @property
    def end_s(self) -> float:
        """First token, counted from the arrival."""
        return self.first_token_s - self.trace.arrive_s


def draw_meet(both: Drawn, compute: Drawn, load: Drawn, title: str, out: Path) -> list[Path]:
    """Write `out`.svg and `out`.png; returns both paths.

    `both` is drawn in full; the other two, which got the prompt in one way only, as dashed lines.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (plane, lanes) = plt.subplots(
        2, 1, sharex=True, figsize=(11, 6.6), height_ratios=[5, 1.1], layout="constrained"
    )
    _draw_alone(plane, compute, load)
    _draw_spans(plane, both)
    _draw_meets(plane, both)
    _draw_lanes(lanes, both.trace)
    figure.suptitle(title, fontsize=12.5, fontweight="bold")
    lanes.set_xlim(0, max(both.end_s, compute.end_s, load.end_s) * 1.02)
    for axes in (plane, lanes):
        axes.axvline(both.end_s, color="black", lw=1.2, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
    paths = [out.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in paths:
        figure.savefig(path, dpi=140)
    plt.close(figure)
    return paths


def _draw_spans(axes: Any, drawn: Drawn) -> None:
    """Token position over time: coloured once the KV of a token is there."""
    trace, end = drawn.trace, drawn.end_s
    for step in trace.steps:
        begin, done = step.begin_s - trace.arrive_s, step.end_s - trace.arrive_s
        corners = [(begin, step.start), (done, step.stop), (end, step.stop), (end, step.start)]
        axes.fill(*zip(*corners, strict=True), color=COMPUTE, alpha=0.28, lw=0)
    size = trace.block_tokens
    for load in trace.loads:
        begin = load.land_s - trace.arrive_s
        bars = [(begin, max(0.0, end - begin))]
        axes.broken_barh(bars, (load.block * size, size), color=LOAD, alpha=0.28, lw=0)
    axes.plot(*zip(*_front_edge(trace), strict=True), color=COMPUTE, lw=2.4)
    island = _island_edge(trace)
    if island:
        axes.plot(*zip(*island, strict=True), color=LOAD, lw=2.4, drawstyle="steps-post")
    text = {"ha": "left", "fontsize": 13, "fontweight": "bold"}
    axes.text(
        0.12 * end, 0.03 * trace.prompt_tokens, "computed", color=COMPUTE, va="bottom", **text
    )
    axes.text(0.45 * end, 0.95 * trace.stored_tokens, "loaded", color=LOAD, va="top", **text)
    axes.plot([end], [trace.prompt_tokens], "*", color="black", ms=14, clip_on=False, zorder=5)
    axes.annotate(
        f"first token: {end:.2f} s",
        (end, trace.prompt_tokens),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold",
        bbox=WHITE_BOX,
    )
    axes.set_ylim(0, trace.prompt_tokens * 1.04)
    axes.set_ylabel("position in the prompt (tokens)")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_meets(axes: Any, drawn: Drawn) -> None:
    """An arrow for each jump of the front; only the largest is named."""
    zero = drawn.trace.arrive_s
    for attach in drawn.trace.attaches:
        at = attach.at_s - zero
        arrow = {"arrowstyle": "-|>", "color": MEET, "lw": 2.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(at, attach.stop), xytext=(at, attach.start), arrowprops=arrow)
    if not drawn.trace.attaches:
        return
    widest = max(drawn.trace.attaches, key=lambda attach: attach.stop - attach.start)
    axes.plot([widest.at_s - zero], [widest.start], "o", color=MEET, ms=9, zorder=5)
    axes.annotate(
        f"they meet at token {widest.start:,} after {widest.at_s - zero:.2f} s:\n"
        f"the {widest.stop - widest.start:,} loaded tokens join at once",
        (drawn.end_s, widest.start),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        color=MEET,
        fontweight="bold",
        bbox=WHITE_BOX,
    )


def _draw_alone(axes: Any, compute: Drawn, load: Drawn) -> None:
    """The two arms that use one resource, each until its first token."""
    axes.plot(*zip(*_front_edge(compute.trace), strict=True), color=COMPUTE, **ALONE)
    island = _island_edge(load.trace)
    if island:
        axes.plot(*zip(*island, strict=True), color=LOAD, **ALONE)
    text = {"ha": "right", "bbox": WHITE_BOX}
    label = f"computing only: {compute.end_s:.2f} s"
    top = 0.63 * compute.trace.prompt_tokens
    axes.text(0.99 * compute.end_s, top, label, color=COMPUTE, va="center", **text)
    label = f"loading only: {load.end_s:.2f} s"
    axes.text(0.99 * load.end_s, 0.2 * load.trace.prompt_tokens, label, color=LOAD, **text)


def _draw_lanes(axes: Any, trace: RequestTrace) -> None:
    """What each of the two resources did: a bar per computed step, a bar per block read."""
    zero = trace.arrive_s
    steps = [(step.begin_s - zero, step.end_s - step.begin_s) for step in trace.steps]
    reads = [(a.begin_s - zero, a.land_s - a.begin_s) for a in trace.loads]
    axes.broken_barh(steps, (1.1, 0.8), color=COMPUTE, edgecolor="white", lw=0.6)
    axes.broken_barh(reads, (0.1, 0.8), color=LOAD, alpha=0.8, edgecolor="white", lw=0.6)
    axes.set_yticks([1.5, 0.5], [f"compute\n({len(steps)} steps)", f"load\n({len(reads)} blocks)"])
    axes.set_ylim(0, 2)
    axes.set_xlabel("time since the request arrived (s)")


def _front_edge(trace: RequestTrace) -> list[tuple[float, float]]:
    """Corners of the front: it rises through each step and jumps at an attach."""
    zero = trace.arrive_s
    corners: list[tuple[float, float]] = [(0.0, 0.0)]
    for step in trace.steps:
        corners += [(step.begin_s - zero, step.start), (step.end_s - zero, step.stop)]
    return corners


def _island_edge(trace: RequestTrace) -> list[tuple[float, float]]:
    """Lowest token loaded so far, over time, until the last island is attached."""
    landed = sorted((load.land_s, load.block) for load in trace.loads)
    low = float(trace.stored_tokens)
    corners = [(0.0, low)] if landed else []
    for land_s, block in landed:
        low = min(low, float(block * trace.block_tokens))
        corners.append((land_s - trace.arrive_s, low))
    if landed and trace.attaches:
        corners.append((trace.attaches[-1].at_s - trace.arrive_s, low))
    return corners
