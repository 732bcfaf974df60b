"""Time to first token: computing, loading, both at once, the optimum, and SGLang's HiCache.

    python -m benchmarks.bench_ttft [--small] [--out benchmarks/results/ttft-<name>.json]

Every run starts cold: the server's cache is emptied, the prompt's KV is in a store behind a link of
stated bandwidth, and all ways restore the same bytes from files of the same machine:

    compute   Cake, --cake-mode compute: nothing is loaded
    load      Cake, --cake-mode load: everything stored is loaded, the last token is computed
    both      Cake, --cake-mode both
    T*        the best split of what `compute` and `load` were measured to cost (our simulator)
    hicache-* SGLang's own HiCache, its file backend, under each of its prefetch policies, on stock
              SGLang (no plugin), with its host tier emptied too (`last_cached_from` in the result
              says where its hits came from) and the link in front of its reads (`hicache_cpu.py`)

The balanced bandwidth is the one at which loading the longest prompt takes as long as computing it
in the largest chunks; bandwidths are ratios to it. All of them are run with the largest chunk, the
other chunks with the balanced one only and without peers (--all-cells: everything with everything).

Over an `unlimited` link the machine itself is the limit. Such a cell also has

    hicache-host   HiCache again, with the prompt in its host tier and other prompts on the device

`bench_load_rate` compares such loads with the store's own speed. Within a cell the arms take turns,
and servers that are not being measured are stopped. Cells that lose stay in the table.
"""

import argparse
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import facts, servers, stats
from benchmarks.command_line import fill, parser_of
from benchmarks.hicache_cpu import LINK_ENV
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from benchmarks.ttft_report import cell, table
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.demo_report import Arm, Arms
from sglang_cake.demo.event_trace import TRACE_ENV
from sglang_cake.demo.sglang_server import Reply, flush_cache, generate
from sglang_cake.simulator.shapes import kv_token_bytes
from sglang_cake.stores.base import USUAL_DEPTH

NEW_TOKENS = 4
MODES = ("compute", "load", "both")
POLICIES = ("best_effort", "wait_complete", "timeout")
DRAIN_S = 0.3  # for reads that HiCache has under way when its request is over
HICACHE_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    # Room for what fills the device, and for one prompt more.
    *("--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
)
FILLERS = 2  # prompts that fill the device
UNLIMITED = "unlimited"
HOST = "hicache-host"
FULL = {"lengths": [2048, 4096, 8192], "chunks": [256, 512], "repeats": 3, "name": "cpu"}
SMALL = {"lengths": [1024, 2048], "chunks": [256], "repeats": 1, "name": "small"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_ttft", __doc__)
    listed = stats.whole_numbers
    parser.add_argument("--small", action="store_true", help="a small model, short prompts")
    parser.add_argument("--lengths", type=listed, help="stored tokens, default 2048,4096,8192")
    parser.add_argument("--chunks", type=listed, help="tokens of a step, default 256,512")
    parser.add_argument(
        "--bandwidths", type=ratios, default=[0.5, 1.0, 2.0], help=f"ratios, or {UNLIMITED}"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each arm (default 3)")
    parser.add_argument("--peer-repeats", type=int, metavar="N", help="runs of HiCache (default 2)")
    parser.add_argument("--no-peers", action="store_true", help="leave HiCache out")
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        help=f"of HiCache (default {','.join(POLICIES)})",
    )
    parser.add_argument(
        "--peer-page-tokens", type=int, default=16, metavar="N", help="page size of HiCache"
    )
    parser.add_argument(
        "--queue-depth",
        type=int,
        default=USUAL_DEPTH,
        metavar="N",
        help="reads of the store at a time (default %(default)s)",
    )
    parser.add_argument("--all-cells", action="store_true", help="all chunks at all bandwidths")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    if args.peer_repeats is None:
        args.peer_repeats = min(2, args.repeats)
    args.out = args.out or facts.RESULTS / f"ttft-{args.name}.json"
    if not 1 <= args.peer_repeats <= args.repeats:
        parser.error("needs at least one run of each arm, and no more of peers than of ours")
    if any(length % BLOCK_TOKENS for length in args.lengths):
        parser.error(f"lengths must be multiples of a block, {BLOCK_TOKENS} tokens")
    if not set(args.policies) <= set(POLICIES):
        parser.error(f"policies are {', '.join(POLICIES)}")
    return args


def ratios(text: str) -> list[float]:
    """`0.5,1,unlimited` as ratios to the balanced bandwidth. Raises: ValueError."""
    finite = [part for part in text.split(",") if part != UNLIMITED]
    found = stats.numbers(",".join(finite)) if finite else []
    return found + [math.inf] * (UNLIMITED in text.split(","))


@dataclass(slots=True)
class Peer:
    """A HiCache server under one policy."""

    policy: str
    server: FrozenServer
    link: Path  # the file that says the bandwidth

    def cold(self, prompt: Sequence[int], bandwidth: float) -> Reply:
        """Empty device and host tier, and send `prompt`."""
        with self.server.thawed() as url:
            flush_cache(url)
            self.link.write_text(f"{bandwidth:.0f}")
            try:
                return generate(url, prompt, NEW_TOKENS)
            finally:
                # What a policy gave up on is still being read: let it through, for the next run.
                self.link.write_text("0")
                time.sleep(DRAIN_S)

    def from_host(self, prompt: Sequence[int], fillers: Sequence[Sequence[int]]) -> Reply:
        """Have `prompt` in the host tier and not on the device, and send it."""
        with self.server.thawed() as url:
            flush_cache(url)
            for each in (prompt, *fillers):
                generate(url, each, NEW_TOKENS)
            return generate(url, prompt, NEW_TOKENS)


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    args: argparse.Namespace
    work: Path
    model: Path
    prompt: list[int]  # the longest; shorter ones are its beginnings
    progress: ProgressLog
    queue_depth: int = USUAL_DEPTH
    balanced: float = 0.0  # bytes per second
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token_bytes(self) -> int:
        return kv_token_bytes(self.model, servers.DTYPE)

    @property
    def store_url(self) -> str:
        return (self.work / "store").as_uri()

    @property
    def fillers(self) -> list[list[int]]:
        """Prompts that fill the device of a peer, but for less than a page each."""
        tokens = servers.pool_tokens(len(self.prompt)) // FILLERS - NEW_TOKENS
        tokens -= tokens % self.args.peer_page_tokens
        return [servers.random_prompt(tokens, seed=8 + number) for number in range(FILLERS)]

    def start(
        self,
        stack: contextlib.ExitStack,
        mode: str,
        chunk: int,
        bandwidth: float,
        more: Sequence[str] = (),
    ) -> FrozenServer:
        """A Cake server in `mode`, frozen; its trace is `trace_file(mode)`. `more`: flags."""
        self._trace_file(mode).unlink(missing_ok=True)
        url = self.store_url
        if math.isfinite(bandwidth):
            url += f"?bandwidth={bandwidth / 1e6:.3f}MB/s"
        depth = ("--cake-queue-depth", str(self.queue_depth))
        return self._started(
            stack,
            mode,
            [
                *servers.common_flags(chunk, len(self.prompt)),
                *servers.cake_flags(url, mode),
                *depth,
                *more,
            ],
            env={TRACE_ENV: str(self._trace_file(mode))},
        )

    def start_peers(self, stack: contextlib.ExitStack, chunk: int) -> list[Peer]:
        """HiCache servers, one per policy, with one store."""
        link = self.work / "link"
        link.write_text("0")
        env = {
            **servers.environment(servers.STOCK),
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.work / "hicache"),
            LINK_ENV: str(link),
        }
        flags = [*servers.common_flags(chunk, len(self.prompt)), *HICACHE_FLAGS]
        flags += ["--page-size", str(self.args.peer_page_tokens)]
        return [
            Peer(
                policy,
                self._started(
                    stack,
                    f"hicache-{policy}",
                    [*flags, "--hicache-storage-prefetch-policy", policy],
                    env=env,
                    launcher=servers.launcher("hicache_cpu"),
                ),
                link,
            )
            for policy in self.args.policies
        ]

    def fill(self, compute: FrozenServer, peers: Sequence[Peer]) -> None:
        """Fill the stores, and find the balanced bandwidth."""
        stored_bytes = (len(self.prompt) - 1) * self.token_bytes
        writers = [("store", compute, [self.prompt])]
        for peer in peers[:1]:
            unlimited = math.inf in self.args.bandwidths
            more = self.fillers if unlimited else []
            writers.append(("hicache", peer.server, [self.prompt, *more]))
        for folder, server, prompts in writers:
            for number, prompt in enumerate(prompts, start=1):
                server.cold(prompt, NEW_TOKENS)
                with server.thawed():
                    folder_bytes = number * stored_bytes
                    held = servers.wait_until_steady(self.work / folder, folder_bytes)
            self.progress.say(f"{folder} holds {held / 1e6:.1f} MB")
        # The quicker of two: whatever disturbs a run makes it longer.
        ttft_s = min(compute.cold(self.prompt, NEW_TOKENS).ttft_s for _ in range(2))
        self.balanced = stored_bytes / ttft_s
        self.progress.say(
            f"computing {len(self.prompt):,} tokens takes {ttft_s:.2f} s: the balanced bandwidth "
            f"is {self.balanced / 1e6:.2f} MB/s"
        )

    def measure(
        self, arms: dict[str, FrozenServer], peers: Sequence[Peer], chunk: int, ratio: float
    ) -> None:
        """The cells of one chunk and bandwidth, every length."""
        bandwidth = ratio * self.balanced
        unlimited = math.isinf(ratio)
        for length in self.args.lengths:
            prompt = self.prompt[: length + 1]
            runs = {mode: Arm(mode, self._trace_file(mode)) for mode in MODES}
            found: dict[str, list[Reply]] = {f"hicache-{peer.policy}": [] for peer in peers}
            in_host = [peer for peer in peers if unlimited and peer.policy == "wait_complete"]
            if in_host:
                found[HOST] = []
            for repeat in range(self.args.repeats):
                order = MODES[repeat % len(MODES) :] + MODES[: repeat % len(MODES)]
                for mode in order:
                    runs[mode].replies.append(arms[mode].cold(prompt, NEW_TOKENS))
                if repeat < self.args.peer_repeats:
                    for peer in peers:
                        found[f"hicache-{peer.policy}"].append(peer.cold(prompt, bandwidth))
                    for peer in in_host:
                        found[HOST].append(peer.from_host(prompt, self.fillers))
            self.cells.append(
                cell(
                    Arms(**runs),
                    found,
                    chunk=chunk,
                    ratio=ratio,
                    bandwidth=bandwidth,
                    prompt_bytes=len(prompt) * self.token_bytes,
                )
            )
            times = ", ".join(f"{name} {s:.2f}" for name, s in self.cells[-1]["ttft_s"].items())
            self.progress.say(
                f"{length:,} tokens, chunk {chunk}, link {_named(ratio)}: {times} s, "
                f"T/T* {self.cells[-1]['over_ideal']:.3f}"
            )

    def _trace_file(self, mode: str) -> Path:
        return self.work / f"trace-{mode}.jsonl"

    def _started(
        self, stack: contextlib.ExitStack, name: str, flags: list[str], **settings: Any
    ) -> FrozenServer:
        server = FrozenServer(self.model, flags, log=self.work / f"server-{name}.log", **settings)
        stack.enter_context(server)
        self.progress.say(f"{name}: healthy after {server.start_s:.1f} s")
        return server


def _named(ratio: float) -> str:
    return f"{ratio:g}x balanced" if math.isfinite(ratio) else UNLIMITED


def combinations(args: argparse.Namespace) -> Iterator[tuple[int, list[float]]]:
    """(chunk, bandwidth ratios) to run, the largest chunk first."""
    balanced = min(args.bandwidths, key=lambda ratio: abs(ratio - 1))
    for number, chunk in enumerate(sorted(set(args.chunks), reverse=True)):
        yield chunk, list(args.bandwidths) if args.all_cells or not number else [balanced]


def run(bench: Bench, result: dict[str, Any]) -> None:
    """All cells; the result file is written after each bandwidth."""
    for number, (chunk, ratios) in enumerate(combinations(bench.args)):
        with contextlib.ExitStack() as stack:
            compute = bench.start(stack, "compute", chunk, math.inf)
            wanted = not bench.args.no_peers and (bench.args.all_cells or not number)
            peers = bench.start_peers(stack, chunk) if wanted else []
            if not number:
                bench.fill(compute, peers)
            for ratio in ratios:
                with contextlib.ExitStack() as inner:
                    arms = {"compute": compute}
                    for mode in ("load", "both"):
                        arms[mode] = bench.start(inner, mode, chunk, ratio * bench.balanced)
                    bench.measure(arms, peers, chunk, ratio)
                result["balanced_bytes_per_s"] = round(bench.balanced)
                result["cells"] = bench.cells
                facts.write(bench.args.out, result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if the three arms gave the same tokens in every cell."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    progress = ProgressLog()
    result = facts.header(
        "ttft",
        model="hidden 256, 4 layers" if args.small else "hidden 768, 10 layers (92M)",
        dtype=servers.DTYPE,
        block_tokens=BLOCK_TOKENS,
        repeats=args.repeats,
        peer_repeats=args.peer_repeats,
        peer_page_tokens=args.peer_page_tokens,
        new_tokens=NEW_TOKENS,
        queue_depth=args.queue_depth,
        restores_from="files of the same machine, behind the stated link",
    )
    # One token more than is stored: it is computed by all arms, for the logits.
    prompt = servers.random_prompt(max(args.lengths) + 1, seed=7)
    with servers.fresh_folder("ttft") as work:
        bench = Bench(args, work, servers.model(args.small), prompt, progress, args.queue_depth)
        run(bench, result)
    facts.finish(args.out, result)
    print("", table(bench.cells), "", sep="\n")
    progress.say(f"result: {facts.shown(args.out)}")
    return 0 if all(cell["same_tokens"] for cell in bench.cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
