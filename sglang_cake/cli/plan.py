"""`sglang-cake plan`: whether Cake would help, and by how much; it also answers no.

It needs data sheets only, and nothing installed: it simulates stored prompts of several lengths on
the model, GPU and store that you name, on an idle machine.

    sglang-cake plan --model llama-3.1-8b --gpu h100 --store nvme
    sglang-cake plan --model ./my-model --gpu a100 --gpus 2 --store 32Gbps,2ms --prompt-tokens 32k
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from sglang_cake.cli.machine_args import (
    ServerSpec,
    add_machine_args,
    parse_lengths,
    parse_server,
    predict_ttft,
)
from sglang_cake.cli.text_tables import size_text, table
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.simulator.hardware import UNSURE, gpus_for, kv_capacity_tokens

SHOWN = ("compute", "load", "cake", "optimum")
MIN_GAIN = 1.05  # the model is not exact enough for smaller gains
WANTED_GAIN = 1.2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="whether Cake would help, and by how much, from data sheets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_args(parser)
    parser.add_argument(
        "--prompt-tokens", default="1k,4k,16k,64k", metavar="N[,N...]", help="of stored prompts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer and return 0. Raises: ConfigError for impossible arguments."""
    result = predict(args)
    print(json.dumps(result) if args.json else _text(result))
    return 0


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """The answer, as `--json` prints it. Raises: ConfigError for impossible arguments."""
    # The rates of computing are the uncertain part, unless they were measured.
    slower = (1.0,) if args.efficiency is not None else (1 / UNSURE, 1.0, UNSURE)
    ends = [parse_server(args, factor) for factor in slower]
    server = ends[len(ends) // 2]
    lengths = parse_lengths(args.prompt_tokens, "--prompt-tokens")
    reason = _impossible(server)
    refused = {n: reason or _left_out(server, n) for n in lengths}
    rows = [{"tokens": n, **_row(ends, n)} for n, why in refused.items() if why is None]
    if rows:
        answer, because = _answer(rows), _because(server, rows)
    else:
        answer, because = "no", f"no: {reason or refused[min(lengths)]}"
    return {
        "answer": answer,
        "because": because,
        "stored_bytes_per_token": round(server.stored_bytes_per_token),
        "read_bytes_per_token": round(server.read_bytes_per_token),
        "prompts": rows,
        "left_out": [{"tokens": n, "because": why} for n, why in refused.items() if why],
    }


def _impossible(server: ServerSpec) -> str | None:
    """Why such a server would not start, or not with cake."""
    shape, gpus = server.shape, server.gpus
    if reason := shape.refused or shape.unmodelled or shape.unshared(gpus):
        return reason
    if kv_capacity_tokens(shape, server.gpu, gpus) < server.block_tokens:
        weights = size_text(shape.parameters * shape.weight_bytes)
        return (
            f"{weights} of weights do not fit in {gpus} x {server.gpu.memory_gib:g} GiB with room "
            f"for KV; set --gpus {gpus_for(shape, server.gpu)} or more"
        )
    return None


def _left_out(server: ServerSpec, tokens: int) -> str | None:
    """Why a prompt of this length is not stored, or cannot be served."""
    if tokens < server.block_tokens:
        block = f"a block of {server.block_tokens:,} tokens"
        return f"a prompt shorter than {block} is not stored"
    if tokens >= server.shape.context_tokens:
        return f"the model's context ends at {server.shape.context_tokens:,} tokens"
    most_tokens = kv_capacity_tokens(server.shape, server.gpu, server.gpus)
    if tokens <= most_tokens:
        return None
    return f"KV of {max(0, most_tokens):,} tokens fits beside the weights"


def _row(ends: list[ServerSpec], tokens: int) -> dict[str, Any]:
    """Results for one length: for the middle, and under `range` for the ends, the fast device
    first."""
    found = [predict_ttft(server, tokens) for server in ends]
    over_compute = [one["compute"] / one["cake"] for one in found]
    over_load = [one["load"] / one["cake"] for one in found]
    middle = len(ends) // 2
    return {
        **{name: round(value, 5) for name, value in found[middle].items()},
        "over_compute": round(over_compute[middle], 3),
        "over_load": round(over_load[middle], 3),
        "range": {
            **{name: [round(one[name], 5) for one in (found[0], found[-1])] for name in SHOWN},
            "over_compute": [round(over_compute[0], 3), round(over_compute[-1], 3)],
            "over_load": [round(over_load[0], 3), round(over_load[-1], 3)],
        },
        "answer": _verdict(over_compute, over_load),
        "stored_bytes": round(tokens * ends[middle].stored_bytes_per_token),
    }


def _verdict(over_compute: list[float], over_load: list[float]) -> str:
    """The answer for one length. yes: faster than computing alone and than loading alone, at both
    ends of the range; store: only faster than computing alone; unsure: the ends disagree."""
    if max(over_compute) < MIN_GAIN:
        return "no"
    if min(over_compute) < MIN_GAIN:
        return "unsure"
    return "yes" if min(over_load) >= MIN_GAIN else "store"


def _answer(rows: list[dict[str, Any]]) -> str:
    """The answer for all lengths; partly: they differ."""
    found = {row["answer"] for row in rows}
    if found <= {"yes", "store"}:
        return "yes" if "yes" in found else "store"
    return found.pop() if len(found) == 1 else "partly"


def _because(server: ServerSpec, rows: list[dict[str, Any]]) -> str:
    longest = max(rows, key=lambda row: row["tokens"])
    answer = _answer(rows)
    if answer == "no":
        needed = _wanted_bandwidth(server, longest["tokens"])
        text = "no: this store is too slow beside this GPU; computing again is as fast"
        return text + (
            f". {WANTED_GAIN:g}x faster at {longest['tokens']:,} tokens would need about "
            f"{size_text(needed)}/s"
            if needed
            else ", and a quicker one would not change it at these lengths"
        )
    best = max(rows, key=lambda row: row["over_compute"])
    gain = f"{_range(best, 'over_compute')} faster than computing at {best['tokens']:,} tokens"
    if answer == "store":
        return (
            f"yes, but any cache that loads would do: {gain}. The store is so much faster than the "
            "GPU that computing at the same time adds little"
        )
    if answer == "unsure":
        return f"unsure: {gain}. Measure what prefill reaches, and set --efficiency"
    both = max(rows, key=lambda row: min(row["over_compute"], row["over_load"]))
    gains = (
        f"{gain}, and at {both['tokens']:,} tokens {_range(both, 'over_load')} faster than "
        f"loading alone and {_range(both, 'over_compute')} faster than computing alone"
    )
    if answer == "yes":
        return f"yes: {gains}"
    named = {
        text: [f"{row['tokens']:,}" for row in rows if row["answer"] in kinds]
        for text, kinds in (
            ("yes at", ("yes", "store")),
            ("no at", ("no",)),
            ("unsure at", ("unsure",)),
        )
    }
    where = "; ".join(f"{text} {', '.join(found)} tokens" for text, found in named.items() if found)
    return f"{where}: {gains}"


def _wanted_bandwidth(server: ServerSpec, tokens: int) -> float | None:
    """Bytes per second of the first store at which Cake is WANTED_GAIN times faster than
    computing."""
    block_bytes = server.block_tokens * server.read_bytes_per_token
    load = server.machine.load

    def gains(bytes_per_s: float) -> bool:
        cost = LoadCost(load.latency_s, block_bytes / bytes_per_s)
        found = predict_ttft(replace(server, machine=replace(server.machine, load=cost)), tokens)
        return found["compute"] / found["cake"] >= WANTED_GAIN

    low, high = block_bytes / load.block_s, 1e13
    if not gains(high):
        return None
    while high / low >= 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def _range(row: dict[str, Any], name: str) -> str:
    """A gain as text, `1.4 to 2.1x`."""
    low, high = (f"{value:.1f}" for value in sorted(row["range"][name]))
    return f"{low}x" if low == high else f"{low} to {high}x"


def _text(result: dict[str, Any]) -> str:
    if not result["prompts"]:
        return f"{result['because']}."
    left_out = "".join(
        f"\n{prompt['tokens']:,} tokens are left out: {prompt['because']}."
        for prompt in result["left_out"]
    )
    rows = [
        [
            f"{row['tokens']:,}",
            *("-".join(dict.fromkeys(f"{v:.3f}" for v in row["range"][name])) for name in SHOWN),
            f"{row['over_compute']:.2f}x",
            f"{row['over_load']:.2f}x",
            f"{row['computed_share']:.0%}",
            size_text(row["stored_bytes"]),
            row["answer"],
        ]
        for row in result["prompts"]
    ]
    heads = ["tokens", "compute", "load", "Cake", "optimum", "over compute", "over load"]
    heads += ["computed", "in the store", "worth it"]
    return (
        f"{result['because']}.{left_out}\n\nseconds to the first token of a stored prompt, idle "
        "machine, from data sheets; ratios: the middle of the range (see --efficiency)\n\n"
        + table(heads, rows, right=range(9))
    )
