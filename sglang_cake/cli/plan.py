"""`sglang-cake plan`: will this help me, and by how much? Also when the answer is no.

From data sheets alone, before anything is installed: simulates stored prompts of several lengths on
the model, GPU and store that you name, on an idle machine.

    sglang-cake plan --model llama-3.1-8b --gpu h100 --store nvme
    sglang-cake plan --model ./my-model --gpu a100 --gpus 2 --store 32Gbps,2ms --prompt-tokens 32k
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from sglang_cake.cli.machine_args import Asked, add_machine, read_lengths, read_machine, times
from sglang_cake.cli.store_tables import size_text, table
from sglang_cake.read.cost import LoadCost

WORTH = 1.05  # gains below this are lost in what the model leaves out
WANTED = 1.2
SEARCHES = 40


def add_parser(subparsers: Any) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="whether Cake would help, and by how much, from data sheets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine(parser)
    parser.add_argument(
        "--prompt-tokens", default="1k,4k,16k,64k", metavar="N[,N...]", help="of stored prompts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer; 0 whatever it is. Raises: ConfigError for arguments that cannot be."""
    asked, lengths = read_machine(args), read_lengths(args.prompt_tokens)
    rows = [{"tokens": tokens, **_row(asked, tokens)} for tokens in lengths]
    result = {
        "answer": _answer(rows),
        "because": _because(asked, rows),
        "kv_bytes_per_token": asked.shape.kv_bytes,
        "prompts": rows,
    }
    print(json.dumps(result) if args.json else _text(result))
    return 0


def _row(asked: Asked, tokens: int) -> dict[str, Any]:
    found = {name: round(value, 5) for name, value in times(asked, tokens).items()}
    return {
        **found,
        "over_compute": round(found["compute"] / found["cake"], 3),
        "over_load": round(found["load"] / found["cake"], 3),
        "stored_bytes": tokens * asked.shape.kv_bytes,
    }


def _answer(rows: list[dict[str, Any]]) -> str:
    """yes: faster than computing and than loading alone; store: the store is what helps."""
    best = max(min(row["over_compute"], row["over_load"]) for row in rows)
    if max(row["over_compute"] for row in rows) < WORTH:
        return "no"
    return "yes" if best >= WORTH else "store"


def _because(asked: Asked, rows: list[dict[str, Any]]) -> str:
    longest = max(rows, key=lambda row: row["tokens"])
    best = max(rows, key=lambda row: row["over_compute"])
    answer = _answer(rows)
    if answer == "no":
        needed = _bandwidth_for(asked, longest["tokens"], WANTED)
        text = "no: this store is too slow beside this GPU; computing again is as fast"
        return text + (
            f". {WANTED:g}x faster at {longest['tokens']:,} tokens would need about "
            f"{size_text(needed)}/s"
            if needed
            else ", and a quicker one would not change it at these lengths"
        )
    gain = f"{best['over_compute']:.1f}x faster than computing at {best['tokens']:,} tokens"
    if answer == "store":
        return (
            f"yes, but any cache that loads would do: {gain}. The store is so much faster than the "
            "GPU that computing at the same time adds little"
        )
    both = max(rows, key=lambda row: min(row["over_compute"], row["over_load"]))
    return (
        f"yes: {gain}, and at {both['tokens']:,} tokens {both['over_load']:.2f}x faster than "
        f"loading alone and {both['over_compute']:.2f}x faster than computing alone"
    )


def _bandwidth_for(asked: Asked, tokens: int, gain: float) -> float | None:
    """Bytes per second of the first source at which Cake is `gain` times faster than computing."""
    block_bytes = asked.block_tokens * asked.shape.kv_bytes
    load = asked.machine.load

    def gains(bytes_per_s: float) -> bool:
        cost = LoadCost(load.latency_s, block_bytes / bytes_per_s)
        found = times(replace(asked, machine=replace(asked.machine, load=cost)), tokens)
        return found["compute"] / found["cake"] >= gain

    low, high = block_bytes / load.block_s, 1e13
    if not gains(high):
        return None
    for _ in range(SEARCHES):
        if high / low < 1.02:
            break
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def _text(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['tokens']:,}",
            *(f"{row[name]:.3f}" for name in ("compute", "load", "cake", "optimum")),
            f"{row['over_compute']:.2f}x",
            f"{row['over_load']:.2f}x",
            f"{row['computed_share']:.0%}",
            size_text(row["stored_bytes"]),
        ]
        for row in result["prompts"]
    ]
    heads = ["tokens", "compute", "load", "Cake", "optimum", "over compute", "over load"]
    heads += ["computed", "in the store"]
    return (
        f"{result['because']}.\n\nseconds to the first token of a stored prompt, idle machine, "
        "from data sheets (see --efficiency)\n\n" + table(heads, rows, right=range(9))
    )
