"""`sglang-cake trace replay`: hit ratios and seconds saved by eviction policies on a request trace.

The offline optimum stands beside the results: no policy can exceed it. It writes every block, and
so is no limit with --admit, where it is left out.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from sglang_cake.cli.text_tables import count_text, table
from sglang_cake.core.errors import ConfigError
from sglang_cake.simulator.eviction_replay import (
    SHAPES,
    BeladyPolicy,
    Replay,
    ReplayCounts,
    SavedTime,
    seconds_bound,
)
from sglang_cake.simulator.request_traces import Trace, read_trace
from sglang_cake.stores.eviction import POLICIES, new_policy
from sglang_cake.stores.eviction.policy import EvictionPolicy


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="replay recorded requests against eviction policies",
        description="Reads traces of Mooncake, of Qwen-Bailian ('KVCache Cache in the Wild'), and "
        "those that a server records with --cake-record-trace; plain or .zst.",
    )
    commands = parser.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        help="count the hits of eviction policies",
        description="Replays the requests in the order of the file on one tier of C blocks. A hit "
        "is a resident block without a missing block before it. Islands are all resident blocks. "
        "Seconds saved are those of time to first token when a prompt is computed and loaded at "
        "once.",
    )
    replay.add_argument("trace", type=Path, metavar="TRACE", help="a file of JSON lines, or .zst")
    replay.add_argument(
        "--policy",
        default=",".join(POLICIES),
        help="one or more, as lru,cake (%(default)s)",
    )
    replay.add_argument(
        "--capacity", default="1000,4000,16000", help="blocks, one or more (%(default)s)"
    )
    replay.add_argument(
        "--shape", choices=SHAPES, default="8b", help="model and link of the seconds (%(default)s)"
    )
    replay.add_argument("--leaf", action="store_true", help="evict only the ends of prompts")
    replay.add_argument(
        "--told-turns",
        action="store_true",
        help="take the turns that the trace records; the default detects turns as a server does",
    )
    replay.add_argument(
        "--admit",
        type=float,
        default=0.0,
        metavar="N",
        help="as admit= of a file store's URL (%(default)s: every block is written)",
    )
    replay.add_argument(
        "--json", action="store_true", help="print an object, or a list for several results"
    )
    replay.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay the trace with each policy at each capacity, print the results and return 0.

    Raises:
        ConfigError: an argument is invalid, or the trace cannot be read.
    """
    policies = _parse_policies(args.policy)
    capacities = _parse_capacities(args.capacity)
    if not 0 <= args.admit < math.inf:
        raise ConfigError(f"--admit: {args.admit!r} is not possible, write a number from 0 on")
    trace = read_trace(args.trace)
    if trace.broken_off:
        text = f"{len(trace.broken_off)} (the first is line {trace.broken_off[0]})"
        print(f"warning: {args.trace}: broken lines skipped: {text}", file=sys.stderr)
    clock = SavedTime(SHAPES[args.shape], trace.block_tokens)
    rows = []
    for capacity_blocks in capacities:
        optimum = None if args.admit else _replay(trace, None, capacity_blocks, args, clock)
        bound_s = seconds_bound(trace, capacity_blocks, clock)
        for policy in policies:
            outcome = _replay(trace, policy, capacity_blocks, args, clock)
            rows.append(_row(policy, capacity_blocks, args.shape, outcome, optimum, bound_s))
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=2))
    else:
        print(_heading(args.trace, trace, args.shape))
        print(_table(rows))
    return 0


def _row(
    policy: str,
    capacity_blocks: int,
    shape: str,
    outcome: ReplayCounts,
    optimum: ReplayCounts | None,
    bound_s: float,
) -> dict[str, Any]:
    """The result of one policy at one capacity, as `--json` prints it.

    Args:
        shape: name of the model and link whose seconds are counted.
        optimum: of the offline optimum at that capacity; None: there is none.
        bound_s: upper bound on the seconds that any policy saves.
    """
    return {
        "policy": policy,
        "capacity_blocks": capacity_blocks,
        **outcome.figures(),
        "shape": shape,
        "seconds_saved": outcome.saved_s[0],
        "optimum_hit_ratio": None if optimum is None else optimum.figures()["hit_ratio"],
        "optimum_seconds_saved": None if optimum is None else optimum.saved_s[0],
        "seconds_saved_bound": bound_s,
    }


def _replay(
    trace: Trace,
    policy_name: str | None,
    capacity_blocks: int,
    args: argparse.Namespace,
    clock: SavedTime,
) -> ReplayCounts:
    """Args:
    policy_name: key of POLICIES; None: the offline optimum.
    """
    from tqdm import tqdm

    benefit = SHAPES[args.shape].benefit(trace.block_tokens)
    if policy_name is None:
        policy: EvictionPolicy = BeladyPolicy(trace)
    else:
        policy = new_policy(policy_name, benefit)
    replay = Replay(
        trace,
        policy,
        capacity_blocks,
        clocks=[clock],
        leaf=args.leaf,
        told_turns=args.told_turns,
        min_benefit_ratio=args.admit,
        benefit=benefit,
    )
    steps = tqdm(
        replay.steps(),
        total=len(trace.requests),
        desc=f"{policy_name or 'belady'} {capacity_blocks:,}",
        unit=" requests",
        leave=False,
        disable=None,  # no progress bar without a terminal
    )
    for _ in steps:
        pass
    return replay.outcome


def _parse_policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is not possible, allowed: {', '.join(POLICIES)}")
    return names


def _parse_capacities(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.isascii() and p.isdecimal() and len(p) < 13 and int(p) for p in parts):
        raise ConfigError(f"--capacity: {text!r} is not possible, write blocks, as 4000,8000")
    return [int(part) for part in parts]


def _heading(path: Path, trace: Trace, shape: str) -> str:
    unique = len({block for request in trace.requests for block in request.blocks})
    return (
        f"{path.name}: {len(trace.requests):,} requests, {trace.refs:,} references to {unique:,} "
        f"blocks of {trace.block_tokens} tokens; seconds for {shape}\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "blocks",
        "policy",
        "hits %",
        "2nd half %",
        "bytes %",
        "islands %",
        "of best %",
        "saved s",
        "bound s",
        "evictions",
        "us each",
    ]
    cells = [
        [
            count_text(row["capacity_blocks"]),
            row["policy"],
            f"{100 * row['hit_ratio']:.2f}",
            f"{100 * row['second_half_hit_ratio']:.2f}",
            f"{100 * row['byte_hit_ratio']:.2f}",
            f"{100 * row['island_hit_ratio']:.2f}",
            "-"
            if row["optimum_hit_ratio"] is None
            else f"{100 * row['hit_ratio'] / (row['optimum_hit_ratio'] or 1):.2f}",
            count_text(row["seconds_saved"]),
            count_text(row["seconds_saved_bound"]),
            count_text(row["evictions"]),
            f"{row['us_per_eviction']:.1f}",
        ]
        for row in rows
    ]
    return table(heads, cells, right=[0, *range(2, len(heads))])
