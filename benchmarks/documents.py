"""Markdown tables, and their places in documents."""

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """A table; `right`: all columns but the first are aligned to the right."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|---|" + ("---:|" if right else "---|") * (len(head) - 1),
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def update(texts: dict[str, str], path: Path) -> None:
    """Put every text between its markers, `<!-- NAME -->` and `<!-- end -->`."""
    document = path.read_text()
    for name, text in texts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        document = pattern.sub(lambda found, new=text: f"{found[1]}{new}\n{found[2]}", document)
    path.write_text(document)
