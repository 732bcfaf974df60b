"""`sglang-cake store serve|ls|stat|describe|verify|gc|clear|cp|bench`: a server, and tools for any
store, by its URL.

The tools use the same interface as servers, and are safe while servers use the store.
"""

from typing import Any

from sglang_cake.cli.store_bench import add_bench
from sglang_cake.cli.store_cp import add_cp
from sglang_cake.cli.store_maintenance import add_clear, add_gc, add_verify
from sglang_cake.cli.store_serve import add_serve_parser
from sglang_cake.cli.store_show import add_describe, add_ls, add_stat


def add_parser(subparsers: Any) -> None:
    """Add `store` to the command line."""
    parser = subparsers.add_parser(
        "store",
        help="serve, look at, check, shrink, copy and measure a KV store",
        description=__doc__,
    )
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    add_serve_parser(tools)
    for add in (add_ls, add_stat, add_describe, add_verify, add_gc, add_clear, add_cp, add_bench):
        add(tools)
