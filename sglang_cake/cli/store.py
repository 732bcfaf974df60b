"""`sglang-cake store ...`: a store's server, and tools for stores."""

import argparse

from sglang_cake.cli.store_serve import add_serve_parser


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("store", help="serve and look after stores of blocks")
    commands = parser.add_subparsers(dest="store_command", metavar="COMMAND", required=True)
    add_serve_parser(commands)
