"""`sglang-cake trace`: what an eviction policy would have made of recorded requests."""

import argparse
from typing import Any

from sglang_cake.cli.trace_replay import add_replay


def add_parser(subparsers: Any) -> None:
    """Add `trace` and its sub-commands."""
    parser = subparsers.add_parser(
        "trace",
        help="replay recorded requests against eviction policies",
        description="Reads traces of Mooncake, of Qwen-Bailian ('KVCache Cache in the Wild'), and "
        "those that a server records with --cake-record-trace; plain or .zst.",
    )
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        dest="trace_command", metavar="COMMAND", required=True
    )
    add_replay(commands)
