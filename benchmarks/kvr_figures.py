"""Figures 8 and 9 of KV-Runahead, and the chain at work, as numbers and as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import facts
from benchmarks.chain_model import ChainLink, Worker, run_chain
from benchmarks.paper.pictures import GREY, draw
from sglang_cake.cli.plots import COMPUTE, LOAD, MEET
from sglang_cake.core.keys import Span
from sglang_cake.runahead.partition import Partition, balanced, even

if TYPE_CHECKING:
    from benchmarks.bench_paper_kvr import Fitted

K = 1024
# Panel: model, workers, bytes/s of a link, thousands of tokens, speedup over TSP as printed.
PANELS: dict[str, tuple[str, int, float, tuple[int, ...], str]] = {
    "8a": ("Llama 7B", 2, 300e9, (4, 8, 12, 16), "TSP is out of memory at 16k"),
    "8b": ("Llama 7B", 4, 300e9, (4, 8, 12, 16), "1.42 at 12k"),
    "8c": ("Llama 7B", 8, 300e9, (4, 8, 12, 16), "1.41 at 16k"),
    "8e": ("Llama 7B", 2, 10e9, (4, 8, 12, 16), "1.79 at 8k, or 1.55"),
    "8f": ("Llama 7B", 4, 10e9, (4, 8, 12, 16), "1.57 at 16k, or 1.79 at 12k"),
    "9a": ("Falcon 7B", 2, 300e9, (1, 2, 4, 8), "1.26 at 4k"),
    "9b": ("Falcon 7B", 4, 300e9, (1, 2, 4, 8), "1.46 at 8k"),
    "9c": ("Falcon 7B", 8, 300e9, (1, 2, 4, 8), "1.63 at 8k"),
}
# The picture of the chain: few layers and a slow link, so that what waits for what can be seen.
SHOWN = Worker(layers=6, token_s=40e-6, pair_s=4e-9, causal=True)
SHOWN_LINK, SHOWN_KV_BYTES, SHOWN_TOKENS, SHOWN_WORKERS = ChainLink(6e9), 131_072.0, 16 * K, 4


def panels(models: "dict[str, Fitted]") -> dict[str, dict[str, Any]]:
    """Times to first token over the length of the prompt: one GPU, TSP, KVR-E and KVR-S."""
    return {name: _panel(models[model], *rest) for name, (model, *rest) in PANELS.items()}


def _panel(
    fitted: "Fitted", workers: int, bytes_per_s: float, ktokens: tuple[int, ...], printed: str
) -> dict[str, Any]:
    link, rows = fitted.link(bytes_per_s), []
    for k in ktokens:
        tsp_s = fitted.tsp(k * K, workers, bytes_per_s)
        searched_s = fitted.search(k * K, workers, link).ttft_s
        rows.append(
            {
                "ktokens": k,
                "one_s": round(fitted.worker.step_s(0, k * K), 4),
                "tsp_s": round(tsp_s, 4),
                "kvr_e_s": round(fitted.chain(even(Span(0, k * K), workers), link), 4),
                "kvr_s_s": round(searched_s, 4),
                "speedup": round(tsp_s / searched_s, 3),
            }
        )
    return {"workers": workers, "bytes_per_s": bytes_per_s, "printed": printed, "rows": rows}


def pictures(result: dict[str, dict[str, Any]]) -> list[Path]:
    """Write the pictures of the report and of docs/runahead.md."""
    return [
        draw(
            lambda figure: _curves(figure, result),
            facts.REPORTS / "img" / "runahead-figures.svg",
            (11, 6),
        ),
        draw(_chains, facts.ROOT / "docs" / "img" / "runahead-chain.svg", (11, 6.4)),
    ]


def _curves(figure: Any, result: dict[str, dict[str, Any]]) -> None:
    arms = {"one_s": ("one GPU", GREY), "tsp_s": ("TSP", LOAD), "kvr_e_s": ("KVR-E", "#7fb3d9")}
    arms["kvr_s_s"] = ("KVR-S", COMPUTE)
    for axes, (name, panel) in zip(figure.subplots(2, 4).flat, result.items(), strict=True):
        at = [row["ktokens"] for row in panel["rows"]]
        for arm, (label, colour) in arms.items():
            axes.plot(at, [row[arm] for row in panel["rows"]], "o-", color=colour, label=label)
        rate = f"{panel['bytes_per_s'] / 1e9:.0f} GB/s"
        axes.set_title(f"{name}: {panel['workers']} workers, {rate}", fontsize=10)
        axes.set_ylim(0)
        axes.set_xticks(at, [f"{k}k" for k in at])
    figure.axes[0].set_ylabel("time to first token, s")
    figure.axes[0].legend(frameon=False)


def _chains(figure: Any) -> None:
    span = Span(0, SHOWN_TOKENS)
    plans = {
        "even": even(span, SHOWN_WORKERS),
        "balanced (the closed form)": balanced(span, SHOWN_WORKERS, SHOWN.step_s, page_tokens=16),
    }
    lanes = figure.subplots(len(plans), 1, sharex=True)
    for axes, (name, plan) in zip(lanes, plans.items(), strict=True):
        ttft_s = _chain(axes, plan)
        axes.set_title(f"{name}: first token after {ttft_s:.2f} s", fontsize=10, loc="left")
    lanes[-1].set_xlabel("s")
    lanes[0].legend(frameon=False, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.16))


def _chain(axes: Any, plan: Partition) -> float:
    """Two lanes a worker: what it does, and below it what its link carries."""
    times = run_chain([plan], SHOWN, SHOWN_LINK, SHOWN_KV_BYTES)
    for j in range(SHOWN_WORKERS):
        for layer in range(SHOWN.layers):
            began, own, resumed, done = (
                float(each[j, layer, 0])
                for each in (times.started, times.projected, times.resumed, times.done)
            )
            axes.broken_barh([(began, own - began), (resumed, done - resumed)], (j - 0.3, 0.4),
                             color=COMPUTE, edgecolor="white", lw=0.5)  # fmt: skip
            axes.broken_barh([(own, resumed - own)], (j - 0.3, 0.4), color="#dddddd")
            if j + 1 < SHOWN_WORKERS:
                sent, there = float(times.sent[j, layer, 0]), float(times.received[j + 1, layer, 0])
                axes.broken_barh([(sent, there - sent)], (j + 0.18, 0.14),
                                 color=LOAD, edgecolor="white", lw=0.5)  # fmt: skip
    for colour, label in ((COMPUTE, "computes"), ("#dddddd", "waits"), (LOAD, "its link sends")):
        axes.broken_barh([], (0, 0), color=colour, label=label)
    ttft_s = float(times.ttft_s[0])
    axes.axvline(ttft_s, color=MEET, ls=":")
    labels = [f"worker {j}\n{s.tokens:,} tokens" for j, s in enumerate(plan.spans)]
    axes.set_yticks(range(SHOWN_WORKERS), labels)
    axes.invert_yaxis()
    return ttft_s
