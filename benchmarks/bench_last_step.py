"""A last step that begins while the last blocks come, beside one that waits for them.

    python -m benchmarks.bench_last_step [--small] [--out FILE]

A document is stored, a new question follows it; the last step computes the question. Both arms are
requests to one server (`--cake-mode auto`) that take turns; those of the arm `late` say so, in
`custom_params`, and are planned for without overlap. The link between server and store is one of
two:

    file    a file store whose reads have the link one after another (`?bandwidth=`)
    http    `sglang-cake store serve` behind a TCP link that all reads share, four at once

Its bandwidth is a ratio to the balanced one, at which loading the document takes as long as
computing it. Each run has a question of its own, of the stated length, and starts cold. A cell's
first runs, in which costs are learned, are not counted; `ratio` is the median of early / late over
pairs of runs, with a 95 % interval.

`most` is the smallest ratio that overlapping could give here: a step cannot be hidden for longer
than the blocks that are on their way take (one of `file`, four of `http`), nor its first layer at
all, and the arm that waits is taken as it was measured.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.bench_http_store import ours
from benchmarks.command_line import fill, parser_of
from benchmarks.harness.slow_link import SlowLink
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from sglang_cake.cli.demo import CPU_MODEL, ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.demo.sglang_server import Reply
from sglang_cake.simulator.shapes import kv_token_bytes

NEW_TOKENS = 2
ARMS = ("early", "late")
LEARNING = 2  # runs of each arm that do not count
IN_FLIGHT = {"file": 1, "http": 4}  # blocks that come at the same time; 4 is the default depth
FULL = {"tokens": 4096, "questions": [16, 128, 512], "ratios": [1.0, 4.0], "repeats": 8}
SMALL = {"tokens": 1024, "questions": [128], "ratios": [4.0], "repeats": 2}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_last_step", __doc__)
    parser.add_argument("--small", action="store_true", help="a small model, one cell a link")
    parser.add_argument("--tokens", type=int, help="of the document, default 4096")
    parser.add_argument("--questions", type=stats.whole_numbers, help="tokens, default 16,128,512")
    parser.add_argument("--ratios", type=stats.numbers, help="bandwidths, default 1,4")
    parser.add_argument("--repeats", type=int, metavar="N", help="counted pairs (default 8)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step (default 512)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    name = "small" if args.small else "cpu"
    args.out = args.out or facts.RESULTS / f"last-step-{name}.json"
    if args.repeats < 1 or args.tokens % BLOCK_TOKENS or max(args.questions) > args.chunk:
        parser.error(
            f"needs a repeat, a document of whole blocks ({BLOCK_TOKENS} tokens), and questions "
            "of one step"
        )
    return args


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    args: argparse.Namespace
    work: Path
    model: Path
    layers: int
    progress: ProgressLog
    document: list[int] = field(default_factory=list)
    asked: int = 0
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        return kv_token_bytes(self.model, servers.DTYPE)

    def server(self, url: str, mode: str) -> FrozenServer:
        """One that is not started yet."""
        flags = servers.common_flags(self.args.chunk, self.args.tokens + self.args.chunk)
        return FrozenServer(
            self.model,
            [*flags, *servers.cake_flags(url, mode)],
            log=self.work / "server.log",
            env={"XDG_CACHE_HOME": str(self.work / "cache")},
        )

    def fill(self) -> float:
        """Store the document; returns the balanced bandwidth, in bytes per second."""
        size_bytes = self.args.tokens * self.token_bytes
        self.document = servers.random_prompt(self.args.tokens, seed=11)
        with self.server((self.work / "store").as_uri(), "compute") as server:
            server.cold(self.document, NEW_TOKENS)
            with server.thawed():
                servers.wait_until_steady(self.work / "store", size_bytes)
            ttft_s = min(server.cold(self.document, NEW_TOKENS).ttft_s for _ in range(2))
        self.progress.say(f"computing {self.args.tokens:,} tokens takes {ttft_s:.2f} s")
        return size_bytes / ttft_s

    def ask(self, server: FrozenServer, arm: str, tokens: int) -> Reply:
        """A question that nobody asked before."""
        self.asked += 1
        question = servers.random_prompt(tokens, seed=1000 + self.asked)
        return server.cold(self.document + question, NEW_TOKENS, {"cake_last_step": arm})

    def measure(
        self, server: FrozenServer, link: str, ratio: float, bandwidth: float, tokens: int
    ) -> dict[str, Any]:
        """One cell."""
        runs: dict[str, list[Reply]] = {name: [] for name in ARMS}
        for turn in range(LEARNING + self.args.repeats):
            for name in ARMS if turn % 2 else reversed(ARMS):
                runs[name].append(self.ask(server, name, tokens))
        counted = {name: replies[LEARNING:] for name, replies in runs.items()}
        return cell(
            counted,
            block_s=BLOCK_TOKENS * self.token_bytes / bandwidth,
            layers=self.layers,
            labels={"link": link, "bandwidth_ratio": ratio, "question_tokens": tokens},
            step_s=self.step_s(server, tokens),
        )

    def step_s(self, server: FrozenServer, tokens: int) -> float:
        """What the last step takes: the same question once more, all but its own KV in the tree."""
        found = []
        for _ in range(3):
            self.asked += 1
            question = servers.random_prompt(tokens, seed=1000 + self.asked)
            server.cold(self.document + question[:1], NEW_TOKENS)
            found.append(server.warm(self.document + question, NEW_TOKENS).ttft_s)
        return statistics.median(found)


def cell(
    runs: dict[str, list[Reply]],
    *,
    block_s: float,
    step_s: float,
    layers: int,
    labels: dict[str, Any],
) -> dict[str, Any]:
    """Ratios of one cell."""
    times = {name: [reply.ttft_s for reply in replies] for name, replies in runs.items()}
    late_s = statistics.median(times["late"])
    hidden_s = min(IN_FLIGHT[labels["link"]] * block_s, step_s * (1 - 1 / layers))
    return {
        **labels,
        "ttft_s": {name: round(statistics.median(found), 4) for name, found in times.items()},
        "runs_s": {name: [round(t, 4) for t in found] for name, found in times.items()},
        "early_over_late": stats.paired_ratio(
            [[pair] for pair in zip(times["early"], times["late"], strict=True)]
        ),
        "block_s": round(block_s, 4),
        "step_s": round(step_s, 4),
        "most": round(1 - hidden_s / late_s, 4),
        "overlapped": [reply.cake["overlapped_tokens"] for reply in runs["early"]],
        "loaded": {name: [r.cake["loaded_tokens"] for r in found] for name, found in runs.items()},
    }


def text(cells: Sequence[dict[str, Any]]) -> str:
    """One row a cell."""
    rows = []
    for c in cells:
        ratio = c["early_over_late"]
        rows.append(
            [
                c["link"],
                f"{c['bandwidth_ratio']:g}",
                str(c["question_tokens"]),
                *(f"{c['ttft_s'][name]:.3f}" for name in ("late", "early")),
                f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
                f"{c['most']:.3f}",
                f"{c['step_s']:.3f}",
                f"{c['block_s']:.3f}",
                f"{statistics.median(c['overlapped']):.0f}",
            ]
        )
    heads = ["link", "ratio", "question", "late s", "early s", "early/late", "most"]
    heads += ["step s", "block s", "overlapped tokens"]
    return table(heads, rows, right=range(1, len(heads)))


def run(bench: Bench, result: dict[str, Any]) -> None:
    """All cells; the result file is written after each link."""
    balanced = bench.fill()
    result["balanced_bytes_per_s"] = round(balanced)
    with ours(bench.work / "store") as served:
        for ratio in bench.args.ratios:
            bandwidth = ratio * balanced
            link = SlowLink(int(served.base.rpartition(":")[2]), bandwidth)
            near = (bench.work / "store").as_uri() + f"?bandwidth={bandwidth / 1e6:.3f}MB/s"
            urls = {"file": near, "http": f"http://127.0.0.1:{link.port}"}
            for name, url in urls.items():
                with bench.server(url, "auto") as server:
                    for tokens in bench.args.questions:
                        bench.cells.append(bench.measure(server, name, ratio, bandwidth, tokens))
                        found = json.dumps(bench.cells[-1]["early_over_late"])
                        bench.progress.say(f"{name}, {ratio:g}x, {tokens} tokens: {found}")
                result["cells"] = bench.cells
                facts.write(bench.args.out, result)
            link.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    size = servers.SMALL_MODEL if args.small else CPU_MODEL
    result = facts.header(
        "last-step",
        model=f"hidden {size['hidden']}, {size['layers']} layers",
        document_tokens=args.tokens,
        chunk_tokens=args.chunk,
        block_tokens=BLOCK_TOKENS,
        repeats=args.repeats,
    )
    with servers.fresh_folder("last-step") as work:
        bench = Bench(args, work, servers.model(args.small), size["layers"], ProgressLog())
        run(bench, result)
    facts.finish(args.out, result)
    print("", text(bench.cells), "", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
