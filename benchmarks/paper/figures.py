"""What the figures of both papers show, as numbers; `pictures` draws them.

Figures are named by the ICML version; the anonymous version's Figures 2, 3 and 7 show the same as
ICML's 3, 4 and 7, its Figure 6 is a part of its Figure 8.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks.paper import codecs, costs, traces
from benchmarks.paper.costs import BLOCK, CHUNK, PRINTED, K, Setting
from sglang_cake.loading.meet import Meet
from sglang_cake.loading.planner import LoadProgress, next_step
from sglang_cake.simulator.machine import Knowledge
from sglang_cake.simulator.simulated_server import simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound

MODEL_7B = "LongAlpaca-7B"
MEDIA = {  # Gbps; Table 2
    "Google Cloud standard egress": 7.0,
    "Google Cloud tier-1 egress": 25.0,
    "Lambda SSD": 32.0,
    "Samsung 980 Pro SSD": 56.0,
    "InfiniBand (RoCE)": 100.0,
}
GPUS = ("A100", "H100", "2xA100")
SMALLER = {"raw": 1.0, "8 bit": 2.0, "CacheGen": 8.6}  # by how much, as the paper says


def figure3() -> dict[str, Any]:
    """Bytes of KV per second: computed, and loaded. 32k tokens, LongAlpaca-7B, chunk 512."""
    setting = Setting(model=MODEL_7B, tokens=32 * K)
    found = {}
    for gpu in GPUS:
        here = replace(setting, hardware=gpu)
        result = simulate_prompt(
            costs.machine(here), here.tokens, chunk_tokens=CHUNK, mode="compute"
        )
        found[f"compute, {gpu}"] = here.tokens * here.token_bytes / result.ttft_s / 1e9
    for medium, gbps in MEDIA.items():
        here = replace(setting, gbps=gbps)
        found[f"load, {medium}"] = here.tokens * here.token_bytes / costs.io_s(here) / 1e9
    rounded = {name: round(rate, 2) for name, rate in found.items()}
    return {"title": "Figure 3: KV computed and loaded, GB/s", "gb_per_s": rounded}


def figure4() -> dict[str, Any]:
    """Seconds of each chunk of a 32k prompt: computed, and loaded."""
    chunks = 32 * K // CHUNK
    computed = {}
    for gpu in GPUS:
        cost = costs.prefill_cost(Setting(hardware=gpu, model=MODEL_7B))
        computed[gpu] = [round(cost.step_s(i * CHUNK, (i + 1) * CHUNK), 5) for i in range(chunks)]
    loaded = {
        f"{gbps:g} Gbps": round(
            costs.machine(Setting(model=MODEL_7B, gbps=gbps)).load.block_s * CHUNK / BLOCK, 5
        )
        for gbps in (7.0, 32.0, 100.0)
    }
    title = "Figure 4: time of a chunk of 512 tokens by its index"
    return {"title": title, "compute_s": computed, "load_s": loaded}


def figure5() -> dict[str, Any]:
    """One prompt on one trace, in full; and many traces beside the optimum."""
    machine = traces.fluctuating(0)
    result = simulate_prompt(machine, 16 * K, chunk_tokens=CHUNK)
    assert machine.others is not None
    return {
        "title": "Figure 5: budget 0-512 tokens, bandwidth 0-25 Gbps (A100, LongAlpaca-7B, 16k)",
        "statistics": traces.fluctuations(),
        "trace": {
            "ttft_s": round(result.ttft_s, 4),
            "ideal_s": round(ttft_lower_bound(machine, 16 * K, chunk_tokens=CHUNK).ttft_s, 4),
            "laps": [
                (round(x.begin_s, 4), round(x.end_s, 4), x.start, x.stop) for x in result.steps
            ],
            "landings": [(round(when_s, 4), block) for when_s, block in result.landings],
            "link_gbps": [
                (round(i * traces.PERIOD_S, 3), round(25 * v, 2))
                for i, v in enumerate(machine.link.values[:40])
            ],
        },
    }


def figure6() -> dict[str, Any]:
    """Section 5.8: a stored prompt of 16k tokens and a burst of 22 short ones, both policies."""
    printed = PRINTED["sec58_adaptive"]
    return {
        "title": "Figure 6: tokens of each step, default and adaptive scheduling",
        "printed": {
            "default_finish_s": printed["default_finish_s"],
            "adaptive_finish_s": printed["adaptive_finish_s"],
        },
        **traces.bursts(),
    }


def figure7() -> dict[str, Any]:
    """Time of a step with and without Cake: the decisions are timed here, the steps are the fit's.

    16k tokens, chunk 512, LongAlpaca-13B. What `bench_overhead` measures in a server is the whole.
    """
    decisions_ms = 1e3 * statistics.median(_decisions_s())
    found = {}
    for gpu in ("A100", "H100"):
        setting = Setting(hardware=gpu)
        result = simulate_prompt(costs.machine(setting), 16 * K, chunk_tokens=CHUNK, mode="compute")
        plain_ms = [1e3 * (step.end_s - step.begin_s) for step in result.steps]
        found[gpu] = {
            "step_ms": [round(ms, 3) for ms in plain_ms],
            "overhead_share_worst": round(decisions_ms / min(plain_ms), 5),
        }
    title = "Figure 7: time of a step, and what Cake adds"
    return {"title": title, "decisions_ms": round(decisions_ms, 4), "gpus": found}


def _decisions_s() -> list[float]:
    """What the decisions of each step of a prompt take on this machine."""
    setting = Setting(gbps=7.0)
    costs_known = Knowledge.of(costs.machine(setting)).costs
    meet = Meet(
        block_tokens=BLOCK,
        page_tokens=1,
        limit_tokens=setting.tokens - 1,
        prompt_tokens=setting.tokens,
    )
    meet.found([True] * meet.block_count)
    took, last = [], meet.block_count
    while meet.island() is None and meet.front < setting.tokens:
        begun = time.perf_counter()
        step = next_step(
            meet.view(),
            mode="auto",
            chunk_tokens=CHUNK,
            costs=costs_known,
            progress=LoadProgress(any_landed=True),
        )
        meet.claim(step.stop)
        last -= 1
        meet.landed(last)
        took.append(time.perf_counter() - begun)
    return took


# ---- the anonymous version ----


def anonymous5() -> dict[str, Any]:
    """5a: 32k tokens on a whole GPU at 2, 5 and 10 Gbps. 5b: lengths at 10 Gbps."""
    cells = []
    for gpu in ("A100", "H100"):
        for gbps in (2.0, 5.0, 10.0):
            setting = Setting(gpu, gbps=gbps, tokens=32 * K, model=MODEL_7B)
            cells.append({"hardware": gpu, "gbps": gbps, **_arms(setting)})
    lengths = []
    for k in (2, 4, 8, 12, 16, 24, 32):
        setting = Setting("A100", gbps=10.0, tokens=k * K, model=MODEL_7B)
        lengths.append({"ktokens": k, **_arms(setting)})
    return {
        "title": "Anonymous version, Figure 5: a whole GPU, LongAlpaca-7B",
        "printed": PRINTED["headlines_anonymous"],
        "bandwidths": cells,
        "lengths": lengths,
    }


def anonymous8() -> dict[str, Any]:
    """Figures 6 and 8: 9k and 14k tokens, shares of the GPU, bandwidths, smaller KV."""
    cells = []
    for k in (9, 14):
        for util in (0.1, 0.5, 0.9):
            for gbps in (2.0, 5.0, 10.0):
                for name, smaller in SMALLER.items():
                    setting = Setting("A100", util, gbps, k * K, MODEL_7B, bits=16 / smaller)
                    label = {"ktokens": k, "util": util, "gbps": gbps, "kv": name}
                    cells.append({**label, **_arms(setting)})
    return {
        "title": "Anonymous version, Figures 6 and 8: shared GPU and smaller KV, LongAlpaca-7B",
        "printed": PRINTED["headlines_anonymous"],
        "cells": cells,
    }


def _arms(setting: Setting) -> dict[str, float]:
    machine, chunk = costs.machine(setting), setting.chunk
    results = {
        mode: simulate_prompt(machine, setting.tokens, chunk_tokens=chunk, mode=mode)
        for mode in ("compute", "load", "auto")
    }
    cake_s = results["auto"].ttft_s
    ideal_s = ttft_lower_bound(machine, setting.tokens, chunk_tokens=chunk).ttft_s
    return {
        "compute_s": round(results["compute"].ttft_s, 4),
        "load_s": round(results["load"].ttft_s, 4),
        "cake_s": round(cake_s, 4),
        "ideal_s": round(ideal_s, 4),
        "over_ideal": round(cake_s / ideal_s, 4),
        "less_than_compute": round(1 - cake_s / results["compute"].ttft_s, 4),
        "less_than_load": round(1 - cake_s / results["load"].ttft_s, 4),
        "computed_share": round(results["auto"].computed_tokens / setting.tokens, 4),
    }


def comparisons() -> list[tuple[str, str, str]]:
    """What the anonymous version states in its text: (what, printed, ours)."""
    printed = PRINTED["headlines_anonymous"]
    five, eight = anonymous5(), anonymous8()
    rows = []
    for gpu in ("A100", "H100"):
        here = [cell for cell in five["bandwidths"] if cell["hardware"] == gpu]
        saved = [f"{100 * cell['less_than_load']:.1f}" for cell in here]
        low, high = printed["full_gpu_32k_vs_io"][f"{gpu}_pct"]
        rows.append(
            (
                f"32k, {gpu}: less than load-only, 10 to 2 Gbps",
                f"{low}-{high} %",
                f"{saved[-1]}-{saved[0]} %",
            )
        )
        most = max(100 * cell["less_than_compute"] for cell in here)
        rows.append(
            (
                f"32k, {gpu}: less than compute-only, at most",
                f"{printed['full_gpu_32k_vs_compute_max'][f'{gpu}_pct']} %",
                f"{most:.1f} %",
            )
        )
    fourteen = [cell for cell in eight["cells"] if cell["ktokens"] == 14]
    stated = [*codecs.section53(fourteen), *codecs.section54(fourteen)]
    rows += [(f"14k: {what}", printed, ours) for what, printed, ours in stated]
    first, last = five["lengths"][0], five["lengths"][-1]
    falls = 100 * (first["computed_share"] - last["computed_share"])
    rows.append(
        (
            "10 Gbps, A100: share of computed tokens falls from 2k to 32k by",
            "10 %",
            f"{falls:.0f} %",
        )
    )
    ratio = last["less_than_compute"] - first["less_than_compute"]
    rows.append(
        (
            "10 Gbps, A100: T_cake / T_compute falls from 2k to 32k by",
            "15 %",
            f"{100 * ratio:.0f} %",
        )
    )
    return rows


FIGURES = {
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "anonymous5": anonymous5,
    "anonymous8": anonymous8,
}
if codecs.MEASURED.is_file():  # `python -m benchmarks codec` has run
    FIGURES["codecs"] = codecs.codecs
