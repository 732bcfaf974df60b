"""The end-to-end demo on every codec: the same tokens, or how many of them, and how long they took.

    python -m benchmarks codec_demo [--codecs raw,int8] [--out FILE] [--docs]

`sglang-cake demo --codec X`, shortened to a prompt of 2,048 tokens and one run of each arm: a real
server computes the prompt and stores it with the codec, others load it, or get it from both ends,
over a link on which loading what was stored takes as long as computing it. With a codec that keeps
every bit all runs must give the same tokens. With another one the first tokens are counted that are
the same in every run. `auto` has no bound here: it keeps every bit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import demos, documents, facts
from benchmarks.codec_report import DOC
from benchmarks.command_line import parser_of
from sglang_cake.cli.text_tables import table
from sglang_cake.core.codec_names import AUTO, CHOICES, LOSSLESS

NEW_TOKENS = 16
KEPT = ("ttft_s", "same_tokens", "new_tokens", "agreed_tokens", "lossy", "stored_share")
KEPT_OF_BOTH = ("computed_tokens", "loaded_tokens", "over_ideal")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("bench_codec_demo", __doc__)
    parser.add_argument("--codecs", default=",".join(CHOICES), help="which (default: all)")
    parser.add_argument("--docs", action="store_true", help="write it into reports/codecs.md")
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "codec-demo-cpu.json")
    args = parser.parse_args(argv)
    args.codecs = args.codecs.split(",")
    if not set(args.codecs) <= set(CHOICES):
        parser.error(f"--codecs takes {', '.join(CHOICES)}")
    return args


def row(codec: str, said: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a demo. `as_promised`: who keeps every bit gave the same tokens, and nothing
    was called lossy; who does not said so."""
    exact = codec in (*LOSSLESS, AUTO)
    return {
        "codec": codec,
        **{name: said[name] for name in (*KEPT, *KEPT_OF_BOTH)},
        "as_promised": said["same_tokens"] and not said["lossy"] if exact else said["lossy"],
    }


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One line for each codec."""
    return [
        [
            found["codec"],
            f"{1 / found['stored_share']:.2f}",
            *(f"{found['ttft_s'][arm]:.2f}" for arm in demos.ARMS),
            f"{found['over_ideal']:.2f}",
            "all" if found["same_tokens"] else f"{found['agreed_tokens']} of {found['new_tokens']}",
            "yes" if found["as_promised"] else "NO",
        ]
        for found in rows
    ]


HEADS = ("codec", "ratio", "compute s", "load s", "both s", "T/T*", "tokens the same")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every codec did what it promises."""
    args = parse_args(argv)
    result = facts.header("codec-demo", prompt_tokens=2048, new_tokens=NEW_TOKENS, repeats=1)
    result["demos"] = []
    for codec in args.codecs:
        print(f"demo with {codec}", file=sys.stderr, flush=True)
        said = demos.demo("--codec", codec, "--new-tokens", str(NEW_TOKENS))
        result["demos"].append(row(codec, said))
        facts.write(args.out, result)  # what there is, should this be stopped
    facts.finish(args.out, result)
    lines = cells(result["demos"])
    print(table([*HEADS, "as promised"], lines, right=range(1, len(HEADS))))
    if args.docs:
        text = documents.table(HEADS, [line[:-1] for line in lines], right=True)
        documents.update({"demos": text}, DOC)
    return 0 if all(found["as_promised"] for found in result["demos"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
