"""Every table and figure of both Cake papers, simulated on costs fitted to what they print.

    python -m benchmarks.paper table3          # prints it, writes benchmarks/results/paper/
    python -m benchmarks.paper table3-overlap  # the same with SGLang's overlap loop
    python -m benchmarks.paper all             # and the pictures and tables of reports/papers.md

Deterministic but for figure7, which times the decisions on this machine. No GPU and no model: the
simulator runs the server's own decisions on a virtual clock.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.command_line import parser_of
from benchmarks.documents import update
from benchmarks.paper import figures, pictures, report, tables

NAMES = (*tables.TABLES, *tables.OVERLAPPED, *figures.FIGURES)
IMAGES = facts.REPORTS / "img"


def experiment(name: str) -> dict[str, Any]:
    """Run one."""
    return figures.FIGURES[name]() if name in figures.FIGURES else tables.table(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0."""
    parser = parser_of("paper", __doc__)
    parser.add_argument(
        "names",
        nargs="+",
        choices=[*NAMES, "all"],
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or all",
    )
    parser.add_argument("--out", type=Path, default=facts.RESULTS / "paper", help="for the JSON")
    args = parser.parse_args(argv)
    everything = "all" in args.names
    results = {}
    for name in NAMES if everything else args.names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = experiment(name)
        facts.write(args.out / f"{name}.json", _headed(name, results[name]))
        if everything:
            pictures.save(name, results[name], IMAGES)
    texts = report.sections(results)
    if everything:
        pictures.save("tables", {"tables": {n: results[n] for n in tables.TABLES}}, IMAGES)
        update(texts, report.DOC)
    for name in results:
        print(f"\n{results[name]['title']}\n\n{texts.get(name, '(see the JSON)')}")
    return 0


def _headed(name: str, result: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": f"paper {name}", "commit": facts.commit(), **result}


if __name__ == "__main__":
    raise SystemExit(main())
