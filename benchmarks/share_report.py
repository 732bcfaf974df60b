"""Results of `bench_codec_share` as Markdown and as a picture, beside what the paper states."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.documents import table
from benchmarks.facts import REPORTS, RESULTS
from benchmarks.paper.codecs import section53, section54
from sglang_cake.cli.plots import COMPUTE, LOAD, MEET

DOC = REPORTS / "servers.md"
PICTURE = REPORTS / "img" / "codec-share.svg"
SIMULATED = RESULTS / "paper" / "anonymous8.json"
LIKE_OURS = {"ktokens": 14, "gbps": 10.0}  # of the simulated cells: what is nearest to the link
KV = {"raw": "raw", "int8": "8 bit", "cachegen2": "CacheGen"}  # as the paper calls them
PALEST = 0.35  # of the last codec's bars


def pooled(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells as those of `paper.figures.anonymous8`, the smaller shares last. Computing, and
    Cake with raw KV, are measured beside every codec: all their runs of a share count."""
    found = []
    for cell in sorted(cells, key=lambda cell: -cell["share"]):
        alike = [one for one in cells if one["share"] == cell["share"]]
        name = cell["codec"]

        def median_s(arm: str, among: Sequence[dict[str, Any]] = alike) -> float:
            runs = [one["runs_s"].get(arm, []) for one in among]
            return statistics.median(took_s for some in runs for took_s in some)

        compute_s, load_s, cake_s = (
            median_s(arm) for arm in ("compute", f"{name} load", f"{name} auto")
        )
        found.append(
            {
                "util": cell["share"],
                "gbps": None,  # one link
                "kv": KV.get(name, name),
                "compute_s": compute_s,
                "load_s": load_s,
                "cake_s": cake_s,
                "link_s": cell["link_limit_s"],
                "less_than_compute": 1 - cake_s / compute_s,
                "less_than_load": 1 - cake_s / load_s,
                "of_raw": cell["of_raw"],
            }
        )
    return found


def cells_table(cells: Sequence[dict[str, Any]]) -> str:
    """One row for each share and codec."""
    head = ["share", "KV", "compute s", "load s", "Cake s", "link s", "speedups", "of raw"]
    rows = [
        [
            f"{100 * cell['util']:g} %",
            cell["kv"],
            *(f"{cell[name]:.2f}" for name in ("compute_s", "load_s")),
            f"**{cell['cake_s']:.2f}**",
            f"{cell['link_s']:.2f}",
            f"{cell['load_s'] / cell['cake_s']:.2f}\\\\{cell['compute_s'] / cell['cake_s']:.2f}",
            f"{cell['of_raw']:.2f}",
        ]
        for cell in cells
    ]
    return table(head, rows, right=True)


def claims(cells: Sequence[dict[str, Any]]) -> str:
    """What the paper states, beside the simulation on the link most like ours, and beside us."""
    simulated = [
        cell
        for cell in json.loads(SIMULATED.read_text())["cells"]
        if all(cell[name] == value for name, value in LIKE_OURS.items())
    ]
    rows = [
        [what, printed, theirs, ours]
        for section in (section53, section54)
        for (what, printed, theirs), (_, _, ours) in zip(
            section(simulated), section(cells), strict=True
        )
    ]
    return table(["statement", "printed", "simulated, 10 Gbps", "for real"], rows)


def sections(result: dict[str, Any]) -> dict[str, str]:
    """Marker in the document -> what belongs there. The paper's statements need its codecs, and a
    tenth and nine tenths of the device."""
    cells = pooled(result["cells"])
    found = {"codec-share": cells_table(cells)}
    there = {(cell["util"], cell["kv"]) for cell in cells}
    if {(share, kv) for share in (0.1, 0.9) for kv in KV.values()} <= there:
        found["codec-share-claims"] = claims(cells)
    return found


def picture(figure: Any, result: dict[str, Any]) -> None:
    """The paper's bars: for each share computing, loading by codec, Cake by codec."""
    cells = pooled(result["cells"])
    shares = list(dict.fromkeys(cell["util"] for cell in cells))
    codecs = list(dict.fromkeys(cell["kv"] for cell in cells))
    arms = [("compute", codecs[0], "compute_s", COMPUTE, 1.0)]
    for label, key, colour in (("load", "load_s", LOAD), ("Cake", "cake_s", MEET)):
        for turn, kv in enumerate(codecs):
            shade = 1 - (1 - PALEST) * turn / max(1, len(codecs) - 1)
            arms.append((f"{label}, {kv}", kv, key, colour, shade))
    axes, width = figure.subplots(), 0.8 / len(arms)
    for number, (label, kv, key, colour, shade) in enumerate(arms):
        at = [i + width * (number - (len(arms) - 1) / 2) for i in range(len(shares))]
        times = [
            next(c[key] for c in cells if (c["util"], c["kv"]) == (share, kv)) for share in shares
        ]
        axes.bar(at, times, width, color=colour, alpha=shade, label=label)
    axes.set_xticks(range(len(shares)), [f"{share:.0%} of the device" for share in shares])
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, s")
    axes.legend(frameon=False, ncols=3, fontsize=8)
