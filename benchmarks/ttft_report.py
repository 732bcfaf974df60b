"""What the runs of `bench_ttft` amount to: a cell per (length, chunk, bandwidth), and a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import stats
from sglang_cake.cli.demo_report import Arms, evaluate
from sglang_cake.demo.sglang_server import Reply

TOLERANCE = 1.02  # `both` may take this much of the best single way before it counts as beaten
PEER_SOURCES = ("device", "host", "storage")
Peers = Mapping[str, Sequence[Reply]]


def cell(
    arms: Arms,
    peers: Peers,
    *,
    chunk: int,
    ratio: float,
    bandwidth: float,
    prompt_bytes: int,
) -> dict[str, Any]:
    """All numbers of one cell; times are medians over the runs, which are kept beside them.

    Args:
        bandwidth: infinite, as is `ratio`, without a limit; both are None in the result then.
    """
    result = evaluate(arms, bandwidth=bandwidth, prompt_bytes=prompt_bytes)
    ttft_s = {name: round(value, 4) for name, value in result["ttft_s"].items()}
    outputs = {tuple(reply.output_ids) for arm in arms for reply in arm.replies}
    found = {name: _peer(replies, outputs) for name, replies in peers.items()}
    rivals = {"compute": ttft_s["compute"], "load": ttft_s["load"]}
    rivals |= {name: peer["ttft_s"]["median"] for name, peer in found.items()}
    return {
        "prompt_tokens": result["prompt_tokens"],
        "stored_tokens": result["stored_tokens"],
        "chunk_tokens": chunk,
        "bandwidth_ratio": ratio if math.isfinite(ratio) else None,
        "bandwidth_bytes_per_s": result["bandwidth_bytes_per_s"],
        "link_limit_s": round(result["link_limit_s"], 4),
        "ttft_s": ttft_s,
        "runs_s": {arm.mode: [round(t, 4) for t in arm.ttft_s] for arm in arms},
        "ideal_s": round(result["ideal_s"], 4),
        "over_ideal": round(result["over_ideal"], 4),
        "sigma": round(stats.sigma(ttft_s["both"], ttft_s["load"], ttft_s["compute"]), 4),
        "sigma_ideal": round(stats.sigma(result["ideal_s"], ttft_s["load"], ttft_s["compute"]), 4),
        "speedup": {name: round(value / ttft_s["both"], 3) for name, value in rivals.items()},
        "computed_tokens": result["computed_tokens"],
        "loaded_tokens": result["loaded_tokens"],
        "ideal_meet_token": result["ideal_meet_token"],
        "same_tokens": result["same_tokens"],
        "peers": found,
        "beaten_by": beaten_by(ttft_s["both"], rivals),
    }


def beaten_by(both_s: float, rivals: Mapping[str, float]) -> list[str]:
    """Which ways were faster than both at once, by more than the tolerance."""
    return [name for name, rival_s in rivals.items() if both_s > TOLERANCE * rival_s]


def _peer(replies: Sequence[Reply], outputs: set[tuple[int, ...]]) -> dict[str, Any]:
    last = replies[-1].meta
    details = last.get("cached_tokens_details") or {}
    return {
        "ttft_s": stats.spread([reply.ttft_s for reply in replies]),
        "runs_s": [round(reply.ttft_s, 4) for reply in replies],
        "cached_tokens": [reply.meta["cached_tokens"] for reply in replies],
        "last_cached_from": {name: details.get(name, 0) for name in PEER_SOURCES},
        "same_tokens": all(tuple(reply.output_ids) in outputs for reply in replies),
    }


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """One row a cell; seconds. A `!` marks what beat both at once."""
    peers = sorted({name for cell in cells for name in cell["peers"]})
    heads = ["compute", "load", "both", "T*", "T/T*", "sigma", "sigma*", "link", *peers]
    lines = [
        "seconds to the first token, medians; ! = faster than both at once (by more than "
        f"{TOLERANCE - 1:.0%}); link = what the stored bytes need to cross it",
        "",
        f"{'tokens':>7} {'chunk':>6} {'MB/s':>7} {'ratio':>6}"
        + "".join(f"{head:>{max(9, len(head) + 2)}}" for head in heads),
    ]
    for cell in cells:
        values = [
            _marked(cell, "compute"),
            _marked(cell, "load"),
            f"{cell['ttft_s']['both']:.2f} ",
            f"{cell['ideal_s']:.2f} ",
            f"{cell['over_ideal']:.3f}",
            f"{cell['sigma']:.3f}",
            f"{cell['sigma_ideal']:.3f}",
            f"{cell['link_limit_s']:.2f} ",
            *(_marked(cell, name) for name in peers),
        ]
        lines.append(
            f"{cell['prompt_tokens']:7,} {cell['chunk_tokens']:6} {_link(cell)}"
            + "".join(
                f"{value:>{max(9, len(head) + 2)}}"
                for head, value in zip(heads, values, strict=True)
            )
        )
    return "\n".join([*lines, "", *_remarks(cells)])


def _link(cell: Mapping[str, Any]) -> str:
    if cell["bandwidth_ratio"] is None:
        return f"{'no limit':>14}"
    return f"{cell['bandwidth_bytes_per_s'] / 1e6:7.2f} {cell['bandwidth_ratio']:6g}"


def _marked(cell: Mapping[str, Any], name: str) -> str:
    mark = "!" if name in cell["beaten_by"] else " "
    if name in cell["ttft_s"]:
        return f"{cell['ttft_s'][name]:.2f}{mark}"
    peer = cell["peers"].get(name)
    return f"{peer['ttft_s']['median']:.2f}{mark}" if peer else "- "


def _remarks(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cells:
        return []
    over = stats.spread([cell["over_ideal"] for cell in cells])
    lost = [cell for cell in cells if cell["beaten_by"]]
    differing = [cell for cell in cells if not cell["same_tokens"]]
    return [
        f"T/T*: median {over['median']:.3f}, {over['min']:.3f} to {over['max']:.3f} in "
        f"{len(cells)} cells; both at once was beaten in {len(lost)} of them",
        "output tokens of the three arms: "
        + (f"DIFFERENT in {len(differing)} cells" if differing else "the same in every cell"),
    ]
