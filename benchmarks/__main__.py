"""`python -m benchmarks`: lists the benchmarks; `python -m benchmarks ttft --small`: runs one."""

import ast
import runpy
import sys
from pathlib import Path

PREFIX = "bench_"


def benches() -> dict[str, str]:
    """Name and first line of the description of every benchmark here."""
    found = {}
    for path in sorted(Path(__file__).parent.glob(f"{PREFIX}*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem.removeprefix(PREFIX)] = text.partition("\n")[0]
    return found


def main(argv: list[str]) -> int:
    """Run the benchmark that the first argument names, with the others."""
    known = benches()
    name = argv[0].removeprefix(PREFIX) if argv else ""
    if name not in known:
        print(__doc__, end="\n\n")
        for known_name, text in known.items():
            print(f"  {known_name:12} {text}")
        return 0 if name in ("", "-h", "--help") else 2
    sys.argv = [f"python -m benchmarks {name}", *argv[1:]]
    runpy.run_module(f"benchmarks.{PREFIX}{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
