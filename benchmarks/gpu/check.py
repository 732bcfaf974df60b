"""Checks the GPU path of this package on one NVIDIA GPU, and measures it; SGLang is not needed.

    python -m benchmarks.gpu.check [--small] [--steps NAME,NAME] [--out FILE]

Every step is a process of its own, so that an error or a hang in one hides no other. What a step
found before it failed is kept. `README.md` beside this file says what a machine needs.
"""

import argparse
import faulthandler
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.command_line import parser_of
from benchmarks.documents import table

LIMIT_S = 540.0  # of all steps together
STEP_LIMIT_S = 200.0
SAID_BYTES = 6000  # of what a failed step has printed
PASS, FAIL, NOT_RUN, SKIPPED = "PASS", "FAIL", "NOT RUN", "SKIPPED"
# Name -> where its function is: (size, device) -> the findings, one by one.
STEPS = {
    "environment": "environment:environment",
    "copies": "exact:copies",
    "captures": "exact:captures",
    "reused slots": "exact:reused_slots",
    "end states": "end_states:end_states",
    "encoded blocks": "encoded:encoded",
    "memcpy": "speed:memcpy",
    "row kernel": "speed:row_kernel",
    "copies beside products": "speed:cake_copies",
    "decoding": "encoded:decoding",
    "launches": "speed:launches",
    "pinning": "memory:pinning",
    "waiting slots": "memory:waiting_slots",
    "kernels of SGLang": "sglang_kernels:sglang_kernels",
    "overlap": "overlap:overlap",
    "compute-sanitizer": "sanitizer:sanitizer",
}
INNER = {"sanitized": "sanitizer:sanitized"}  # what `compute-sanitizer` runs


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of("gpu.check", __doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes: whether it runs at all")
    parser.add_argument("--steps", help=f"some of: {', '.join(STEPS)}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="of all steps")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/gpu-<device>.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # run this step here
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # and write findings there
    args = parser.parse_args(argv)
    args.steps = list(STEPS) if args.steps is None else args.steps.split(",")
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"no such steps: {', '.join(sorted(unknown))}")
    return args


# ---- in the process of a step ----


def run_here(name: str, found: Path, *, small: bool, device: str = "cuda:0") -> None:
    """Run one step and write each of its findings as a line of JSON. Raises: what it raises."""
    from benchmarks.gpu import stand_ins

    stand_ins.install()
    import torch

    from benchmarks.gpu.measuring import FULL, SMALL

    module, _, function = (STEPS | INNER)[name].partition(":")
    step = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    with found.open("a", buffering=1) as out:
        for finding in step(SMALL if small else FULL, torch.device(device)):
            out.write(json.dumps(asdict(finding)) + "\n")


# ---- in the process that starts them ----


def run_step(name: str, *, small: bool, limit_s: float) -> dict[str, Any]:
    """Run one step in a process of its own; never raises for what happens there."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, said = Path(folder, "found"), Path(folder, "said")
        command = [sys.executable, "-m", "benchmarks.gpu.check", "--one", name]
        command += ["--found", str(found), "--limit", str(limit_s), *(["--small"] if small else [])]
        with said.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=facts.ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            try:
                status: int | None = process.wait(limit_s + 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = None
        lines = found.read_text().splitlines() if found.exists() else []
        text = said.read_text(errors="replace")[-SAID_BYTES:]
    return outcome(
        name, [json.loads(line) for line in lines], status, text, time.monotonic() - begun_s
    )


def outcome(
    name: str, findings: list[dict[str, Any]], status: int | None, text: str, took_s: float
) -> dict[str, Any]:
    """What the result says of a step. Args: status: of its process; None: it was killed."""
    well = status == 0 and all(finding["ok"] is not False for finding in findings)
    lacking = bool(findings) and all(finding["what"] == NOT_RUN for finding in findings)
    result = {
        "step": name,
        "status": FAIL if not well else SKIPPED if lacking else PASS,
        "took_s": round(took_s, 1),
        "findings": findings,
    }
    if status != 0:
        result["error"] = f"ended with {status}\n{text}" if status is not None else f"hung\n{text}"
    elif text.strip():
        result["said"] = text
    return result


def text_of(outcomes: Sequence[dict[str, Any]]) -> str:
    """The table of all findings."""
    rows = []
    for each in outcomes:
        rows.append([each["step"], each["status"], f"{each['took_s']:.1f}", "s"])
        for finding in each["findings"]:
            failed = f" **{FAIL}**" if finding["ok"] is False else ""
            rows.append(["", finding["what"], _number(finding["value"]), finding["unit"] + failed])
        if "error" in each:
            rows.append(["", each["error"].strip().splitlines()[-1].replace("|", "/"), "", ""])
    return table(["step", "finding", "value", "unit"], rows)


def _number(value: float | str) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def file_of(outcomes: Sequence[dict[str, Any]], *, small: bool) -> Path:
    """The result file of this device."""
    return result_file("gpu", device_of(outcomes), small=small)


def device_of(outcomes: Sequence[dict[str, Any]]) -> str:
    """Its name, if the step `environment` has run."""
    values = {f["what"]: f["value"] for each in outcomes for f in each["findings"]}
    return str(values.get("device", "unknown"))


def result_file(kind: str, device: str, *, small: bool) -> Path:
    """Of results of one kind that were measured on a device of that name."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return facts.RESULTS / f"{kind}-{name}{'-small' if small else ''}.json"


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All steps. The result file is written after each of them."""
    end_s = time.monotonic() + args.limit
    outcomes: list[dict[str, Any]] = []
    for name in args.steps:
        left_s = end_s - time.monotonic()
        if left_s < 10:
            outcomes.append({"step": name, "status": NOT_RUN, "took_s": 0.0, "findings": []})
            continue
        outcomes.append(run_step(name, small=args.small, limit_s=min(STEP_LIMIT_S, left_s)))
        last = outcomes[-1]
        print(f"{last['status']:4} {name} ({last['took_s']:.0f} s)", file=sys.stderr, flush=True)
        header = facts.header(
            "gpu check", gpu=device_of(outcomes), small=args.small, steps=args.steps
        )
        facts.write(
            args.out or file_of(outcomes, small=args.small), {**header, "outcomes": outcomes}
        )
        if name == "environment" and last["status"] == FAIL:
            break  # nothing else could work
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 if every step passed, or was skipped for what the machine lacks."""
    args = parse_args(argv)
    if args.one is not None:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        run_here(args.one, args.found, small=args.small)
        return 0
    outcomes = run_all(args)
    print(text_of(outcomes))
    for each in outcomes:
        if "error" in each:
            print(f"\n{each['step']}: {each['error']}", file=sys.stderr)
    print(f"\nresult: {facts.shown(args.out or file_of(outcomes, small=args.small))}")
    return 0 if all(each["status"] in (PASS, SKIPPED) for each in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
