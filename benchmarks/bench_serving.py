"""Serving with `sglang.bench_serving`: Cake off, load-only, auto, and HiCache under its policies.

    python -m benchmarks.bench_serving [--small] [--out FILE]

Workloads of SGLang's own benchmark: generated-shared-prefix (groups of prompts that share a long
beginning), the same with several turns, and, if asked for, `lengths`: prompts of `tokens` / 8 to
`tokens` tokens that share nothing and are all stored. The device holds only two prompts, so what
is shared must come from a store, behind a link on which loading a prompt takes as long as computing
it. Every arm runs each workload once unmeasured, which fills its store, then at every rate
`repeats` times, with emptied device caches. Reported: mean, p50 and p99 of TTFT, inter-token
latency, throughput; ratios of auto to off are of runs with the same rate, workload and repeat.
`noise` is how much the repeats of one arm differ. One server runs at a time.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.bench_ttft import HICACHE_FLAGS, NEW_TOKENS, POLICIES
from benchmarks.command_line import fill, parser_of
from benchmarks.hicache_cpu import LINK_ENV
from benchmarks.servers import FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.simulator.shapes import kv_token_bytes

ARMS = ("off", "load", "auto", *(f"hicache-{policy}" for policy in POLICIES))
TURNS = {"shared-prefix": 1, "multi-turn": 3}
LENGTHS = "lengths"
WORKLOADS = (*TURNS, LENGTHS)
CHUNK = 256
FIELDS = {
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_mean_ms": "mean_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "tokens_per_s": "total_throughput",
}
FULL = {"groups": 4, "prompts": 3, "system": 2048, "rates": [0.5, 2.0], "repeats": 2, "name": "cpu"}
SMALL = {"groups": 2, "prompts": 2, "system": 512, "rates": [1.0], "repeats": 1, "name": "small"}
FULL |= {"tokens": 4096, "requests": 20, "output": 16}
SMALL |= {"tokens": 1024, "requests": 4, "output": 16}
QUESTION = 64
LIMIT_S = 600


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_serving", __doc__)
    parser.add_argument("--small", action="store_true", help="few prompts, one rate, one repeat")
    parser.add_argument("--arms", default=",".join(ARMS), help="to run, default all")
    parser.add_argument(
        "--workloads", default=",".join(TURNS), help=f"of {', '.join(WORKLOADS)} (default: two)"
    )
    parser.add_argument("--rates", type=stats.numbers, help="requests per second, default 0.5,2")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each run (default 2)")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.arms, args.workloads = args.arms.split(","), args.workloads.split(",")
    if args.repeats < 1 or not set(args.arms) <= set(ARMS):
        parser.error(f"needs a repeat, and arms of {', '.join(ARMS)}")
    if not set(args.workloads) <= set(WORKLOADS):
        parser.error(f"knows the workloads {', '.join(WORKLOADS)}")
    args.out = args.out or facts.RESULTS / f"serving-{args.name}.json"
    return args


def longest_tokens(args: argparse.Namespace) -> int:
    """Tokens of the longest prompt of a chat with its answer, at most. Prompts are sent as text,
    and have up to twice as many tokens as were asked for."""
    turns = max(TURNS.values())
    return int(2 * (args.system + turns * QUESTION) + turns * args.output + 64)


def start(
    arm: str, args: argparse.Namespace, model: Path, work: Path, bandwidth: float
) -> FrozenServer:
    """The server of an arm, not started."""
    longest = longest_tokens(args)
    if LENGTHS in args.workloads:
        longest = max(longest, args.tokens + args.output)
    flags = servers.common_flags(CHUNK, longest)
    log = work / f"server-{arm}.log"
    if arm == "off":
        return FrozenServer(model, flags, log=log, env=servers.STOCK)
    if arm in ("load", "auto"):
        url = (work / f"store-{arm}").as_uri()
        url += f"?bandwidth={bandwidth / 1e6:.3f}MB/s"
        return FrozenServer(model, [*flags, *servers.cake_flags(url, arm)], log=log)
    link = work / "link"
    link.write_text(f"{bandwidth:.0f}")
    env = {
        **servers.environment(servers.STOCK),
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(work / f"store-{arm}"),
        LINK_ENV: str(link),
    }
    flags += [*HICACHE_FLAGS, "--page-size", "16"]
    flags += ["--hicache-storage-prefetch-policy", arm.removeprefix("hicache-")]
    return FrozenServer(model, flags, log=log, env=env, launcher=servers.launcher("hicache_cpu"))


def command(
    url: str,
    model: Path,
    out: Path,
    args: argparse.Namespace,
    *,
    workload: str,
    rate: float,
    flush: bool = True,
) -> list[str]:
    """SGLang's benchmark, as anybody would call it. With `flush`, it empties the device first."""
    turns = TURNS.get(workload, 1)
    prompts = [
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-turns", str(turns)),
        *("--gsp-num-groups", str(args.groups), "--gsp-prompts-per-group", str(args.prompts)),
        *("--gsp-system-prompt-len", str(args.system), "--gsp-question-len", str(QUESTION)),
        *("--gsp-output-len", str(args.output), "--num-prompts", str(args.groups * args.prompts)),
    ]
    if workload == LENGTHS:
        prompts = [
            *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "0.125"),
            *("--random-input-len", str(args.tokens), "--random-output-len", str(args.output)),
            *("--num-prompts", str(args.requests)),
        ]
    return [
        *(sys.executable, "-m", "sglang.bench_serving", "--base-url", url),
        *("--backend", "sglang" if turns == 1 else "sglang-oai-chat"),  # only chats have turns
        *("--model", str(model), "--tokenizer", str(model), "--seed", "3"),
        *prompts,
        *("--request-rate", f"{rate:g}", "--warmup-requests", "0"),
        *(["--flush-cache"] if flush else []),
        *("--disable-tqdm", "--output-file", str(out)),
    ]


def measure(
    url: str,
    model: Path,
    work: Path,
    args: argparse.Namespace,
    *,
    workload: str,
    rate: float,
    flush: bool = True,
) -> dict[str, float]:
    """One run. Raises: RuntimeError with the end of its output when it fails."""
    out = work / "serving.jsonl"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        command(url, model, out, args, workload=workload, rate=rate, flush=flush),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode != 0 or not out.exists():
        said = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"sglang.bench_serving ended with {done.returncode}:\n{said}")
    found = json.loads(out.read_text().splitlines()[-1])
    return numbers(found)


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """What is kept of one run's result."""
    throughput = found.get("total_throughput")
    if throughput is None:
        throughput = found["input_throughput"] + found["output_throughput"]
    values = {**found, "total_throughput": throughput}
    kept = {name: round(float(values[field]), 3) for name, field in FIELDS.items()}
    return {**kept, "completed": found["completed"]}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per workload, rate and arm: medians over the repeats, and the ratio to off."""
    rows = []
    for key in dict.fromkeys((run["workload"], run["rate"], run["arm"]) for run in runs):
        here = [run for run in runs if (run["workload"], run["rate"], run["arm"]) == key]
        off = {
            run["repeat"]: run
            for run in runs
            if (run["workload"], run["rate"]) == key[:2] and run["arm"] == "off"
        }
        medians = {name: stats.spread([run[name] for run in here])["median"] for name in FIELDS}
        times = [run["ttft_mean_ms"] for run in here]
        pairs = [
            (run["ttft_mean_ms"], off[run["repeat"]]["ttft_mean_ms"])
            for run in here
            if run["repeat"] in off
        ]
        rows.append(
            {
                "workload": key[0],
                "rate": key[1],
                "arm": key[2],
                **medians,
                "repeats_differ": round(max(times) / min(times) - 1, 4),
                "ttft_to_off": stats.paired_ratio([pairs])["ratio"] if pairs else None,
            }
        )
    return rows


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and whether auto was anywhere slower than off beyond noise."""
    heads = ["workload", "rate", "arm", *FIELDS, "repeats differ", "TTFT to off"]
    lines = [
        [
            row["workload"],
            f"{row['rate']:g}",
            row["arm"],
            *(f"{row[name]:,.1f}" for name in FIELDS),
            f"{row['repeats_differ']:.1%}",
            f"{row['ttft_to_off']:.3f}" if row["ttft_to_off"] else "-",
        ]
        for row in rows
    ]
    noise = max((row["repeats_differ"] for row in rows if row["arm"] in ("off", "auto")), default=0)
    slower = [
        f"{row['workload']} at {row['rate']:g}/s"
        for row in rows
        if row["arm"] == "auto" and row["ttft_to_off"] and row["ttft_to_off"] > 1 + noise
    ]
    verdict = f"auto slower than off beyond noise ({noise:.1%}): {', '.join(slower) or 'nowhere'}"
    return table(heads, lines, right=range(3, len(heads))) + "\n\n" + verdict


def balanced(server: FrozenServer, model: Path, args: argparse.Namespace) -> float:
    """Bytes per second at which loading a shared prefix takes as long as computing it."""
    prompt = servers.random_prompt(args.system + QUESTION, seed=5)
    ttft_s = min(server.cold(prompt, NEW_TOKENS).ttft_s for _ in range(3))
    return len(prompt) * kv_token_bytes(model, servers.DTYPE) / ttft_s


def run(args: argparse.Namespace, model: Path, work: Path, progress: ProgressLog) -> dict[str, Any]:
    """All arms; `off` first, which the bandwidth is measured on."""
    result: dict[str, Any] = {"runs": [], "balanced_bytes_per_s": 0}
    bandwidth = 1e9
    for arm in sorted(args.arms, key=ARMS.index):
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(start(arm, args, model, work, bandwidth))
            progress.say(f"{arm}: healthy after {server.start_s:.1f} s")
            if arm == ARMS[0]:
                bandwidth = balanced(server, model, args)
                result["balanced_bytes_per_s"] = round(bandwidth)
            with server.thawed() as url:
                for workload in args.workloads:
                    measure(url, model, work, args, workload=workload, rate=max(args.rates))
                    for rate in args.rates:
                        for repeat in range(args.repeats):
                            found = measure(url, model, work, args, workload=workload, rate=rate)
                            labels = {"workload": workload, "rate": rate, "arm": arm}
                            result["runs"].append({**labels, "repeat": repeat, **found})
                        progress.say(f"{arm}, {workload}, {rate:g}/s: {found['ttft_mean_ms']} ms")
        result["summary"] = summary(result["runs"])
        facts.write(
            args.out,
            {**facts.header("serving", repeats=args.repeats, tokens=args.tokens), **result},
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    with servers.fresh_folder("serving") as work:
        result = run(args, servers.model(True), work, ProgressLog())
    print("", text(result["summary"]), "", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
