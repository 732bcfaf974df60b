"""Time to first token by codec, for real: Cake's Table 7 (16, 8 and 3 bits) on this machine.

    python -m benchmarks codec_ttft [--small] [--codecs raw,int8,kvquant3] [--out FILE]

The small trained Llama (`train_small_llama`) reads text that it was not trained on, in bfloat16.
Every codec has two servers, one that loads only and one in mode auto, and is measured beside one
that computes and the one that has raw KV in mode auto; then its two end, and the next codec's
start: there are never more than four, of about 3 GB each. They read files of this machine behind a
link of stated bandwidth, which is changed under their feet (`/cake/store`). Bandwidths are ratios
to the one at which loading raw KV takes as long as computing it. Every run starts cold; the arms of
a codec take turns, and servers that are not measured are stopped. Each server's first run of a
bandwidth is not counted: costs are learned in it. `link` is the physical limit: what the stored
bytes need to cross the link.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import requests
from transformers import AutoTokenizer

from benchmarks import facts, servers, stats
from benchmarks.command_line import fill
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from benchmarks.train_small_llama import CONFIG, OUT, STEPS, small_llama, texts
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.core.codec_names import CODECS, RAW
from sglang_cake.demo.sglang_server import generate

DTYPE = "bfloat16"
NEW_TOKENS = 4
RATIOS = ("faster_than_load", "faster_than_compute", "over_better_single", "of_raw")
KEY_CHARS = 64  # names of block files
COMPUTE, BASE = "compute", f"{RAW} auto"  # arms that every codec is set beside
FULL = {
    "codecs": "raw,int8,kvquant3,cachegen2",
    "tokens": 3584,
    "bandwidths": [0.25, 1.0, 4.0],
    "repeats": 5,
    "name": "cpu",
}
SMALL = {**FULL, "tokens": 1024, "bandwidths": [1.0], "repeats": 1, "name": "small"}
WAIT_S = 60.0
KEY = {"Authorization": "Bearer of-the-benchmark"}


def loadable_bytes(folder: Path, prompt_tokens: int) -> int:
    """What a link has to carry of a prompt of which all is stored: payloads of the full blocks
    before the last token, which is computed in any case."""
    sizes = [
        path.stat().st_size - HEADER_BYTES
        for path in folder.rglob("*")
        if len(path.name) == KEY_CHARS and path.is_file()
    ]
    return sum(sizes) * ((prompt_tokens - 1) // BLOCK_TOKENS) // len(sizes)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__, FULL)
    parser.add_argument("--bandwidths", type=stats.numbers, help="ratios, default 0.25,1,4")
    return checked(parser, argv, "codec-ttft", full=FULL, small=SMALL)


def parser_of(text: str | None, full: Mapping[str, Any]) -> argparse.ArgumentParser:
    """What this and `bench_codec_share` are told alike."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few tokens, cells and runs")
    parser.add_argument("--codecs", help=f"default {full['codecs']}")
    parser.add_argument("--tokens", type=int, help=f"of the prompt, default {full['tokens']}")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help=f"counted runs (default {full['repeats']})"
    )
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    return parser


def checked(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    benchmark: str,
    *,
    full: Mapping[str, Any],
    small: Mapping[str, Any],
) -> argparse.Namespace:
    """The arguments, complete; it ends the program where they make no sense."""
    args = parser.parse_args(argv)
    fill(args, small if args.small else full)
    args.codecs = args.codecs.split(",")
    args.out = args.out or facts.RESULTS / f"{benchmark}-{args.name}.json"
    if RAW not in args.codecs or not set(args.codecs) <= set(CODECS):
        parser.error(f"codecs are some of {', '.join(CODECS)}; raw must be among them")
    args.codecs.sort(key=lambda codec: codec != RAW)
    if args.tokens % BLOCK_TOKENS or args.tokens >= CONFIG["max_position_embeddings"]:
        parser.error(f"needs a multiple of {BLOCK_TOKENS} tokens, less than the model can read")
    return args


@dataclass(slots=True)
class Bench:
    """One run: the servers that there are now, by arm: `compute`, or codec and mode."""

    varied: ClassVar[str] = "bandwidth_ratio"
    chunk_tokens: ClassVar[int] = 256

    args: argparse.Namespace
    work: Path
    prompt: list[int]
    progress: ProgressLog
    arms: dict[str, FrozenServer] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)  # that may be loaded, by codec
    balanced: float = 0.0  # bytes per second

    @contextlib.contextmanager
    def arm(self, name: str, codec: str, mode: str) -> Iterator[FrozenServer]:
        """A server, frozen, until the end of the block."""
        flags = servers.common_flags(self.chunk_tokens, len(self.prompt))
        flags[flags.index("--dtype") + 1] = DTYPE
        flags += [*servers.cake_flags(self._url(codec), mode), "--cake-codec", codec]
        flags += ["--admin-api-key", KEY["Authorization"].removeprefix("Bearer ")]
        log = self.work / f"server-{name.replace(' ', '-')}.log"
        with FrozenServer(OUT, flags, log=log, **self.settings()) as server:
            self.progress.say(f"{name}: healthy after {server.start_s:.1f} s")
            self.arms[name] = server
            try:
                yield server
            finally:
                del self.arms[name]

    def cells(self) -> Iterator[dict[str, Any]]:
        """Every codec at every point, raw first: it says what balanced is."""
        with self.arm(COMPUTE, RAW, COMPUTE) as compute, self.arm(BASE, RAW, "auto") as base:
            self.fill(RAW, base)
            compute_s = min(self.cold(compute) for _ in range(3))
            self.balanced = self.stored_bytes[RAW] / compute_s
            self.progress.say(
                f"computing takes {compute_s:.3f} s: balanced at {self.balanced / 1e6:.2f} MB/s"
            )
            for codec in self.args.codecs:
                with contextlib.ExitStack() as stack:
                    if codec != RAW:
                        auto = stack.enter_context(self.arm(f"{codec} auto", codec, "auto"))
                        self.fill(codec, auto)
                    stack.enter_context(self.arm(f"{codec} load", codec, "load"))
                    for point in self.points():
                        yield self.cell(codec, point)

    def settings(self) -> dict[str, Any]:
        """Of every server, beside its flags."""
        return {}

    def points(self) -> Sequence[float]:
        """What is varied takes these values."""
        return list(self.args.bandwidths)

    def go_to(self, point: float) -> float:
        """Have it so for all servers; returns the link's ratio to the balanced one."""
        self.pace(point)
        return point

    def fill(self, codec: str, server: FrozenServer) -> None:
        """Have the prompt stored, and note the bytes of it."""
        self.cold(server)
        at_least = BLOCK_TOKENS * len(self.prompt)
        with server.thawed():
            servers.wait_until_steady(self.work / codec, at_least)
        self.stored_bytes[codec] = loadable_bytes(self.work / codec, len(self.prompt))
        self.progress.say(f"{codec}: {self.stored_bytes[codec] / 1e6:.2f} MB")

    def pace(self, ratio: float) -> None:
        """Every server's link gets another bandwidth."""
        for arm, server in self.arms.items():
            if arm == COMPUTE:
                continue
            url = self._url(arm.partition(" ")[0])
            url += f"?bandwidth={ratio * self.balanced / 1e6:.4f}MB/s"
            with server.thawed() as base:
                answer = requests.put(
                    f"{base}/cake/store", headers=KEY, json={"store": url}, timeout=WAIT_S
                )
                answer.raise_for_status()

    def cold(self, server: FrozenServer) -> float:
        """Empty its cache and send the prompt; seconds to the first token."""
        with server.thawed() as base:
            url = f"{base}/flush_cache?timeout={WAIT_S:g}"
            requests.post(url, headers=KEY, timeout=WAIT_S).raise_for_status()
            return generate(base, self.prompt, NEW_TOKENS).ttft_s

    def cell(self, codec: str, point: float) -> dict[str, Any]:
        """One codec at one point, beside `compute` and raw KV: all arms that there are."""
        ratio = self.go_to(point)
        for server in self.arms.values():
            self.cold(server)
        runs: dict[str, list[float]] = {arm: [] for arm in self.arms}
        names = list(self.arms)
        for repeat in range(self.args.repeats):
            first = repeat % len(names)
            for arm in names[first:] + names[:first]:
                runs[arm].append(self.cold(self.arms[arm]))
        ttft_s = {arm: statistics.median(times) for arm, times in runs.items()}
        load_s, auto_s = ttft_s[f"{codec} load"], ttft_s[f"{codec} auto"]
        self.progress.say(f"{codec}, {self.varied} {point:g}: {auto_s:.3f} s")
        return {
            "codec": codec,
            self.varied: point,
            "ttft_s": {arm: round(s, 4) for arm, s in ttft_s.items()},
            "runs_s": {arm: [round(s, 4) for s in times] for arm, times in runs.items()},
            "link_limit_s": round(self.stored_bytes[codec] / (ratio * self.balanced), 4),
            "faster_than_load": round(load_s / auto_s, 3),
            "faster_than_compute": round(ttft_s[COMPUTE] / auto_s, 3),
            "over_better_single": round(auto_s / min(load_s, ttft_s[COMPUTE]), 3),
            "of_raw": round(auto_s / ttft_s[BASE], 3),
        }

    def _url(self, codec: str) -> str:
        return (self.work / codec).as_uri()


def text(cells: Sequence[dict[str, Any]]) -> str:
    """One row for each bandwidth and codec."""
    heads = ["ratio", "codec", COMPUTE, "load", "auto", "link"]
    heads += ["vs load", "vs compute", "of the better", "of raw"]
    rows = []
    for cell in sorted(cells, key=lambda cell: cell["bandwidth_ratio"]):
        codec = cell["codec"]
        times = [cell["ttft_s"][arm] for arm in (COMPUTE, f"{codec} load", f"{codec} auto")]
        rows.append(
            [
                f"{cell['bandwidth_ratio']:g}",
                codec,
                *(f"{s:.3f}" for s in (*times, cell["link_limit_s"])),
                *(f"{cell[name]:.2f}" for name in RATIOS),
            ]
        )
    return table(heads, rows, right=range(2, len(heads)))


def prompt_of(model: Path, tokens: int) -> list[int]:
    """Text that the model was not trained on; one token more than is stored."""
    tokenizer = AutoTokenizer.from_pretrained(model).backend_tokenizer
    files = tokenizer.encode_batch(list(texts(held_out=True)))
    return [token for file in files for token in file.ids][: tokens + 1]


def run(kind: type[Bench], args: argparse.Namespace, benchmark: str) -> dict[str, Any]:
    """All cells; the result file is written after each. Returns its content."""
    servers.unwind_when_told_to_end()
    result = facts.header(
        benchmark, model="small Llama", dtype=DTYPE, block_tokens=BLOCK_TOKENS,
        tokens=args.tokens, repeats=args.repeats, codecs=args.codecs,
    )  # fmt: skip
    prompt = prompt_of(small_llama(OUT, STEPS), args.tokens)
    with servers.fresh_folder(benchmark) as work:
        bench = kind(args, work, prompt, ProgressLog())
        result["cells"] = []
        for cell in bench.cells():
            result["cells"].append(cell)
            result |= {"stored_bytes": bench.stored_bytes, "balanced_bytes_per_s": bench.balanced}
            facts.write(args.out, result)  # what there is, should this be stopped
    facts.finish(args.out, result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    result = run(Bench, args, "codec-ttft")
    print("", text(result["cells"]), f"result: {facts.shown(args.out)}", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
