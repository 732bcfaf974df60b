"""Writes the generated parts of benchmarks/README.md and of the pages in docs/:
`python docs/generate.py`.

With `--check` nothing is written, and the exit status is 1 if a page differs. `make docs` calls it
as a hook: a link out of docs/ becomes the path that it names, since the site has the pages alone.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from prometheus_client import REGISTRY

from sglang_cake.config import CakeConfig, as_flag
from sglang_cake.core.counters import Counters
from sglang_cake.integration.metrics import FailureMetrics, Metrics, StoreMetrics

DOCS = Path(__file__).parent


def settings() -> str:
    """A table of all settings."""
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for setting in fields(CakeConfig):
        default = "" if setting.default is None else f"`{setting.default}`"
        value, text = setting.metadata["value"], setting.metadata["text"]
        rows.append(f"| `{as_flag(setting.name)}` | `{value}` | {default} | {text} |")
    return "\n".join(rows)


def metrics() -> str:
    """A table of all metrics that a server publishes, without the labels of SGLang's own."""
    own = "model"  # stands for SGLang's labels
    labels = {own: ""}
    Metrics(Counters(), labels)
    FailureMetrics(labels, ["any"])
    StoreMetrics(labels, tiers=2)
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(REGISTRY.collect(), key=lambda family: family.name):
        if not family.name.startswith("sglang:cake_"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        # Not from its samples: a label may have no value before something happens.
        names = sorted({*REGISTRY._names_to_collectors[family.name]._labelnames} - {own})
        told = ", ".join(f"`{each}`" for each in names)
        rows.append(f"| `{name}` | {family.type} | {told} | {family.documentation} |")
    return "\n".join(rows)


def results() -> str:
    """A table of the files with measurements: when each was measured, and at which commit."""
    rows = ["| file | measured | commit |", "|---|---|---|"]
    for path in sorted((DOCS.parent / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        date, commit = found.get("date") or "", (found.get("commit") or "")[:8]
        rows.append(f"| `{path.name}` | {date} | {commit} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": metrics,
    "results": results,
}


def generated(page: str) -> str:
    """The text of a page with its generated parts written anew."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}"

    part = r"(<!-- generated: (\w+) -->)\n.*?\n?(<!-- end of generated -->)"
    return re.sub(part, written, page, flags=re.DOTALL)


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page as the site has it."""
    return re.sub(r"\[([^]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", _outside, markdown)


def _outside(match: re.Match[str]) -> str:
    text, path = match.groups()
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def main() -> int:
    differ = []
    root = DOCS.parent
    for path in [root / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]:
        before = path.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            differ.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    print(f"pages that differed: {', '.join(differ) or 'none'}")
    return 1 if differ and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
