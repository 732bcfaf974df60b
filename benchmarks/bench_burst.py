"""A stored prompt and a burst of 22 short ones (Cake, section 5.8): who finishes when.

    python -m benchmarks.bench_burst [--small] [--out FILE]

A prompt of 16k tokens whose KV is behind a link on which loading it takes as long as computing it,
then 22 prompts of 32 to 448 tokens that nobody has stored, in three spikes, 8 tokens generated
each: the prompts of `benchmarks/paper` (Figure 6), on a real server, with the spikes at the same
shares of the time that computing the long one takes. `fcfs` is SGLang's own order. The arms take
turns, each run starts cold, servers that are not measured are stopped.
"""

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.command_line import fill, parser_of
from benchmarks.paper.pictures import PICTURES, draw
from benchmarks.paper.traces import DECODED, SHORTS, SPIKES_S, burst
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.demo.event_trace import TRACE_ENV
from sglang_cake.demo.sglang_server import flush_cache, generate
from sglang_cake.simulator.shapes import kv_token_bytes
from sglang_cake.simulator.simulated_server import Prompt

ARMS = ("fcfs", "adaptive")
# Claims nearer to each other than this are of one step: the shortest step takes longer.
_SAME_STEP_S = 0.004
_SPIKES_OVER = 0.75  # when the last spike comes, as a share of the time to compute the long prompt
FULL = {"tokens": 16384, "repeats": 3, "name": "cpu"}
SMALL = {"tokens": 2048, "repeats": 1, "name": "small"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_burst", __doc__)
    parser.add_argument("--small", action="store_true", help="a stored prompt of 2,048 tokens")
    parser.add_argument("--tokens", type=int, help="stored tokens, default 16384")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each arm (default 3)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step, default 512")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the steps, as SVG")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.out = args.out or facts.RESULTS / f"burst-{args.name}.json"
    if args.repeats < 1 or args.tokens % BLOCK_TOKENS:
        parser.error(f"needs a repeat, and a multiple of {BLOCK_TOKENS} tokens")
    return args


def steps(trace: Sequence[dict[str, Any]], stored: str, ended_s: float) -> list[dict[str, float]]:
    """Prefill steps of a trace: when, and how many tokens of the stored prompt and of others."""
    found: list[dict[str, float]] = []
    for event in trace:
        if event["event"] != "claim":
            continue
        kind = "stored_tokens" if event["rid"] == stored else "plain_tokens"
        if not found or event["t_s"] - found[-1]["begin_s"] > _SAME_STEP_S:
            found.append({"begin_s": event["t_s"], "plain_tokens": 0, "stored_tokens": 0})
        found[-1][kind] += event["stop"] - event["start"]
    ends = [step["begin_s"] for step in found[1:]] + [ended_s]
    return [{**step, "end_s": end, "decodes": 0} for step, end in zip(found, ends, strict=True)]


def run_once(
    server: FrozenServer, prompts: Sequence[tuple[Prompt, list[int]]], trace: Path, scale: float
) -> dict[str, Any]:
    """Send all prompts at their instants; wait for all answers."""
    done: dict[str, tuple[float, float, list[int]]] = {}

    def ask(url: str, prompt: Prompt, ids: list[int]) -> None:
        time.sleep(max(0.0, begun_s + scale * prompt.arrive_s - time.monotonic()))
        reply = generate(url, ids, prompt.new_tokens)
        done[prompt.rid] = (reply.ttft_s, time.monotonic() - begun_s, reply.output_ids)

    with server.thawed() as url:
        flush_cache(url)
        before = len(trace.read_text().splitlines()) if trace.exists() else 0
        begun_s = time.monotonic()
        threads = [threading.Thread(target=ask, args=(url, *each)) for each in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(done) < len(prompts):
        raise RuntimeError(f"{len(prompts) - len(done)} requests failed")
    events = [json.loads(line) for line in trace.read_text().splitlines()[before:]]
    longest = max((e for e in events if e["event"] == "arrive"), key=lambda e: e["tokens"])["rid"]
    finish_s = max(finished_s for _, finished_s, _ in done.values())
    short_s = [ttft_s for rid, (ttft_s, _, _) in done.items() if rid != "stored"]
    return {
        "finish_s": round(finish_s, 4),
        "stored_ttft_s": round(done["stored"][0], 4),
        "short_ttft_mean_s": round(statistics.mean(short_s), 4),
        "short_ttft_max_s": round(max(short_s), 4),
        "finish_times_s": {rid: round(at_s, 4) for rid, (_, at_s, _) in done.items()},
        "yields": sum(e["event"] == "yield" for e in events),
        "output_ids": {rid: ids for rid, (_, _, ids) in done.items()},
        "steps": [
            {**step, "begin_s": step["begin_s"] - begun_s, "end_s": step["end_s"] - begun_s}
            for step in steps(events, longest, begun_s + finish_s)
        ],
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by arm, and ratios of runs of the same round."""
    names = ("finish_s", "stored_ttft_s", "short_ttft_mean_s", "short_ttft_max_s")
    pairs = list(zip(runs["fcfs"], runs["adaptive"], strict=True))
    outputs = [run["output_ids"] for arm in runs.values() for run in arm]
    return {
        "arms": {
            arm: {name: statistics.median(run[name] for run in found) for name in names}
            for arm, found in runs.items()
        },
        "adaptive_to_fcfs": {
            name: stats.paired_ratio([[(b[name], a[name])] for a, b in pairs]) for name in names
        },
        "same_tokens": all(output == outputs[0] for output in outputs),
    }


def text(found: dict[str, Any]) -> str:
    """The table."""
    heads = ["", "all finished, s", "first token of the stored one", "of the short ones, mean"]
    heads.append("at most")
    rows = [[arm, *(f"{v:.2f}" for v in values.values())] for arm, values in found["arms"].items()]
    ratios = found["adaptive_to_fcfs"].values()
    rows.append(["ratio", *(f"{r['ratio']:.2f}" for r in ratios)])
    return table(heads, rows, right=range(1, len(heads)))


def run(args: argparse.Namespace, work: Path, progress: ProgressLog) -> dict[str, Any]:
    """Both arms."""
    model = servers.model(True)
    long = servers.random_prompt(args.tokens + 1, seed=7)
    flags = servers.common_flags(args.chunk, args.tokens + SHORTS * 512)
    store = (work / "store").as_uri()
    # One token more than is stored, for its logits.
    prompts = [
        (p, long if p.rid == "stored" else servers.random_prompt(p.prompt_tokens, seed=100 + n))
        for n, p in enumerate(burst(stored_mode_tokens=args.tokens + 1))
    ]
    with FrozenServer(
        model, [*flags, *servers.cake_flags(store, "compute")], log=work / "server-fill.log"
    ) as filler:
        filler.cold(long, 1)
        stored_bytes = args.tokens * kv_token_bytes(model, servers.DTYPE)
        with filler.thawed():
            servers.wait_until_steady(work / "store", stored_bytes)
        compute_s = min(filler.cold(long, 1).ttft_s for _ in range(2))
    bandwidth = stored_bytes / compute_s
    scale = _SPIKES_OVER * compute_s / max(SPIKES_S)
    progress.say(f"computing takes {compute_s:.2f} s; the link carries {bandwidth / 1e6:.2f} MB/s")
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with contextlib.ExitStack() as stack:
        arms = {}
        for arm in ARMS:
            url = f"{store}?bandwidth={bandwidth / 1e6:.3f}MB/s&policy=lru"
            arms[arm] = stack.enter_context(
                FrozenServer(
                    model,
                    [*flags, *servers.cake_flags(url, "auto"), "--cake-priority", arm],
                    env={TRACE_ENV: str(work / f"trace-{arm}.jsonl")},
                    log=work / f"server-{arm}.log",
                )
            )
            arms[arm].cold(long, DECODED)  # costs are learned in it
        for repeat in range(args.repeats):
            for arm in ARMS if repeat % 2 else ARMS[::-1]:
                found = run_once(arms[arm], prompts, work / f"trace-{arm}.jsonl", scale)
                runs[arm].append(found)
                progress.say(
                    f"{arm}: all finished after {found['finish_s']:.2f} s, "
                    f"short ones wait {found['short_ttft_mean_s']:.2f} s"
                )
    return {"compute_s": compute_s, "bandwidth_bytes_per_s": bandwidth, "runs": runs}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if both orders gave the same tokens."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    result = facts.header("burst", tokens=args.tokens, shorts=SHORTS, repeats=args.repeats)
    with servers.fresh_folder("burst") as work:
        result |= run(args, work, ProgressLog())
    found = result["summary"] = summary(result["runs"])
    if args.picture:
        middle = args.repeats // 2
        drawn = {arm: sorted(result["runs"][arm], key=_finish)[middle] for arm in ARMS}
        draw(lambda figure: PICTURES["figure6"](figure, {"runs": drawn}), args.picture)
    for each in (each for arm in result["runs"].values() for each in arm):
        del each["output_ids"]
    facts.write(args.out, result)
    print("", text(found), "", sep="\n")
    return 0 if found["same_tokens"] else 1


def _finish(found: dict[str, Any]) -> float:
    return float(found["finish_s"])


if __name__ == "__main__":
    raise SystemExit(main())
