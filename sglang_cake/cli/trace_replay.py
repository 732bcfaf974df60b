"""`sglang-cake trace replay`: hit ratios and seconds saved, beside what no policy can beat."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.cli.store_tables import count_text, table
from sglang_cake.errors import ConfigError
from sglang_cake.sim.offline import BeladyPolicy, seconds_bound
from sglang_cake.sim.replay import Outcome, Replay
from sglang_cake.sim.traces import Trace, read_trace
from sglang_cake.sim.ttft import SHAPES, SavedTime
from sglang_cake.store.eviction import POLICIES, new_policy
from sglang_cake.store.eviction.policy import ADMIT_ALL, AdmissionPolicy


def add_replay(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="count what policies would have kept",
        description="One tier of C blocks, requests in the order of the file. A hit is a leading "
        "block that is there; islands are all blocks that are. Seconds saved are those of time to "
        "first token when a prompt is computed and loaded at once.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file of JSON lines, or .zst")
    parser.add_argument(
        "--policy", default=",".join(POLICIES), help="one or more, by commas (%(default)s)"
    )
    parser.add_argument(
        "--capacity", default="1000,4000,16000", help="blocks, one or more (%(default)s)"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="8b", help="model and link of the seconds (%(default)s)"
    )
    parser.add_argument("--leaf", action="store_true", help="evict only the ends of prompts")
    parser.add_argument(
        "--told-turns",
        action="store_true",
        help="turns as the trace tells them, where it does, and not as a server finds them out",
    )
    parser.add_argument(
        "--admit",
        type=float,
        default=0.0,
        metavar="N",
        help="as admit= of a file store's URL (%(default)s: everything is written)",
    )
    parser.add_argument(
        "--json", action="store_true", help="an object, or a list of them if there are several"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    policies = _policies(args.policy)
    capacities = _capacities(args.capacity)
    if not 0 <= args.admit < float("inf"):
        raise ConfigError(f"--admit: {args.admit!r} is not possible, write a number from 0 on")
    trace = read_trace(args.trace)
    clock = SavedTime(SHAPES[args.shape], trace.block_tokens)
    results = []
    for capacity in capacities:
        best = _replayed(trace, "belady", capacity, args, clock)
        bound_s = seconds_bound(trace, capacity, clock)
        for policy in policies:
            outcome = _replayed(trace, policy, capacity, args, clock)
            results.append(Result(policy, capacity, args.shape, outcome, best, bound_s))
    if args.json:
        shown = [result.fields() for result in results]
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    else:
        print(_heading(args.trace, trace, args.shape))
        print(_table(results))
    return 0


@dataclass(frozen=True, slots=True)
class Result:
    """One policy at one capacity, beside the offline optimum there."""

    policy: str
    capacity_blocks: int
    shape: str
    outcome: Outcome
    best: Outcome
    bound_s: float

    def fields(self) -> dict[str, object]:
        """As `--json` names them."""
        out = self.outcome
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "refs": out.refs,
            "hits": out.hits,
            "hit_ratio": out.hit_ratio,
            "byte_hit_ratio": out.byte_hit_ratio,
            "second_half_hit_ratio": out.late_hit_ratio,
            "island_hit_ratio": out.island_hit_ratio,
            "shape": self.shape,
            "seconds_saved": out.saved_s[0],
            "written_blocks": out.written,
            "write_amplification": out.write_amplification,
            "evictions": out.evictions,
            "us_per_eviction": out.us_per_eviction,
            "optimum_hit_ratio": self.best.hit_ratio,
            "optimum_seconds_saved": self.best.saved_s[0],
            "seconds_saved_bound": self.bound_s,
        }


def _replayed(
    trace: Trace, policy: str, capacity: int, args: argparse.Namespace, clock: SavedTime
) -> Outcome:
    from tqdm import tqdm

    benefit = SHAPES[args.shape].benefit(trace.block_tokens)
    replay = Replay(
        trace,
        BeladyPolicy(trace) if policy == "belady" else new_policy(policy, benefit),
        capacity,
        clocks=[clock],
        leaf=args.leaf,
        told_turns=args.told_turns,
        admission=ADMIT_ALL if policy == "belady" else AdmissionPolicy(args.admit),
        benefit=benefit,
    )
    steps = tqdm(
        replay.steps(),
        total=len(trace.requests),
        desc=f"{policy} {capacity:,}",
        unit=" requests",
        leave=False,
        disable=None,  # no bar where nobody looks
    )
    for _ in steps:
        pass
    return replay.outcome


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is not possible, allowed: {', '.join(POLICIES)}")
    return names


def _capacities(text: str) -> list[int]:
    sizes = text.split(",")
    if not all(s.isascii() and s.isdecimal() and len(s) < 13 and int(s) for s in sizes):
        raise ConfigError(f"--capacity: {text!r} is not possible, write blocks, as 4000,8000")
    return [int(size) for size in sizes]


def _heading(path: Path, trace: Trace, shape: str) -> str:
    unique = len({block for request in trace.requests for block in request.blocks})
    return (
        f"{path.name}: {len(trace.requests):,} requests, {trace.refs:,} references to {unique:,} "
        f"blocks of {trace.block_tokens} tokens; seconds for {shape}\n"
    )


def _table(results: list[Result]) -> str:
    heads = ("blocks", "policy", "hits %", "2nd half %", "bytes %", "islands %")
    more = ("of best %", "saved s", "bound s", "evictions", "us each")
    rows = []
    for result in results:
        out = result.outcome
        ratios = (out.hit_ratio, out.late_hit_ratio, out.byte_hit_ratio, out.island_hit_ratio)
        share = out.hits / max(1, result.best.hits)
        rows.append(
            (
                count_text(result.capacity_blocks),
                result.policy,
                *(f"{100 * ratio:.2f}" for ratio in (*ratios, share)),
                *(count_text(value) for value in (out.saved_s[0], result.bound_s, out.evictions)),
                f"{out.us_per_eviction:.1f}",
            )
        )
    return table(heads + more, rows, right=[0, *range(2, 11)])
