"""Time to first token by codec, for real: Cake's Table 7 (16, 8 and 3 bits) on this machine.

    python -m benchmarks codec_ttft [--small] [--codecs raw,int8,kvquant3] [--out FILE]

The small trained Llama (`train_small_llama`) reads text that it was not trained on, in bfloat16.
Every codec has two servers, one that loads only and one in mode auto; one more computes. They read
files of this machine behind a link of stated bandwidth, which is changed under their feet
(`/cake/store`). Bandwidths are ratios to the one at which loading raw KV takes as long as computing
it. Every run starts cold; arms take turns, and servers that are not measured are stopped. Each
server's first run of a bandwidth is not counted: costs are learned in it. `link` is the physical
limit: what the stored bytes need to cross the link.
"""

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from transformers import AutoTokenizer

from benchmarks import facts, servers, stats
from benchmarks.servers import BLOCK_TOKENS, FrozenServer
from benchmarks.train_small_llama import CONFIG, OUT, STEPS, small_llama, texts
from sglang_cake.cli.demo import Progress
from sglang_cake.cli.store_tables import table
from sglang_cake.codec_names import CODECS, RAW
from sglang_cake.testing.server import generate

DTYPE = "bfloat16"
NEW_TOKENS = 4
RATIOS = ("faster_than_load", "faster_than_compute", "over_better_single", "of_raw")
COMPUTE = "compute"
FULL = {"tokens": 3584, "bandwidths": [0.25, 1.0, 4.0], "repeats": 5, "name": "cpu"}
SMALL = {"tokens": 1024, "bandwidths": [1.0], "repeats": 1, "name": "small"}
WAIT_S = 60.0
KEY = {"Authorization": "Bearer of-the-benchmark"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="few tokens, one bandwidth and run")
    parser.add_argument("--codecs", default="raw,int8,kvquant3", help="raw must be among them")
    parser.add_argument("--tokens", type=int, help="of the prompt, default 3584")
    parser.add_argument("--bandwidths", type=stats.numbers, help="ratios, default 0.25,1,4")
    parser.add_argument("--repeats", type=int, metavar="N", help="counted runs (default 5)")
    parser.add_argument("--name", help="of the result file (default: cpu, or small)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    for name, value in (SMALL if args.small else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.codecs = args.codecs.split(",")
    args.out = args.out or facts.RESULTS / f"codec-ttft-{args.name}.json"
    if RAW not in args.codecs or not set(args.codecs) <= set(CODECS):
        parser.error(f"codecs are some of {', '.join(CODECS)}; raw must be among them")
    if args.tokens % BLOCK_TOKENS or args.tokens >= CONFIG["max_position_embeddings"]:
        parser.error(f"needs a multiple of {BLOCK_TOKENS} tokens, less than the model can read")
    return args


@dataclass(slots=True)
class Bench:
    """One run: its servers by arm, `compute`, or codec and mode."""

    args: argparse.Namespace
    work: Path
    prompt: list[int]
    progress: Progress
    arms: dict[str, FrozenServer] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)  # of the prompt, by codec
    balanced: float = 0.0  # bytes per second

    def start(self, stack: contextlib.ExitStack, arm: str, codec: str, mode: str) -> FrozenServer:
        """A server, frozen."""
        flags = servers.common_flags(256, len(self.prompt))
        flags[flags.index("--dtype") + 1] = DTYPE
        flags += [*servers.cake_flags(self._url(codec), mode), "--cake-codec", codec]
        flags += ["--admin-api-key", KEY["Authorization"].removeprefix("Bearer ")]
        log = self.work / f"server-{arm.replace(' ', '-')}.log"
        server = self.arms[arm] = FrozenServer(OUT, flags, log=log)
        stack.enter_context(server)
        self.progress.say(f"{arm}: healthy after {server.start_s:.1f} s")
        return server

    def fill(self, codec: str, server: FrozenServer) -> None:
        """Have the prompt stored."""
        self.cold(server)
        with server.thawed():
            held = servers.wait_until_steady(self.work / codec, BLOCK_TOKENS * len(self.prompt))
        self.stored_bytes[codec] = held
        self.progress.say(f"{codec}: {held / 1e6:.2f} MB")

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

    def cell(self, ratio: float) -> dict[str, Any]:
        """All arms at one bandwidth."""
        self.pace(ratio)
        for server in self.arms.values():
            self.cold(server)
        runs: dict[str, list[float]] = {arm: [] for arm in self.arms}
        names = list(self.arms)
        for repeat in range(self.args.repeats):
            first = repeat % len(names)
            for arm in names[first:] + names[:first]:
                runs[arm].append(self.cold(self.arms[arm]))
        ttft_s = {arm: statistics.median(times) for arm, times in runs.items()}
        found: dict[str, Any] = {
            "bandwidth_ratio": ratio,
            "ttft_s": {arm: round(s, 4) for arm, s in ttft_s.items()},
            "runs_s": {arm: [round(s, 4) for s in times] for arm, times in runs.items()},
        }
        for codec in self.args.codecs:
            load_s, auto_s = ttft_s[f"{codec} load"], ttft_s[f"{codec} auto"]
            found[codec] = {
                "link_limit_s": round(self.stored_bytes[codec] / (ratio * self.balanced), 4),
                "faster_than_load": round(load_s / auto_s, 3),
                "faster_than_compute": round(ttft_s[COMPUTE] / auto_s, 3),
                "over_better_single": round(auto_s / min(load_s, ttft_s[COMPUTE]), 3),
                "of_raw": round(auto_s / ttft_s[f"{RAW} auto"], 3),
            }
        return found

    def _url(self, codec: str) -> str:
        return (self.work / codec).as_uri()


def text(cells: Sequence[dict[str, Any]], codecs: Sequence[str]) -> str:
    """One row for each bandwidth and codec."""
    heads = ["ratio", "codec", COMPUTE, "load", "auto", "link"]
    heads += ["vs load", "vs compute", "of the better", "of raw"]
    rows = []
    for cell in cells:
        for codec in codecs:
            times = [cell["ttft_s"][arm] for arm in (COMPUTE, f"{codec} load", f"{codec} auto")]
            found = cell[codec]
            rows.append(
                [
                    f"{cell['bandwidth_ratio']:g}",
                    codec,
                    *(f"{s:.3f}" for s in (*times, found["link_limit_s"])),
                    *(f"{found[name]:.2f}" for name in RATIOS),
                ]
            )
    return table(heads, rows, right=range(2, len(heads)))


def prompt_of(model: Path, tokens: int) -> list[int]:
    """Text that the model was not trained on; one token more than is stored."""
    tokenizer = AutoTokenizer.from_pretrained(model).backend_tokenizer
    files = tokenizer.encode_batch(list(texts(held_out=True)))
    return [token for file in files for token in file.ids][: tokens + 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    result = facts.header(
        "codec-ttft", model="small Llama", dtype=DTYPE, block_tokens=BLOCK_TOKENS,
        tokens=args.tokens, repeats=args.repeats, codecs=args.codecs,
    )  # fmt: skip
    prompt = prompt_of(small_llama(OUT, STEPS), args.tokens)
    with servers.fresh_folder("codec-ttft") as work, contextlib.ExitStack() as stack:
        bench = Bench(args, work, prompt, Progress())
        compute = bench.start(stack, COMPUTE, RAW, COMPUTE)
        for codec in args.codecs:
            auto = bench.start(stack, f"{codec} auto", codec, "auto")
            bench.fill(codec, auto)
            bench.start(stack, f"{codec} load", codec, "load")
        compute_s = min(bench.cold(compute) for _ in range(3))
        bench.balanced = bench.stored_bytes[RAW] / compute_s
        bench.progress.say(
            f"computing takes {compute_s:.3f} s: balanced at {bench.balanced / 1e6:.2f} MB/s"
        )
        result |= {"stored_bytes": bench.stored_bytes, "balanced_bytes_per_s": bench.balanced}
        result["cells"] = []
        for ratio in args.bandwidths:
            result["cells"].append(bench.cell(ratio))
            bench.progress.say(f"{ratio:g}x measured")
            facts.write(args.out, result)
    result["machine"]["load_average_after"] = facts.machine()["load_average"]
    facts.write(args.out, result)
    print("", text(result["cells"], args.codecs), f"result: {facts.shown(args.out)}", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
