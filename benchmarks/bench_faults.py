"""Stored prompts while the link to the store is faulty, beside the same prompts without a store.

    python -m benchmarks faults [--small] [--kinds http,s3] [--modes auto,load] [--faults A,B]
                                [--out FILE]

A prompt is stored; its link to the store, whose bandwidth is the balanced one (loading the prompt
takes as long as computing it), is a proxy that spoils answers. For every fault of
`benchmarks.harness.fault_proxy`:

    during  the fault begins when a quarter of the blocks has been answered for
    later   the next request, while the fault lasts: lookups and writes are hit as well
    new     a prompt that is not stored, while the fault lasts
    miss    the same prompt on a server of SGLang without the plugin, in the same round

`ratio` is the time to the first token beside `miss`, the median of rounds. `steps` is how much
longer than `miss` it took, in prefill steps of `--chunk` tokens; 1 is the bound that the design
states for `--cake-mode auto`, and what is below 0 was won. `said` is the fault that the server's
log names. All answers must have the same tokens. `none` is a link without a fault.
"""

import argparse
import contextlib
import io
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import facts, servers
from benchmarks.bench_stores import KEYS, http_store, s3_store
from benchmarks.command_line import fill, parser_of
from benchmarks.harness.fault_proxy import FAULTS, READ_METHODS, FaultProxy
from benchmarks.servers import BLOCK_TOKENS, STOCK, FrozenServer
from sglang_cake.cli import main as sglang_cake
from sglang_cake.cli.demo import CPU_MODEL, ProgressLog
from sglang_cake.cli.text_tables import table
from sglang_cake.demo.sglang_server import Reply
from sglang_cake.simulator.shapes import kv_token_bytes

NEW_TOKENS = 4
NONE = "none"
STORES = {"http": http_store, "s3": s3_store}
MODES = ("auto", "load")
WHEN = ("during", "later", "new")
HEAL_S = 120.0  # until a store is used again
# Of `stores.circuit_breaker`, and of the loads that the coordinator gives up.
SAID = re.compile(r": [a-z]+ (?:fail \(([a-z ]+):|are (forbidden)|(timed out): no block)")
FULL = {"tokens": 2048, "chunk": 256, "repeats": 1, "name": "cpu"}
SMALL = {"tokens": 2048, "chunk": 256, "repeats": 1, "name": "small"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_faults", __doc__)
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--kinds", default=",".join(STORES), help="stores (%(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="(%(default)s)")
    parser.add_argument("--faults", default=",".join((NONE, *FAULTS)), help="default: all")
    parser.add_argument("--tokens", type=int, help="of the prompt (default 2048)")
    parser.add_argument("--chunk", type=int, help="tokens of a step (default 256)")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds (default 1)")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(argv)
    fill(args, SMALL if args.small else FULL)
    args.out = args.out or facts.RESULTS / f"faults-{args.name}.json"
    for name, known in (("kinds", STORES), ("modes", MODES), ("faults", (NONE, *FAULTS))):
        chosen = _parts(getattr(args, name))
        setattr(args, name, chosen)
        if not chosen or not {*chosen} <= {*known}:
            parser.error(f"--{name}: write some of {', '.join(known)}")
    return args


def _parts(text: str) -> list[str]:
    # The name of a fault may have a comma in it.
    whole = re.sub("(50[03]), ", r"\1; ", text)
    return [part.strip().replace("; ", ", ") for part in whole.split(",") if part.strip()]


@dataclass(slots=True)
class Bench:
    """One run of the benchmark."""

    args: argparse.Namespace
    work: Path
    model: Path
    progress: ProgressLog
    prompt: list[int]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def server(self, name: str, flags: Sequence[str], env: dict[str, str]) -> FrozenServer:
        """One that is not started yet."""
        common = servers.common_flags(self.args.chunk, self.args.tokens)
        return FrozenServer(
            self.model,
            [*common, *flags],
            log=self.work / f"{name}.log",
            env={"XDG_CACHE_HOME": str(self.work / "cache"), **env},
        )

    @property
    def master(self) -> str:
        """Where all blocks are, to be copied from."""
        return (self.work / "master").as_uri() + "?min_free=0"

    def fill(self) -> float:
        """Store the prompt; returns the balanced bandwidth, in bytes per second."""
        blocks = (self.args.tokens - 1) // BLOCK_TOKENS
        size_bytes = blocks * BLOCK_TOKENS * kv_token_bytes(self.model, servers.DTYPE)
        with self.server("master", servers.cake_flags(self.master, "compute"), {}) as server:
            server.cold(self.prompt, NEW_TOKENS)
            with server.thawed():
                servers.wait_until_steady(self.work / "master", size_bytes)
            ttft_s = min(server.cold(self.prompt, NEW_TOKENS).ttft_s for _ in range(2))
        self.progress.say(f"computing {self.args.tokens:,} tokens takes {ttft_s:.2f} s")
        return size_bytes / ttft_s

    def measure(self, link: "Link", miss: FrozenServer, labels: dict[str, str]) -> None:
        """One round of one fault."""
        fault, hit = FAULTS.get(labels["fault"]), link.server
        self.heal(link)
        before = len(hit.logs())
        spare = (self.args.tokens - 1) // BLOCK_TOKENS // 4
        link.proxy.spoil(fault, methods=READ_METHODS, spare=spare)
        during = hit.cold(self.prompt, NEW_TOKENS)
        link.proxy.spoil(fault)
        new_prompt = servers.random_prompt(self.args.tokens, seed=100 + len(self.runs))
        prompts = {"later": self.prompt, "new": new_prompt}
        if len(self.runs) % 2:  # the first one hits a store that is still in use
            prompts = dict(reversed(prompts.items()))
        lasting = {name: hit.cold(prompt, NEW_TOKENS) for name, prompt in prompts.items()}
        said = sorted({"".join(found) for found in SAID.findall(hit.logs()[before:])})
        link.proxy.spoil(None)
        plain = miss.cold(self.prompt, NEW_TOKENS)
        steps = self.args.tokens / self.args.chunk
        found = run(labels, plain, {"during": during, **lasting}, said, steps)
        self.runs.append(found)
        self.progress.say(", ".join([*labels.values(), str(found["steps"]), *said]))

    def heal(self, link: "Link") -> None:
        """Until the store has all blocks, and is used."""
        link.proxy.spoil(None)
        with contextlib.redirect_stdout(io.StringIO()):
            if sglang_cake(["store", "cp", self.master, link.direct]) != 0:
                raise SystemExit("the blocks could not be copied into the store")
        until_s = time.monotonic() + HEAL_S
        while not link.server.cold(self.prompt, NEW_TOKENS).cake.get("loaded_tokens"):
            if time.monotonic() > until_s:
                raise SystemExit(f"the store was not used again within {HEAL_S:.0f} s")
            time.sleep(0.5)


@dataclass(slots=True)
class Link:
    """A server, and the faulty link to its store."""

    server: FrozenServer
    proxy: FaultProxy
    direct: str  # the store's URL, past the link


@contextlib.contextmanager
def linked(bench: Bench, kind: str, mode: str, bytes_per_s: float) -> Iterator[Link]:
    """A store of this kind, empty, and a server in this mode."""
    with STORES[kind](bench.work / f"{kind}-{mode}") as url:
        port = urlsplit(url.partition("endpoint=")[2].partition("&")[0] or url).port
        assert port is not None
        proxy = FaultProxy(port, bytes_per_s)
        try:
            flags = servers.cake_flags(url.replace(f":{port}", f":{proxy.port}"), mode)
            with bench.server(f"{kind}-{mode}", flags, KEYS) as server:
                yield Link(server, proxy, url)
        finally:
            proxy.close()


def run(
    labels: dict[str, str], plain: Reply, hits: dict[str, Reply], said: list[str], steps: float
) -> dict[str, Any]:
    """One round. Args: steps: that a miss takes."""
    step_s = plain.ttft_s / steps
    return {
        **labels,
        "said": said,
        "same_tokens": all(
            hit.output_ids == plain.output_ids for name, hit in hits.items() if name != "new"
        ),
        "ttft_s": {"miss": round(plain.ttft_s, 3)}
        | {name: round(hit.ttft_s, 3) for name, hit in hits.items()},
        "ratio": {name: round(hit.ttft_s / plain.ttft_s, 3) for name, hit in hits.items()},
        "steps": {
            name: round((hit.ttft_s - plain.ttft_s) / step_s, 2) for name, hit in hits.items()
        },
        "loaded": {name: hit.cake.get("loaded_tokens") for name, hit in hits.items()},
    }


def text(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each store, mode and fault: medians over rounds."""
    rows = []
    for kind, mode, fault in dict.fromkeys((r["kind"], r["mode"], r["fault"]) for r in runs):
        some = [r for r in runs if (r["kind"], r["mode"], r["fault"]) == (kind, mode, fault)]

        def of(what: str, when: str, some: Sequence[dict[str, Any]] = some) -> str:
            return f"{statistics.median(r[what][when] for r in some):.2f}"

        rows.append(
            [
                *(kind, mode, fault),
                *(of(what, when) for when in WHEN for what in ("ratio", "steps")),
                ", ".join(sorted({word for r in some for word in r["said"]})) or "-",
                "yes" if all(r["same_tokens"] for r in some) else "NO",
            ]
        )
    heads = ["store", "mode", "fault"]
    heads += [head for when in WHEN for head in (f"{when}/miss", "steps")]
    return table([*heads, "said", "same tokens"], rows, right=range(3, 9))


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 1 if an answer had other tokens."""
    args = parse_args(argv)
    servers.unwind_when_told_to_end()
    os.environ.update(KEYS)
    size = servers.SMALL_MODEL if args.small else CPU_MODEL
    result = facts.header(
        "faults",
        model=f"hidden {size['hidden']}, {size['layers']} layers",
        tokens=args.tokens,
        chunk_tokens=args.chunk,
        block_tokens=BLOCK_TOKENS,
        repeats=args.repeats,
    )
    with servers.fresh_folder("faults") as work:
        prompt = servers.random_prompt(args.tokens, seed=5)
        bench = Bench(args, work, servers.model(args.small), ProgressLog(), prompt)
        balanced = bench.fill()
        result["balanced_bytes_per_s"] = round(balanced)
        with bench.server("miss", [], STOCK) as miss:
            miss.cold(prompt, NEW_TOKENS)
            for kind in args.kinds:
                for mode in args.modes:
                    with linked(bench, kind, mode, balanced) as link:
                        for fault in args.repeats * args.faults:
                            labels = {"kind": kind, "mode": mode, "fault": fault}
                            bench.measure(link, miss, labels)
                            result["runs"] = bench.runs
                            facts.write(args.out, result)
    facts.finish(args.out, result)
    print("", text(bench.runs), "", sep="\n")
    return 0 if all(r["same_tokens"] for r in bench.runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
