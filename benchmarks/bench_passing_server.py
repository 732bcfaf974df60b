"""A stored prompt, and a longer new one just after it, on a real server.

    python -m benchmarks.bench_passing_server [--small] [--docs] [--out FILE]

The new prompt passes the stored one while that is loaded. Arms: `computed` loads nothing, so the
prompts are computed in the order of their arrival; `as built` ends steps of the new prompt when
the loads are predicted to end; `whole steps` does not. The link takes from twice to a tenth of the
time of computing. The arms take turns, each run starts cold and has a new prompt that no store has,
and servers that are not measured are stopped.

The servers have no overlap loop. On a CPU, where `run_batch` computes, that loop sends the answer
to a step only after the step after it.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import documents, facts, servers, stats
from benchmarks.command_line import fill, parser_of
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.demo.sglang_server import flush_cache, generate
from sglang_cake.simulator.shapes import kv_token_bytes

ARMS = ("computed", "as built", "whole steps")
FULL = {"tokens": 2048, "chunk": 4096, "repeats": 5, "name": "cpu", "speeds": [0.5, 1, 2, 5, 10]}
SMALL = {"tokens": 512, "chunk": 1024, "repeats": 1, "name": "small", "speeds": [2.0]}
NEW_TIMES = 4  # the new prompt is so many times as long as the stored one
NEW_AFTER_S = 0.005
LEARNING = 2  # rounds in which servers measure their steps and loads


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_passing_server", __doc__)
    parser.add_argument("--small", action="store_true", help="short prompts and one link")
    parser.add_argument("--tokens", type=int, help="stored tokens, default 2048")
    parser.add_argument("--chunk", type=int, help="tokens of a step, default 4096")
    parser.add_argument(
        "--speeds", type=stats.numbers, metavar="X,X", help="of the link, relative to computing"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each arm (default 5)")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--docs", action="store_true", help="write it into reports/scheduling.md")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.out = args.out or facts.RESULTS / f"passing-server-{args.name}.json"
    if args.repeats < 1 or args.tokens % BLOCK_TOKENS:
        parser.error(f"needs a repeat, and a multiple of {BLOCK_TOKENS} tokens")
    return args


def run_once(server: FrozenServer, stored: list[int], new: list[int]) -> dict[str, Any]:
    """Send both prompts; wait for both answers."""
    replies: dict[str, Any] = {}

    def ask(url: str, name: str, ids: list[int]) -> None:
        replies[name] = generate(url, ids, 1)

    with server.thawed() as url:
        flush_cache(url)
        threads = [
            threading.Thread(target=ask, args=(url, name, ids))
            for name, ids in (("stored", stored), ("new", new))
        ]
        for thread in threads:
            thread.start()
            time.sleep(NEW_AFTER_S)
        for thread in threads:
            thread.join()
    return {
        "stored_ttft_s": round(replies["stored"].ttft_s, 4),
        "new_ttft_s": round(replies["new"].ttft_s, 4),
        "output_ids": replies["stored"].output_ids,
    }


def run(args: argparse.Namespace, work: Path, progress: ProgressLog) -> dict[str, Any]:
    """All arms on all links."""
    model = servers.model(True)
    stored = servers.random_prompt(args.tokens + 1, seed=7)  # its last token has no KV in the store
    flags = servers.common_flags(args.chunk, 2 * NEW_TIMES * args.tokens)
    flags.append("--disable-overlap-schedule")
    store = (work / "store").as_uri()
    stored_bytes = args.tokens * kv_token_bytes(model, servers.DTYPE)
    seeds = iter(range(100, 10_000))
    links = []
    computing = FrozenServer(
        model, [*flags, *servers.cake_flags(store, "compute")], log=work / "computing.log"
    )
    with computing:
        computing.cold(stored, 1)
        with computing.thawed():
            servers.wait_until_steady(work / "store", stored_bytes)
        compute_s = min(computing.cold(stored, 1).ttft_s for _ in range(3))
        for speed in args.speeds:
            bandwidth = speed * stored_bytes / compute_s
            url = f"{store}?bandwidth={bandwidth / 1e6:.3f}MB/s&policy=lru"
            cake = [*flags, *servers.cake_flags(url, "auto")]
            built = FrozenServer(model, cake, log=work / f"built-{speed}.log")
            whole = FrozenServer(
                model,
                cake,
                log=work / f"whole-{speed}.log",
                launcher=servers.launcher("whole_steps"),
            )
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            with built, whole:
                arms = dict(zip(ARMS, (computing, built, whole), strict=True))
                for repeat in range(LEARNING + args.repeats):
                    for arm in ARMS if repeat % 2 else ARMS[::-1]:
                        new = servers.random_prompt(NEW_TIMES * args.tokens, seed=next(seeds))
                        found = run_once(arms[arm], stored, new)
                        if repeat >= LEARNING:
                            runs[arm].append(found)
            links.append({"speed": speed, "runs": runs, "summary": summary(runs)})
            ratios = links[-1]["summary"]["as built"]["stored_ttft_s"]["ratio"]
            progress.say(f"a link {speed:g} times as fast as computing: {ratios:.2f}")
    return {"compute_s": compute_s, "links": links}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios to `computed` in the same round, and whether the stored prompt had the same answer in
    all runs."""
    outputs = [run.pop("output_ids") for of_arm in runs.values() for run in of_arm]
    return {
        arm: {
            name: stats.paired_ratio(
                [[(a[name], b[name])] for a, b in zip(runs[arm], runs["computed"], strict=True)]
            )
            for name in ("stored_ttft_s", "new_ttft_s")
        }
        for arm in ARMS[1:]
    } | {"same_tokens": all(output == outputs[0] for output in outputs)}


def text(links: Sequence[dict[str, Any]]) -> str:
    """The table."""
    heads = [f"{prompt}, {arm}" for prompt in ("stored", "new") for arm in ARMS[1:]]
    rows = [
        [
            f"{link['speed']:g}",
            *(
                "{ratio:.2f} ({low:.2f}–{high:.2f})".format(**link["summary"][arm][name])
                for name in ("stored_ttft_s", "new_ttft_s")
                for arm in ARMS[1:]
            ),
        ]
        for link in links
    ]
    return documents.table(["link", *heads], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if the stored prompt had the same answer in all runs."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    result = facts.header(
        "passing-server",
        tokens=args.tokens,
        new_tokens=NEW_TIMES * args.tokens,
        chunk=args.chunk,
        repeats=args.repeats,
    )
    with servers.fresh_folder("passing-server") as work:
        result |= run(args, work, ProgressLog())
    facts.write(args.out, result)
    found = text(result["links"])
    if args.docs:
        documents.update({"passing-server": found}, facts.REPORTS / "scheduling.md")
    print("", found, "", sep="\n")
    return 0 if all(link["summary"]["same_tokens"] for link in result["links"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
