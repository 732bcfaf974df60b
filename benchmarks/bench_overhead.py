"""What Cake costs a prefill step when it has nothing to give: on, off, and not installed.

    python -m benchmarks.bench_overhead [--small] [--out benchmarks/results/overhead-<name>.json]

The paper's Figure 7, as five servers that take turns; each gets the same new prompt in a round:

    absent   SGLang without the plugin (SGLANG_PLUGINS names none): what the others are compared to
    off      the plugin installed, Cake not enabled
    full     Cake on; the prompt is not stored, and the store has no room: blocks are copied to host
             memory, and refused by the store
    writing  Cake on; the prompt is not stored: every block is copied to host memory and written
    stored   Cake on, --cake-mode compute; the prompt is stored: looked up, and then nothing is
             copied, loaded or written

All run at the same time, but those that are not being measured are stopped, and every one has the
same clock on its prefill steps (`step_clock.py`). Ratios are medians over pairs (same round, same
chunk), with a bootstrap interval over rounds and chunks: of the wall clock; of the CPU time of the
scheduler thread; and of that of all threads, in which the writing itself shows. The last part is
the cost of the decisions alone, without a server: for a prompt of 128,000 tokens, and for queues.
"""

import argparse
import contextlib
import json
import re
import statistics
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.command_line import parser_of
from benchmarks.overhead_report import CLOCKS, summarise, table
from benchmarks.scheduler_cost import PHASES, queue, race
from benchmarks.servers import (
    BLOCK_TOKENS,
    DTYPE,
    STOCK,
    FrozenServer,
    cake_flags,
    common_flags,
    environment,
    fresh_folder,
    launcher,
    model,
    random_prompt,
    unwind_when_told_to_end,
    wait_until_steady,
)
from benchmarks.step_clock import STEPS_ENV
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.simulator.shapes import kv_token_bytes

NO_ROOM = "min_free=900TB"
QUEUES = (10, 100, 1_000, 5_000)
HISTOGRAM = "sglang:cake_step_overhead_seconds"
# `writing` fills the store that `stored` finds the prompt in: it comes before it in every round.
ORDERS = (
    ("absent", "off", "full", "writing", "stored"),
    ("writing", "stored", "full", "off", "absent"),
    ("off", "writing", "absent", "stored", "full"),
    ("full", "absent", "writing", "stored", "off"),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_overhead", __doc__)
    parser.add_argument("--small", action="store_true", help="a small model and 2,048 tokens")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="default 8192")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of a step")
    parser.add_argument("--rounds", type=int, metavar="N", help="runs of each arm (default 4)")
    parser.add_argument("--micro-only", action="store_true", help="the last part alone, no server")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    args.prompt_tokens = args.prompt_tokens or (2048 if args.small else 8192)
    args.rounds = args.rounds or (2 if args.small else 4)
    args.name = args.name or ("small" if args.small else "cpu")
    args.out = args.out or facts.RESULTS / f"overhead-{args.name}.json"
    if args.prompt_tokens < args.chunk or args.chunk < 1 or args.rounds < 1:
        parser.error("needs at least one round and one whole chunk")
    return args


def micro(races: int = 5) -> dict[str, Any]:
    """Microseconds per step that the decisions take; see `scheduler_cost`."""
    steps = [step for _ in range(races) for step in race(128_000, 512, 4)]
    totals = [1e6 * sum(step.values()) for step in steps]
    return {
        "prompt_tokens": 128_000,
        "blocks": 1_000,
        "landing_per_step": 4,
        "steps": len(steps),
        "median_us": {
            phase: round(statistics.median(1e6 * step[phase] for step in steps), 1)
            for phase in PHASES
        },
        "total_us": {
            "median": round(statistics.median(totals), 1),
            "p99": round(statistics.quantiles(totals, n=100)[98], 1),
        },
    }


def queues() -> list[dict[str, float]]:
    """Microseconds of CPU that prompts cost while they wait; see `scheduler_cost`."""
    rows = []
    for waiting in QUEUES:
        took_s = queue(waiting)
        rows.append({"waiting": waiting, **{k: round(1e6 * s, 1) for k, s in took_s.items()}})
    return rows


@contextlib.contextmanager
def _servers(
    args: argparse.Namespace, work: Path, progress: ProgressLog
) -> Iterator[dict[str, FrozenServer]]:
    store, full = (work / "store").as_uri(), (work / "full").as_uri()
    arms: dict[str, tuple[list[str], dict[str, str]]] = {
        "absent": ([], STOCK),
        "off": ([], {}),
        "full": (cake_flags(f"{full}?{NO_ROOM}", "both"), {}),
        "writing": (cake_flags(store, "both"), {}),
        "stored": (cake_flags(store, "compute"), {}),
    }
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, (flags, env) in arms.items():
            servers[name] = FrozenServer(
                model(args.small),
                [*common_flags(args.chunk, args.prompt_tokens), "--enable-metrics", *flags],
                env=environment({STEPS_ENV: str(work / f"steps-{name}.jsonl"), **env}),
                log=work / f"server-{name}.log",
                launcher=launcher("step_clock"),
            )
            stack.enter_context(servers[name])
            progress.say(f"{name}: healthy after {servers[name].start_s:.1f} s")
        yield servers


def measure(args: argparse.Namespace, progress: ProgressLog) -> dict[str, Any]:
    """All rounds: what each arm's steps took, and Cake's own count of its time."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDERS[0]}
    prompt_bytes = (
        args.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS * kv_token_bytes(model(args.small), DTYPE)
    )
    with fresh_folder("overhead") as work, _servers(args, work, progress) as servers:
        for server in servers.values():  # the first prompt pays for what is done once
            server.cold(random_prompt(min(2048, args.prompt_tokens), seed=1), 2)
        written = wait_until_steady(work / "store", 1)
        for number in range(args.rounds):
            prompt = random_prompt(args.prompt_tokens, seed=100 + number)
            for name in ORDERS[number % len(ORDERS)]:
                run = _one(servers[name], prompt, work / f"steps-{name}.jsonl")
                runs[name].append(run)
                progress.say(
                    f"round {number + 1} of {args.rounds}, {name}: first token after "
                    f"{run['ttft_s']:.2f} s, {len(run['steps'])} steps"
                )
                if name == "writing":
                    with servers[name].thawed():
                        written = wait_until_steady(work / "store", written + prompt_bytes)
        histograms = {name: _histogram(servers[name]) for name in ("full", "writing", "stored")}
    return {"runs": runs, "step_overhead_seconds": histograms}


def _one(server: FrozenServer, prompt: list[int], steps_file: Path) -> dict[str, Any]:
    reply = server.cold(prompt, 2)
    lines = [json.loads(line) for line in steps_file.read_text().splitlines()]
    steps = [line for line in lines if line["rid"] == reply.meta["id"]]
    return {
        "ttft_s": round(reply.ttft_s, 5),
        "cached_tokens": reply.meta["cached_tokens"],
        "steps": [{key: step[key] for key in ("tokens", "schedule_s", *CLOCKS)} for step in steps],
    }


def _histogram(server: FrozenServer) -> dict[str, float]:
    """Mean and count of Cake's own measurement of its time per step, since the server's start."""
    with server.thawed() as url, urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        return parse_histogram(reply.read().decode(), HISTOGRAM)


def parse_histogram(text: str, name: str) -> dict[str, float]:
    """Sum, count and mean of a Prometheus histogram; zeros when it is not there."""
    found = {"sum": 0.0, "count": 0.0}
    for part, value in re.findall(rf"^{re.escape(name)}_(sum|count)\{{.*\}} (\S+)$", text, re.M):
        found[part] += float(value)
    mean = found["sum"] / found["count"] if found["count"] else 0.0
    return {"steps": found["count"], "mean_ms": round(1e3 * mean, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every arm computed every prompt in full."""
    args = parse_args(argv)
    unwind_when_told_to_end()
    progress = ProgressLog()
    result = facts.header(
        "overhead",
        model="hidden 256, 4 layers" if args.small else "hidden 768, 10 layers (92M)",
        prompt_tokens=args.prompt_tokens,
        chunk_tokens=args.chunk,
        block_tokens=BLOCK_TOKENS,
        repeats=args.rounds,
    )
    result |= {"decisions": micro(), "queues_us": queues()}
    if not args.micro_only:
        measured = measure(args, progress)
        result["machine"]["load_average_after"] = facts.machine()["load_average"]
        result |= {"summary": summarise(measured["runs"]), **measured}
    facts.write(args.out, result)
    print(table(result))
    progress.say(f"result: {facts.shown(args.out)}")
    computed = all(
        not run["cached_tokens"] for runs in result.get("runs", {}).values() for run in runs
    )
    return 0 if computed else 1


if __name__ == "__main__":
    raise SystemExit(main())
