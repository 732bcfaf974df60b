"""KV-Runahead for real: two workers of one thread share a prompt, beside one worker and --tp 2.

    python -m benchmarks.bench_runahead [--small] [--out FILE]

Time to the first token of a prompt that no server has cached. Every arm computes on CPU threads of
this machine, of which it needs two that are free:

    one     one server of one thread: a member of the pair that is asked to compute alone
    auto    the pair as it is used: the planner decides, and knows the best partitions of other
            lengths only if somebody searched for them, which nobody did
    two     one server of two threads
    tp      one server, --tp 2, one thread a rank: SGLang's own way to share a prompt
    even    two servers of one thread, a chain, as many tokens each (KVR-E)
    closed  the same, spans of equal time from the cost model
    table   the same, spans interpolated between the searched lengths beside it (KVR-P)
    search  the same, spans found by a grid search at this length (KVR-S)

With a stored tail, behind a link on which loading takes as long as one worker computing: `load`
alone, `cake` (one worker and the loader), `chain` (two workers, nothing loaded), `both` (two
workers and the loader).

Arms take turns within a round; ratios are of the same round. Servers that are not measured are
stopped. `limit` is the least that two workers could take: half of `one`. Bytes are counted by the
owner, and compared with equation 6 (what has to cross a link).
"""

import argparse
import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.chain_model import traffic_tokens
from benchmarks.command_line import fill, parser_of
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.runahead_search import TRIES
from sglang_cake.cli.text_tables import table
from sglang_cake.core.keys import Span
from sglang_cake.demo.sglang_server import Reply, flush_cache, free_port, generate
from sglang_cake.runahead.grid_search import grid_search
from sglang_cake.runahead.partition import PARAMETER, Partition, even
from sglang_cake.runahead.partition_table import PartitionTable
from sglang_cake.simulator.shapes import kv_token_bytes

FULL = {"lengths": [512, 2048, 4096, 8192], "repeats": 5, "search_repeats": 2, "name": "cpu"}
SMALL = {"lengths": [1024, 2048], "repeats": 2, "search_repeats": 1, "name": "small"}
NEW_TOKENS = 2
PAGE_TOKENS = 16
CHAINS = ("even", "closed", "table", "search")
GOAL, AUTO_GOAL, CLOSED_GOAL = 0.65, 1.05, 1.03
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_runahead", __doc__)
    parser.add_argument("--small", action="store_true", help="a small model, short prompts")
    parser.add_argument("--lengths", type=stats.whole_numbers, help="default 512,2048,4096,8192")
    parser.add_argument("--repeats", type=int, metavar="N", help="counted runs (default 5)")
    parser.add_argument("--search-repeats", type=int, metavar="N", help="runs of a partition")
    parser.add_argument("--no-tail", action="store_true", help="leave the stored tail out")
    parser.add_argument("--no-tp", action="store_true", help="leave --tp 2 out")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.out = args.out or facts.RESULTS / f"runahead-{args.name}.json"
    if args.repeats < 1 or any(length % BLOCK_TOKENS for length in args.lengths):
        parser.error(f"needs a repeat, and lengths that are multiples of {BLOCK_TOKENS}")
    return args


class Pair:
    """Two members of a group; the second one owns all prompts here."""

    def __init__(self, bench: "Bench", stack: contextlib.ExitStack, name: str, store: str) -> None:
        secret = bench.work / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(32))
        peers = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
        self.members = []
        for rank in range(2):
            flags = servers.cake_flags(
                f"{(bench.work / f'store-{name}').as_uri()}{store if rank else ''}",
                "auto" if store else "compute",
            )
            flags += ["--cake-runahead-rank", str(rank), "--cake-runahead-peers", peers]
            flags += ["--cake-runahead-secret", str(secret)]
            self.members.append(bench.start(stack, f"{name}-{rank}", flags, _ONE_THREAD))

    def ask(self, prompt: Sequence[int], how: object) -> Reply:
        """A cold run; a chain is asked for until the other one had time for it.

        Raises: RuntimeError if it never had.
        """
        helper, owner = self.members
        with contextlib.ExitStack() as awake:
            urls = [awake.enter_context(owner.thawed())]
            if how != "alone":  # one that is to compute alone gets the machine alone
                urls.append(awake.enter_context(helper.thawed()))
                _meet(urls[0])
            for _ in range(TRIES):
                for url in urls:
                    flush_cache(url)
                asked = None if how == "auto" else {PARAMETER: how}
                reply = generate(urls[0], prompt, NEW_TOKENS, custom_params=asked)
                if how in ("alone", "auto") or "bounds" in reply.cake:
                    return reply
        raise RuntimeError(f"nobody helped with {how}; the servers' logs say why")


def _meet(url: str) -> None:
    """Two members that stood still know nothing of each other for a moment."""
    for attempt in range(10 * TRIES):
        prompt = servers.random_prompt(4 * PAGE_TOKENS, seed=attempt)
        ends = [2 * PAGE_TOKENS, 4 * PAGE_TOKENS]
        if "bounds" in generate(url, prompt, 1, custom_params={PARAMETER: ends}).cake:
            return
        time.sleep(0.1)
    raise RuntimeError("the members do not find each other; their logs say why")


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    args: argparse.Namespace
    work: Path
    model: Path
    progress: ProgressLog
    cells: list[dict[str, Any]] = field(default_factory=list)
    tails: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, tokens: int) -> list[int]:
        """The same for all arms."""
        return servers.random_prompt(tokens, seed=tokens)

    def start(
        self, stack: contextlib.ExitStack, name: str, flags: Sequence[str], env: dict[str, str]
    ) -> FrozenServer:
        """A server, frozen. A forward takes as much as the longest prompt."""
        longest = max(self.args.lengths)
        common = servers.common_flags(longest, longest + 64)
        server = FrozenServer(
            self.model,
            [*common, "--page-size", str(PAGE_TOKENS), *flags],
            env=servers.environment(env),
            log=self.work / f"server-{name}.log",
        )
        stack.enter_context(server)
        self.progress.say(f"{name}: healthy after {server.start_s:.1f} s")
        return server


Arms = dict[str, Callable[[], Reply]]


def rounds(arms: Arms, repeats: int) -> dict[str, list[Reply]]:
    """Every arm in turn, in an order that rotates; the first round is not counted."""
    found: dict[str, list[Reply]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            reply = arms[name]()
            if repeat:
                found[name].append(reply)
    return found


def cell(replies: dict[str, list[Reply]], *, base: str, **labels: Any) -> dict[str, Any]:
    """Medians, and ratios to `base` of the same round."""
    runs_s = {name: [reply.ttft_s for reply in each] for name, each in replies.items()}
    outputs = {tuple(reply.output_ids) for each in replies.values() for reply in each}
    return {
        **labels,
        "ttft_s": {name: round(statistics.median(times), 4) for name, times in runs_s.items()},
        "ratio": {
            name: stats.spread([a / b for a, b in zip(times, runs_s[base], strict=True)])
            for name, times in runs_s.items()
        },
        "runs_s": {name: [round(t, 4) for t in times] for name, times in runs_s.items()},
        "limit_ratio": 0.5,
        "same_tokens": len(outputs) == 1,
    }


def traffic(reply: Reply, token_bytes: int) -> dict[str, Any]:
    """What crossed the link, and what equation 6 says must."""
    said = reply.cake
    expected = traffic_tokens(Partition(tuple(said["bounds"]))) * token_bytes
    return {
        "bounds": said["bounds"],
        "waited_s": said["waited_s"],
        "received_bytes": said["received_bytes"],
        "equation_6_bytes": expected,
    }


def searched(bench: Bench, pair: Pair, tokens: int) -> Partition:
    """The best partition at this length (KVR-S)."""
    prompt = bench.prompt(tokens)

    def measure(partitions: Sequence[Partition]) -> list[float]:
        return [
            min(
                pair.ask(prompt, list(each.bounds[1:])).ttft_s
                for _ in range(bench.args.search_repeats)
            )
            for each in partitions
        ]

    closed = pair.ask(prompt, "closed").cake["bounds"]
    found = grid_search(
        Partition(tuple(closed)),
        measure,
        stride_tokens=tokens // 16,
        min_stride_tokens=tokens // 64,
        page_tokens=PAGE_TOKENS,
        points=3,
    )
    bench.progress.say(
        f"{tokens:,} tokens: searched {found.partition.bounds}, {found.measured} measured"
    )
    return found.partition


def without_tail(bench: Bench) -> None:
    """All lengths, nothing stored."""
    args = bench.args
    token_bytes = kv_token_bytes(bench.model, servers.DTYPE)
    with contextlib.ExitStack() as stack:
        pair = Pair(bench, stack, "pair", "")
        others = {"two": bench.start(stack, "two", [], {"OMP_NUM_THREADS": "2"})}
        if not args.no_tp:
            env = {**_ONE_THREAD, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
            others["tp"] = bench.start(stack, "tp", ["--tp", "2"], env)
        for tokens in args.lengths:
            pair.ask(bench.prompt(tokens), "alone")  # the cost model learns
        best = {tokens: searched(bench, pair, tokens) for tokens in args.lengths}
        for tokens in args.lengths:
            prompt = bench.prompt(tokens)
            neighbours = PartitionTable()
            for other in args.lengths:
                if other != tokens or len(args.lengths) == 1:
                    neighbours.put(other, best[other])
            span = Span(0, tokens)
            predicted = neighbours.predict(span, 2, page_tokens=PAGE_TOKENS)
            assert predicted is not None
            split = {"even": even(span, 2, page_tokens=PAGE_TOKENS), "table": predicted}
            split["search"] = best[tokens]
            asked: dict[str, object] = {n: list(p.bounds[1:]) for n, p in split.items()}
            asked |= {"closed": "closed", "one": "alone", "auto": "auto"}
            arms: Arms = {n: partial(pair.ask, prompt, asked[n]) for n in ("one", "auto", *CHAINS)}
            arms |= {n: partial(each.cold, prompt, NEW_TOKENS) for n, each in others.items()}
            replies = rounds(arms, args.repeats)
            sent = {name: traffic(replies[name][-1], token_bytes) for name in CHAINS}
            bench.cells.append(cell(replies, base="one", prompt_tokens=tokens, sent=sent))
            bench.progress.say(f"{tokens:,} tokens: {_short(bench.cells[-1])}")


def with_tail(bench: Bench) -> None:
    """All lengths, all of it stored behind a link as quick as one worker."""
    args, longest = bench.args, max(bench.args.lengths)
    token_bytes = kv_token_bytes(bench.model, servers.DTYPE)
    one_s = next(c["ttft_s"]["one"] for c in bench.cells if c["prompt_tokens"] == longest)
    bandwidth = longest * token_bytes / one_s
    link = f"?bandwidth={bandwidth / 1e6:.3f}MB/s"
    with contextlib.ExitStack() as stack:
        pair = Pair(bench, stack, "tail", link)
        url = (bench.work / "store-tail").as_uri() + link
        load = bench.start(stack, "load", servers.cake_flags(url, "load"), _ONE_THREAD)
        plain = Pair(bench, stack, "plain", "")
        _, owner = pair.members
        for tokens in args.lengths:
            prompt = bench.prompt(tokens + 1)
            stored_bytes = _held(bench.work / "store-tail") + tokens * token_bytes
            pair.ask(prompt, "alone")
            with owner.thawed():
                servers.wait_until_steady(bench.work / "store-tail", stored_bytes)
            arms: Arms = {
                "load": partial(load.cold, prompt, NEW_TOKENS),
                "cake": partial(pair.ask, prompt, "alone"),
                "chain": partial(plain.ask, prompt, "closed"),
                "both": partial(pair.ask, prompt, "closed"),
            }
            replies = rounds(arms, args.repeats)
            found = cell(replies, base="cake", prompt_tokens=tokens + 1)
            found["link_limit_s"] = round(tokens * token_bytes / bandwidth, 4)
            found["loaded_tokens"] = replies["both"][-1].cake["loaded_tokens"]
            bench.tails.append(found)
            bench.progress.say(f"{tokens:,} tokens and a stored tail: {_short(found)}")


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _short(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {s:.2f}" for name, s in found["ttft_s"].items()) + " s"


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Whether the goals are met."""
    longest = max(cells, key=lambda found: int(found["prompt_tokens"]))
    closed = [found["ttft_s"]["closed"] / found["ttft_s"]["search"] for found in cells]
    return {
        f"closed <= {GOAL} x one at the longest": longest["ratio"]["closed"]["median"] <= GOAL,
        f"auto <= {AUTO_GOAL} x one at every length": (
            max(found["ratio"]["auto"]["median"] for found in cells) <= AUTO_GOAL
        ),
        f"closed <= {CLOSED_GOAL} x searched": max(closed) <= CLOSED_GOAL,
        "bytes as equation 6 says": all(
            each["received_bytes"] == each["equation_6_bytes"]
            for found in cells
            for each in found["sent"].values()
        ),
    }


def text(cells: Sequence[dict[str, Any]], tails: Sequence[dict[str, Any]]) -> str:
    """Tables and goals."""
    lines = []
    for title, found in (("nothing stored", cells), ("all stored", tails)):
        if not found:
            continue
        names = list(found[0]["ttft_s"])
        rows = [
            [
                f"{c['prompt_tokens']:,}",
                *(f"{c['ttft_s'][n]:.3f} ({c['ratio'][n]['median']:.2f})" for n in names),
                f"{c['limit_ratio'] * c['ttft_s']['one']:.3f}"
                if "one" in c["ttft_s"]
                else f"{c['link_limit_s']:.3f}",
            ]
            for c in found
        ]
        lines += [title, table(["tokens", *names, "limit"], rows, right=range(20)), ""]
    for c in cells:
        sent = c["sent"]["closed"]
        lines.append(
            f"{c['prompt_tokens']:,} tokens as {sent['bounds']}: {sent['received_bytes']:,} bytes, "
            f"equation 6 says {sent['equation_6_bytes']:,}; waited {sent['waited_s']:.3f} s"
        )
    lines += [f"{goal}: {'met' if met else 'MISSED'}" for goal, met in summary(cells).items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if all arms gave the same tokens in every cell."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    result = facts.header(
        "runahead",
        model="hidden 256, 4 layers" if args.small else "hidden 768, 10 layers (92M)",
        dtype=servers.DTYPE,
        repeats=args.repeats,
        search_repeats=args.search_repeats,
        link="TCP on loopback",
    )
    with servers.fresh_folder("runahead") as work:
        bench = Bench(args, work, servers.model(args.small), ProgressLog())
        without_tail(bench)
        result |= {"cells": bench.cells, "goals": summary(bench.cells)}
        facts.write(args.out, result)
        if not args.no_tail:
            with_tail(bench)
            result["tails"] = bench.tails
    facts.finish(args.out, result)
    print("", text(bench.cells, bench.tails), "", sep="\n")
    return 0 if all(found["same_tokens"] for found in bench.cells + bench.tails) else 1


if __name__ == "__main__":
    raise SystemExit(main())
