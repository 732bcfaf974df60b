"""What every result names: the machine, the versions, the commit, the day. No names, no paths."""

import datetime
import json
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_cake.core.local_files import atomic_write

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REPORTS = ROOT / "benchmarks" / "reports"
PACKAGES = ("sglang", "torch", "transformers", "numpy", "sglang-cake")


def machine(gpu: str = "no GPU") -> dict[str, Any]:
    """The processor. Args: gpu: that the benchmark uses; most use none, also where there is one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return {
        "what": f"{cores}-core CPU, {gpu}",
        "cpu": models[0] if models else "unknown",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter; what is not installed is left out."""
    import platform

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with `+changes` when the product's files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", "sglang_cake", "patches")
    return (head or "unknown") + ("+changes" if changed else "")


def header(benchmark: str, *, gpu: str = "no GPU", **settings: Any) -> dict[str, Any]:
    """The first part of a result file. `settings` are its arguments."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(gpu),
        "versions": versions(),
        "settings": settings,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result file whole, or leave the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, (json.dumps(result, indent=1) + "\n").encode())
    path.chmod(0o644)  # it is for everybody


def shown(path: Path) -> str:
    """The path as the repository sees it, if it is inside."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


def finish(path: Path, result: dict[str, Any]) -> None:
    """Write a result for the last time, with the load average of the end."""
    result["machine"]["load_average_after"] = machine()["load_average"]
    write(path, result)


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
