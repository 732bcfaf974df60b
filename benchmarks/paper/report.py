"""The experiments as Markdown, and their places in benchmarks/reports/papers.md."""

from typing import Any

from benchmarks.documents import table
from benchmarks.facts import REPORTS
from benchmarks.paper import figures, tables
from benchmarks.paper.costs import PRINTED

ARMS = {
    "rule": "the paper's rule",
    "our": "ours",
    "ideal": "T\\*",
    "rule_kv": "the paper's rule, without its last step",
    "our_kv": "ours, without its last step",
}
LOWER = ("both_lower", "one_lower")
RED = 10  # a printed speedup above it makes a cell red in the paper (ICML, section 5.2)
DOC = REPORTS / "papers.md"


def overview() -> str:
    """The tables in one."""
    rows = []
    for name in tables.TABLES:
        s = tables.summary(tables.cells(name))
        rows.append([name.replace("table", "Table "), *_numbers(s)])
    for k, s in tables.by_length().items():
        rows.append([f"Tables 3 and 5, {k}k tokens", *_numbers(s)])
    head = ["", "cells", "T/T* median", "p90", "max", "worst of the better single way"]
    return table([*head, "cells with a speedup below the print"], rows)


def _numbers(s: dict[str, Any]) -> list[str]:
    names = ("over_ideal_median", "over_ideal_p90", "over_ideal_max", "over_single_max")
    return [str(s["cells"]), *(f"{s[name]:.3f}" for name in names), str(s["below_printed"])]


def beside_print() -> str:
    """Each arm's time over the printed one, by how the costs came about."""
    rows = []
    every = tables.distinct()
    groups = {
        "all": every,
        "time to compute fitted to that cell alone": [c for c in every if c["fitted_to"] == 1],
        "fitted to it and others": [c for c in every if c["fitted_to"] > 1],
        "fitted to others": [c for c in every if not c["fitted_to"]],
    }
    for group, cells in groups.items():
        for arm, label in ARMS.items():
            if group != "all" and arm.endswith("_kv"):
                continue
            s = tables.beside(cells, arm)
            ratio = [f"{s['mean']:.3f}", f"{s['off']:.1%}"]
            rows.append([group, str(s["cells"]), label, *ratio, *(str(s[k]) for k in LOWER)])
    head = ["cells", "", "arm", "time over print, mean", "off by, mean"]
    return table([*head, "both speedups lower", "one lower"], rows)


def overlap() -> str:
    """Each table without and with SGLang's overlap loop."""
    rows = []
    for name in tables.TABLES:
        both = (tables.cells(name), tables.cells(name + tables.OVERLAP))
        found = [(tables.beside(cells, "our"), tables.summary(cells)) for cells in both]
        numbers = [f"{printed['mean']:.3f}" for printed, _ in found]
        for key in ("over_ideal_median", "over_ideal_max", "over_single_max"):
            numbers += [f"{s[key]:.3f}" for _, s in found]
        rows.append([name.replace("table", "Table "), *numbers])
    names = ("time over print, mean", "T/T* median", "max", "worst of the better single way")
    return table(["", *(text for name in names for text in (name, "with the loop"))], rows)


def averages() -> str:
    """Average speedups: printed, recomputed from the printed cells, ours.

    Without the cells that the paper prints in red and leaves out of its averages (`RED`).
    """
    rows = []
    for name in tables.TABLES:
        cells = [c for c in tables.cells(name) if max(c["io"], c["comp"]) <= RED]
        printed = PRINTED[name].get("paper_average")
        text = f"{printed['io']}, {printed['comp']}" if printed else "-"
        for arm in ("", "rule_", "our_"):
            mean = [sum(c[f"{arm}{side}"] for c in cells) / len(cells) for side in ("io", "comp")]
            text += f" | {mean[0]:.2f}, {mean[1]:.2f}"
        rows.append([name.replace("table", "Table "), *text.split(" | ")])
    head = ["", "paper's text", "mean of its cells", "of its rule here", "of ours"]
    return table(head, rows)


def figure3(result: dict[str, Any]) -> str:
    rows = [[name, f"{rate:.2f}"] for name, rate in result["gb_per_s"].items()]
    return table(["", "GB/s of KV"], rows)


def figure5(result: dict[str, Any]) -> str:
    rows = []
    for name, s in result["statistics"].items():
        over = (s["over_ideal_median"], s["over_ideal_p90"], s["over_ideal_max"])
        single = (s["over_single_median"], s["over_single_max"])
        texts = [f"{v:.3f}" for v in (*over, *single)]
        rows.append([name, str(s["traces"]), *texts, f"{s['wasted_share']:.2%}"])
    head = ["", "traces", "T/T* median", "p90", "max"]
    return table([*head, "of the better single way", "at most", "loaded in vain"], rows)


def figure6(result: dict[str, Any]) -> str:
    rows = []
    for policy, run in result["runs"].items():
        names = ("finish_s", "stored_ttft_s", "short_ttft_mean_s", "short_ttft_max_s")
        rows.append([policy, *(f"{run[name]:.2f}" for name in names)])
    rows.append(["printed, default", f"{result['printed']['default_finish_s']:.2f}", "", "", ""])
    rows.append(["printed, adaptive", f"{result['printed']['adaptive_finish_s']:.2f}", "", "", ""])
    head = ["", "all finished, s", "first token of the stored one", "of the short ones, mean"]
    gain = (
        f"fcfs takes {result['gain']:.2f} times as long as adaptive to finish (printed: 1.26); "
        f"over {result['seeds']} draws {result['gain_min']:.2f} to {result['gain_max']:.2f}."
    )
    return table([*head, "at most"], rows) + "\n\n" + gain


def figure7(result: dict[str, Any]) -> str:
    worst = {gpu: run["overhead_share_worst"] for gpu, run in result["gpus"].items()}
    texts = ", ".join(f"{share:.2%} of the shortest step on {gpu}" for gpu, share in worst.items())
    return f"Decisions: {result['decisions_ms']:.2f} ms a step (median): {texts}."


def anonymous5(result: dict[str, Any]) -> str:
    del result
    return table(
        ["statement", "printed", "simulated"], [list(row) for row in figures.comparisons()]
    )


def codecs(result: dict[str, Any]) -> str:
    """Our codecs on the papers' machine."""
    gbps = list(dict.fromkeys(cell["gbps"] for cell in result["cells"]))
    rows: dict[str, list[str]] = {}
    for cell in result["cells"]:
        if cell["codec"] == "raw":
            rows.setdefault("raw", ["1.00"]).append(f"{cell['cake_s']:.2f}")
            continue
        device, cpu = cell["device"], cell["cpu"]
        text = f"{device['cake_s']:.2f} [{device['ideal_s']:.2f}], CPU {cpu['cake_s']:.2f}"
        if "assumed" in cell:
            text += f" ({cell['assumed']['ideal_s']:.2f})"
        rows.setdefault(cell["codec"], [f"{cell['ratio']:.2f}"]).append(text)
    head = ["codec", "ratio", *(f"{rate:g} Gbps" for rate in gbps)]
    faster = {c["codec"]: c["speed_up"] for c in result["cells"] if "speed_up" in c}
    gains = ", ".join(f"{codec} {gain:.2f}" for codec, gain in faster.items())
    return (
        table(head, [[codec, *cells] for codec, cells in rows.items()])
        + f"\n\nCPU: {result['decoders']} threads, as many as a server decodes with at most. How "
        f"many times as fast as one they are is Amdahl's law on what {result['cores']} cores were "
        f"measured to gain over one: {gains}."
    )


def sections(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Marker in the document -> what belongs there."""
    found = {"overview": overview(), "beside": beside_print(), "averages": averages()}
    printed = (*tables.TABLES, *tables.OVERLAPPED)
    found |= {name: tables.markdown(name) for name in printed if name in results}
    if results.keys() >= set(tables.OVERLAPPED):
        found["overlap"] = overlap()
    makers = (figure3, figure5, figure6, figure7, anonymous5, codecs)
    found |= {m.__name__: m(results[m.__name__]) for m in makers if m.__name__ in results}
    return found
