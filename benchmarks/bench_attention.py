"""What a prefill chunk's attention costs against its position, without and with patch 0003.

    python benchmarks/bench_attention.py [--json benchmarks/results/attention-cpu.json]

Both forms of `TorchNativeAttnBackend._run_sdpa_forward_extend` are cut out of the source of the
installed SGLang, repaired or not, and run alternately in this process: a second load on the machine
then slows both, if not evenly, so the load average is recorded. Times are medians, of the gather
from the KV pool and the attention of one layer: of the wall clock, and of the CPU time of all
threads, which another load disturbs least and which the fits therefore use. Powers are slopes of
log time against log length over the later half: 2 is square, 1 is linear. The last line on stdout
is JSON.
"""

import __future__

import argparse
import ast
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_cake.cli.patch import find_installation, plan_of

BACKEND = "sglang/srt/layers/attention/torch_native_backend.py"
METHODS = {"_run_sdpa_forward_extend", "_make_sliding_window_mask", "_causal_lower_right"}
Forward = Callable[[int], torch.Tensor]


def cut_out(source: bytes) -> Any:
    """The backend's class with only the methods at issue and no base: no SGLang is imported."""
    [backend] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TorchNativeAttnBackend"
    ]
    backend.bases = []
    backend.body = [
        node for node in backend.body if isinstance(node, ast.FunctionDef) and node.name in METHODS
    ]
    names: dict[str, Any] = {
        "torch": torch,
        "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
    }
    # SGLang's module has this import too: its annotations name types that are not here.
    lazy = __future__.annotations.compiler_flag
    exec(compile(ast.Module([backend], []), BACKEND, "exec", flags=lazy), names)
    return names["TorchNativeAttnBackend"]()


def make_forward(source: bytes, args: argparse.Namespace) -> Forward:
    """A function from the position of a chunk to its output."""
    backend = cut_out(source)
    generator = torch.Generator().manual_seed(0)
    slots = args.last + args.chunk
    query = torch.randn(args.chunk, args.heads, args.dim, generator=generator)
    keys = torch.randn(slots, args.kv_heads, args.dim, generator=generator)
    values = torch.randn(slots, args.kv_heads, args.dim, generator=generator)
    req_to_token = torch.randperm(slots, generator=generator).view(1, -1)

    def forward(position: int) -> torch.Tensor:
        output: torch.Tensor = backend._run_sdpa_forward_extend(
            query,
            torch.empty_like(query),
            keys,
            values,
            req_to_token,
            torch.tensor([0]),
            torch.tensor([position + args.chunk]),
            torch.tensor([position]),
            torch.tensor([args.chunk]),
            enable_gqa=args.heads != args.kv_heads,
            causal=True,
        )
        return output

    return forward


def measure(forwards: dict[str, Forward], position: int, repeats: int) -> dict[str, Any]:
    outputs = {name: forward(position) for name, forward in forwards.items()}  # warms up as well
    wall_s: dict[str, list[float]] = {name: [] for name in forwards}
    cpu_s: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(repeats):
        for name, forward in forwards.items():
            wall, cpu = time.perf_counter(), time.process_time()
            forward(position)
            wall_s[name].append(time.perf_counter() - wall)
            cpu_s[name].append(time.process_time() - cpu)
    released, repaired = outputs.values()
    return {
        "position_tokens": position,
        **{f"{name}_s": round(statistics.median(times), 5) for name, times in wall_s.items()},
        **{f"{name}_cpu_s": round(statistics.median(times), 5) for name, times in cpu_s.items()},
        "max_abs_difference": float((released - repaired).abs().max()),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through `points`."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def summarise(rows: list[dict[str, Any]], chunk: int) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    later = rows[len(rows) // 2 :]
    for name in ("unpatched", "patched"):
        logs = [
            (math.log(row["position_tokens"] + chunk), math.log(row[f"{name}_cpu_s"]))
            for row in later
        ]
        summary[f"{name}_power"] = round(slope(logs), 2)
    positions = [float(row["position_tokens"]) for row in rows]
    seconds = [row["patched_cpu_s"] for row in rows]
    summary["patched_linear_r2"] = round(statistics.correlation(positions, seconds) ** 2, 4)
    summary["patched_cpu_us_per_1000_tokens"] = round(
        1e9 * slope(list(zip(positions, seconds, strict=True)))
    )
    for unit in ("s", "cpu_s"):
        ratio = rows[-1][f"unpatched_{unit}"] / rows[-1][f"patched_{unit}"]
        summary[f"speedup_at_last_{unit}"] = round(ratio, 1)
    summary["max_abs_difference"] = max(row["max_abs_difference"] for row in rows)
    return summary


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512, help="new tokens")
    parser.add_argument("--last", type=int, default=7680, help="last position, in tokens")
    parser.add_argument("--step", type=int, default=1024, help="between positions, in tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    installation = find_installation()
    plan = plan_of(installation)
    if plan.conflicts:
        raise SystemExit(f"the patches do not fit: {plan.conflicts[0]}")
    forwards = {
        "unpatched": make_forward(plan.released[BACKEND], args),
        "patched": make_forward(plan.repaired[BACKEND], args),
    }
    load_before = os.getloadavg()[0]
    rows = []
    columns = ("unpatched_s", "patched_s", "unpatched_cpu_s", "patched_cpu_s")
    print(f"{'position':>8}", *(f"{name:>15}" for name in columns), f"{'difference':>11}")
    for position in sorted({*range(0, args.last, args.step), args.last}):
        row = measure(forwards, position, args.repeats)
        rows.append(row)
        times = (f"{row[name]:>15.4f}" for name in columns)
        print(f"{position:>8}", *times, f"{row['max_abs_difference']:>11.1e}")
    settings = ("heads", "kv_heads", "dim", "chunk", "repeats")
    result = {
        "machine": f"{os.cpu_count()}-core CPU, no GPU",
        "cpu": cpu_model(),
        "load_average_before": round(load_before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "sglang": installation.version,
        "dtype": "float32",
        **{name: getattr(args, name) for name in settings},
        **summarise(rows, args.chunk),
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
