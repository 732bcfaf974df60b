"""What the command lines of the benchmarks have in common."""

import argparse
from collections.abc import Mapping
from typing import Any


def parser_of(module: str, text: str | None) -> argparse.ArgumentParser:
    """Args: module: its name below `benchmarks`; text: its docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def fill(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Set what the command line does not set."""
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
