"""Sections 5.3 and 5.4 of the anonymous version (a shared GPU, smaller KV), and our codecs on the
papers' machine."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.facts import RESULTS
from benchmarks.paper import costs
from benchmarks.paper.costs import BLOCK, CHUNK, PRINTED, Setting
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.simulated_server import simulate_prompt
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound
from sglang_cake.stores.encoded import MAX_THREADS

MEASURED = RESULTS / "codec-speed-cpu.json"
SHAPE = "LongAlpaca-13B, 6 of 40 layers"
GBPS = (7.0, 32.0, 100.0)
Cells = Sequence[dict[str, Any]]
ASSUMED = {"zstd": 0.80, "int8": 0.516, "int4": 0.266, "kvquant3": 0.203}  # share of raw, assumed


def section53(cells: Cells) -> list[tuple[str, str, str]]:
    """What section 5.3, and 5.4 of a tenth of the GPU, state: (what, printed, ours).

    Args: cells: of one length, as those of `figures.anonymous8`.
    """
    printed = PRINTED["headlines_anonymous"]
    raw = [cell for cell in cells if cell["kv"] == "raw"]
    slow, fast = (next(c for c in raw if c["util"] == util) for util in (0.1, 0.9))
    ratio = slow["compute_s"] / fast["compute_s"]
    more_s = slow["compute_s"] - fast["compute_s"]
    tenth = [c for c in cells if (c["util"], c["kv"]) == (0.1, "CacheGen")]
    return [
        (
            "computing with 10 % of the GPU instead of 90 %",
            f"{printed['gpu90_to_10_slowdown_x']}x, +{printed['gpu90_to_10_extra_s']} s",
            f"{ratio:.2f}x, +{more_s:.2f} s",
        ),
        (
            "shared GPU, less than compute-only",
            _range(printed["shared_gpu_vs_compute_pct"]),
            _span(raw, "less_than_compute"),
        ),
        (
            "shared GPU, less than load-only",
            _range(printed["shared_gpu_vs_io_pct"]),
            _span(raw, "less_than_load"),
        ),
        (
            "Cake with CacheGen on 10 % of the GPU, faster than computing, at most",
            f"{printed['cake_cachegen_vs_compute_10pct_x']}x",
            f"{max(cell['compute_s'] / cell['cake_s'] for cell in tenth):.2f}x",
        ),
    ]


def section54(cells: Cells) -> list[tuple[str, str, str]]:
    """What else section 5.4 states, as `section53`."""
    printed = PRINTED["headlines_anonymous"]
    found = {(cell["util"], cell["gbps"], cell["kv"]): cell for cell in cells}
    raw = {where: cell for where, cell in found.items() if where[2] == "raw"}

    def beside(kv: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(cell, found[util, gbps, kv]) for (util, gbps, _), cell in raw.items()]

    faster = {
        kv: max(one["load_s"] / other["load_s"] for one, other in beside(kv))
        for kv in ("8 bit", "CacheGen")
    }
    saved = [100 * (1 - other["cake_s"] / one["cake_s"]) for one, other in beside("CacheGen")]
    whole = [cell for (util, _, kv), cell in found.items() if (util, kv) == (0.9, "CacheGen")]
    most = max(100 * cell["less_than_load"] for cell in whole)
    low, high = printed["cake_cachegen_vs_cake_raw_pct"]
    return [
        (
            "load-only with 8 bit, with CacheGen: faster than with raw, at most",
            f"{printed['quant8_io_gain_x']}x, {printed['cachegen_io_gain_x']}x",
            f"{faster['8 bit']:.2f}x, {faster['CacheGen']:.2f}x",
        ),
        (
            "Cake with CacheGen, less than Cake with raw",
            f"{low}-{high} %",
            f"{min(saved):.1f}-{max(saved):.1f} %",
        ),
        (
            "Cake with CacheGen on 90 % of the GPU, less than CacheGen loaded, at most",
            f"{printed['cake_cachegen_90pct_vs_cachegen_only_pct']} %",
            f"{most:.1f} %",
        ),
    ]


def _range(pair: list[float]) -> str:
    return f"{pair[0]}-{pair[1]} %"


def _span(cells: Cells, key: str) -> str:
    values = [100 * cell[key] for cell in cells]
    low, high = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10
    return f"{low:.1f}-{high:.1f} %"


def speed_up(faster: float, cores: int, threads: int) -> float:
    """How much faster `threads` are than one, by Amdahl's law.

    Args: faster: what was measured of `cores` cores; a decoder that keeps the GIL gains nothing.
    """
    serial = (cores / min(max(faster, 1.0), cores) - 1) / (cores - 1) if cores > 1 else 1.0
    return 1 / (serial + (1 - serial) / threads)


def codecs(measured_file: Path = MEASURED) -> dict[str, Any]:
    """Our codecs with their measured sizes and speeds: 13B, 16k tokens, a whole A100.

    Decoding runs beside the link, block by block: a block takes the longer of the two. `device`
    decodes at no cost, which is what a GPU would have to come near; `cpu` has as many threads as a
    server at most, and of them the `speed_up` over the one core that was measured.
    """
    result = json.loads(measured_file.read_text())
    cores = result["settings"]["cores"]
    measured = {row["codec"]: row for row in result["speeds"] if row["shape"] == SHAPE}
    cells = []
    for gbps in GBPS:
        setting = Setting("A100", gbps=gbps)
        cells.append({"gbps": gbps, "codec": "raw", **_times(costs.machine(setting), setting)})
        for codec, row in measured.items():
            if " " in codec:  # the plain copy
                continue
            smaller = replace(setting, bits=16 / row["ratio"])
            machine = costs.machine(smaller)
            core_gb_per_s = row["decode_gb_per_s_1_core"]["median"]
            all_gb_per_s = row.get("decode_gb_per_s_all_cores", {}).get("median", core_gb_per_s)
            faster = speed_up(all_gb_per_s / core_gb_per_s, cores, MAX_THREADS)
            decode_s = BLOCK * setting.token_bytes / (core_gb_per_s * faster * 1e9)
            slower = LoadCost(machine.load.latency_s, max(machine.load.block_s, decode_s))
            cell: dict[str, Any] = {"gbps": gbps, "codec": codec, "ratio": row["ratio"]}
            cell["speed_up"] = round(faster, 2)
            cell["device"] = _times(machine, smaller)
            cell["cpu"] = _times(replace(machine, load=slower), smaller)
            if codec in ASSUMED:
                cell["assumed"] = _times(
                    costs.machine(replace(setting, bits=16 * ASSUMED[codec])), setting
                )
            cells.append(cell)
    return {"title": "Our codecs on the papers' machine", "decoders": MAX_THREADS, "cores": cores,
            "cells": cells}  # fmt: skip


def _times(machine: Machine, setting: Setting) -> dict[str, float]:
    result = simulate_prompt(machine, setting.tokens, chunk_tokens=CHUNK)
    ideal_s = ttft_lower_bound(machine, setting.tokens, chunk_tokens=CHUNK).ttft_s
    return {"cake_s": round(result.ttft_s, 4), "ideal_s": round(ideal_s, 4)}
