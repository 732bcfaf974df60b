"""SGLang servers with Cake on one NVIDIA GPU: times, equal output, and what requests that decode
notice.

    python -m benchmarks.gpu.serve [--small] [--cases NAME,NAME] [--arms NAME,NAME] [--out FILE]

A case is a model and flags of SGLang; `default` has none. In each case, one server of each arm runs
after the other: `off` (no Cake), Cake's modes, and SGLang's HiCache. Every server computes each
prompt once, which fills its own store. Then the prompt comes again with an emptied cache.

bfloat16 gives other sums where a prompt is computed in other chunks, as Cake does where computing
and loading meet. How far answers may differ is therefore measured, in each case and at each length:
servers of the arms that only compute (`off`, `compute`) also get the beginning of the prompt first,
and then the prompt, whose chunks begin elsewhere then. Compared are the log probabilities of the
first token, of LOGPROBS_OF tokens.

Models are random: a Llama of the size of Llama-3-8B, so that a block has 16 MiB, and a DeepSeek-V2
with one latent row for a token. They are built on the GPU when they are first needed.
"""

import argparse
import math
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import bench_serving, facts, servers
from benchmarks.command_line import fill, parser_of
from benchmarks.documents import table
from benchmarks.gpu.check import result_file
from benchmarks.gpu.environment import asked
from benchmarks.harness.deepseek import build_deepseek
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.demo.models import build_llama, built_once
from sglang_cake.demo.sglang_server import Reply, SglangServer, flush_cache, generate
from sglang_cake.simulator.shapes import kv_token_bytes

START_TIMEOUT_S = 1800.0  # the first server compiles kernels
NEW_TOKENS = 32
LOGPROBS_OF = tuple(range(64))  # tokens of every model
# Shares of a prompt that the server computes before the rest. None is a border of chunks.
BEGINNINGS = (0.19, 0.43, 0.71, 0.93)
# Of the largest gap of answers that were computed in other chunks: Cake has several borders more.
MOST_GAPS = 2.0
COMPUTING = ("off", "compute")
CAKE = ("compute", "load", "auto")
NAMED_TIMEOUT_S = 300.0
LLAMA = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8}
SMALL_LLAMA = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2}
DEEPSEEK = {"hidden": 2048, "layers": 27, "heads": 16, "latent": 512, "head_dim": 128}
SMALL_DEEPSEEK = {"hidden": 512, "layers": 4, "heads": 4, "latent": 128, "head_dim": 64}
ARMS = ("off", "compute", "load", "auto", "hicache-best_effort", "hicache-wait_complete")
HICACHE_FLAGS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    *("--hicache-size", "24", "--hicache-write-policy", "write_through"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and flags. `attention_backend` None: SGLang's own choice."""

    model: str = "llama"
    flags: tuple[str, ...] = ()
    attention_backend: str | None = None


CASES = {
    "default": Case(),
    "page-64": Case(flags=("--page-size", "64")),
    "fp8": Case(flags=("--kv-cache-dtype", "fp8_e4m3")),
    "flashinfer": Case(attention_backend="flashinfer"),
    "mla": Case(model="deepseek"),
}
FULL: dict[str, Any] = {"lengths": [16384, 32768], "repeats": 3}
SMALL: dict[str, Any] = {"lengths": [4096], "repeats": 1}
# Of `sglang.bench_serving`: documents that come again, and answers long enough to have a p99.
LOAD: dict[str, Any] = {"groups": 4, "prompts": 4, "system": 12288, "output": 64, "rate": 2.0}
SMALL_LOAD: dict[str, Any] = {"groups": 2, "prompts": 2, "system": 2048, "output": 32, "rate": 2.0}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("gpu.serve", __doc__)
    parser.add_argument("--small", action="store_true", help="small models, one short prompt")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--link", metavar="RATE", help="bandwidth of Cake's store, e.g. 8GB/s")
    parser.add_argument("--flags", default="", help="for every server, e.g. '--log-level info'")
    parser.add_argument(
        "--out", type=Path, help="default benchmarks/results/gpu-serve-<device>.json"
    )
    args = parser.parse_args(argv)
    args.cases, args.arms = args.cases.split(","), args.arms.split(",")
    if unknown := (set(args.cases) - set(CASES)) | (set(args.arms) - set(ARMS)):
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not set(args.arms) & set(COMPUTING):
        parser.error("--arms needs off or compute: how far their answers differ is the limit")
    fill(args, SMALL if args.small else FULL)
    return args


def model_of(case: Case, *, small: bool) -> Path:
    """The case's model, built once."""
    size = {
        "llama": SMALL_LLAMA if small else LLAMA,
        "deepseek": SMALL_DEEPSEEK if small else DEEPSEEK,
    }[case.model]
    path = servers.WORK / f"gpu-{case.model}{'-small' if small else ''}"

    def build(building: Path) -> None:
        # In another process: PyTorch would keep the device memory that the servers need.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(_build, case.model, building, size).result()

    return built_once(path, build)


def _build(model: str, path: Path, size: dict[str, Any]) -> None:
    import torch

    build: Any = build_llama if model == "llama" else build_deepseek
    with torch.device("cuda"):  # where large models take seconds
        build(path, **size, dtype="bfloat16", max_tokens=65536)


def flags_of(arm: str, store: Path, link: str | None) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of an arm."""
    if arm == "off":
        return [], servers.STOCK
    if arm.startswith("hicache-"):
        policy = ["--hicache-storage-prefetch-policy", arm.removeprefix("hicache-")]
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
        return [*HICACHE_FLAGS, *policy], {**servers.STOCK, **env}
    url = store.as_uri() + (f"?bandwidth={link}" if link else "")
    return servers.cake_flags(url, arm), {}


def measure(
    name: str,
    arm: str,
    args: argparse.Namespace,
    work: Path,
    progress: ProgressLog,
    written: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """One arm of one case. Args: written: called with what is known so far."""
    case = CASES[name]
    model = model_of(case, small=args.small)
    store = work / "store"
    flags, env = flags_of(arm, store, args.link)
    server = SglangServer(
        model,
        [*case.flags, *flags, *args.flags.split()],
        env=servers.environment(env),
        log=work / "server.log",
        gpu=True,
        attention_backend=case.attention_backend,
        start_timeout_s=START_TIMEOUT_S,
    )
    found: dict[str, Any] = {"case": name, "arm": arm, "prompts": {}}
    with server:
        progress.say(f"{name}, {arm}: healthy after {server.start_s:.0f} s")
        if arm in CAKE:
            _until_named(server)
        for length in args.lengths:
            prompt = servers.random_prompt(length + 1, seed=length)
            cold = _asked(server, prompt)
            if arm not in COMPUTING:
                least = math.floor(0.9 * length * kv_token_bytes(model, "bfloat16"))
                if "fp8" in " ".join(case.flags):
                    least //= 2
                _until_stored(store, least, progress)
            replies = [_asked(server, prompt) for _ in range(args.repeats)]
            found["prompts"][length] = summary(cold, replies)
            if arm in COMPUTING:
                found["prompts"][length]["chunk_gap"] = max(
                    logprob_gap(cold, _asked(server, prompt, after=round(share * length)))
                    for share in BEGINNINGS
                )
            progress.say(f"{name}, {arm}, {length:,} tokens: {found['prompts'][length]}")
            written(found)
        try:
            found["load"] = under_load(server, model, work, small=args.small)
        except Exception as error:  # what was found before stays in the result
            progress.say(f"{name}, {arm}, under load: {error}")
            found["error"] = str(error)
    return found


def summary(cold: Reply, replies: Sequence[Reply]) -> dict[str, Any]:
    """Of one prompt: times, what was loaded, and whether the output is that of the first time."""
    return {
        "cold_s": round(cold.ttft_s, 4),
        "ttft_s": round(statistics.median(reply.ttft_s for reply in replies), 4),
        "runs_s": [round(reply.ttft_s, 4) for reply in replies],
        "loaded_tokens": [int(reply.cake.get("loaded_tokens", 0)) for reply in replies],
        "logprob_gap": max(logprob_gap(cold, reply) for reply in replies),
        "same_tokens": min(_same(cold.output_ids, reply.output_ids) for reply in replies),
    }


def logprob_gap(one: Reply, other: Reply) -> float:
    """Root mean square of the differences of the log probabilities of the first token.

    Behind another first token, all would differ.
    """
    pairs = zip(_first_logprobs(one), _first_logprobs(other), strict=True)
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs))


def under_load(server: SglangServer, model: Path, work: Path, *, small: bool) -> dict[str, float]:
    """`sglang.bench_serving` with documents that come again; the first run fills the store."""
    load = SMALL_LOAD if small else LOAD
    args = argparse.Namespace(**load)
    for _ in range(2):
        found = bench_serving.measure(
            server.base_url, model, work, args, workload="shared-prefix", rate=load["rate"]
        )
    return found


def text(results: Sequence[dict[str, Any]]) -> str:
    """One line for each arm and length."""
    rows = []
    for result in results:
        for length, found in result.get("prompts", {}).items():
            load = result.get("load", {})
            rows.append(
                [
                    result["case"],
                    result["arm"],
                    f"{int(length):,}",
                    f"{found['cold_s']:.3f}",
                    f"{found['ttft_s']:.3f}",
                    f"{statistics.median(found['loaded_tokens']):,.0f}",
                    f"{found['same_tokens']} of {NEW_TOKENS}",
                    f"{found['logprob_gap']:.2g}",
                    f"{found['chunk_gap']:.2g}" if "chunk_gap" in found else "",
                    f"{load.get('ttft_mean_ms', math.nan):,.0f}",
                    f"{load.get('itl_p99_ms', math.nan):,.1f}",
                ]
            )
        if "error" in result:
            said = result["error"].strip().splitlines()[-1].replace("|", "/")
            rows.append([result["case"], result["arm"], said, *[""] * 8])
    head = ["case", "arm", "tokens", "first, s", "again, s", "loaded", "same tokens"]
    head += [
        "gap of log probabilities",
        "of other chunks",
        "TTFT under load, ms",
        "ITL p99 under load, ms",
    ]
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every server ran, and its answers differ from those of the first time by at most
    MOST_GAPS times what other chunks make."""
    args = parse_args(argv)
    device = asked("name")
    args.out = args.out or result_file("gpu-serve", device, small=args.small)
    servers.unwind_when_told_to_end()
    progress = ProgressLog()
    header = facts.header(
        "gpu serve", gpu=device, small=args.small, link=args.link, flags=args.flags
    )
    results: list[dict[str, Any]] = []

    def written(found: dict[str, Any]) -> None:
        facts.write(args.out, {**header, "results": [*results, found]})

    for name in args.cases:
        for arm in args.arms:
            with servers.fresh_folder("gpu-serve") as work:
                try:
                    found = measure(name, arm, args, work, progress, written)
                except Exception as error:  # the next server may run
                    progress.say(f"{name}, {arm}: {error}")
                    found = {"case": name, "arm": arm, "error": str(error)}
            written(found)
            results.append(found)
    print("", text(results), "", sep="\n")
    progress.say(f"result: {facts.shown(args.out)}")
    return 0 if all(is_right(result, results) for result in results) else 1


def is_right(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> bool:
    """Whether an arm ran, and its answers are those of computing in some chunks.

    Args: results: of all arms; those that compute have the limits.
    """
    if "error" in result:
        return False
    limits: dict[int, float] = defaultdict(float)
    for other in results:
        if other["case"] == result["case"]:
            for length, found in other.get("prompts", {}).items():
                limits[length] = max(limits[length], MOST_GAPS * found.get("chunk_gap", 0.0))
    return all(
        found["logprob_gap"] <= limits[length] for length, found in result["prompts"].items()
    )


def _asked(server: SglangServer, prompt: Sequence[int], after: int = 0) -> Reply:
    """Args: after: tokens of the prompt that are computed before, in a request of their own."""
    flush_cache(server.base_url)
    if after:
        generate(server.base_url, prompt[:after], 1)
    return generate(server.base_url, prompt, NEW_TOKENS, logprobs_of=LOGPROBS_OF)


def _first_logprobs(reply: Reply) -> list[float]:
    (first, *_) = reply.meta["output_token_ids_logprobs"]
    return [float(entry[0]) for entry in first]


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _until_named(server: SglangServer) -> None:
    """Wait until the weights are hashed: no prompt is stored before. Raises: TimeoutError."""
    until_s = time.monotonic() + NAMED_TIMEOUT_S
    while "cake: namespace " not in server.logs():
        if time.monotonic() > until_s:
            raise TimeoutError("the digest of the weights is not known")
        time.sleep(0.5)


def _until_stored(store: Path, least_bytes: int, progress: ProgressLog) -> None:
    try:
        servers.wait_until_steady(store, least_bytes)
    except TimeoutError as error:
        progress.say(f"not all is stored: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
