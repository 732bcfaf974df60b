"""A few small copies under NVIDIA's `compute-sanitizer`, which sees every access outside memory."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import facts
from benchmarks.gpu.exact import FORMS, copies_of
from benchmarks.gpu.measuring import Finding, Size, not_run

CASES = (("bf16", 1), ("bf16, V narrower than K", 64), ("MLA fp8", 1))
TOOL = "/usr/local/cuda/bin/compute-sanitizer"  # where it is if not in PATH
FAILED = 9  # status if an access was wrong
LIMIT_S = 150.0
# Otherwise PyTorch puts its tensors side by side into large allocations.
ENV = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitizer(size: Size, device: torch.device) -> Iterator[Finding]:
    """Run `sanitized` under the tool, if there is one."""
    tool = shutil.which("compute-sanitizer") or TOOL
    if not Path(tool).exists():
        yield not_run("compute-sanitizer is not on this machine")
        return
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found")
        done = subprocess.run(
            [
                *(tool, "--tool", "memcheck", "--error-exitcode", str(FAILED)),
                *("--report-api-errors", "no"),  # PyTorch asks for what a driver may not know
                *(sys.executable, "-m", "benchmarks.gpu.check", "--one", "sanitized"),
                *("--found", str(found), "--small"),
            ],
            cwd=facts.ROOT,
            env={**os.environ, **ENV},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        cases = len(found.read_text().splitlines()) if found.exists() else 0
    if "Device not supported" in done.stdout:  # in some sandboxes
        yield not_run("compute-sanitizer cannot reach the device of this machine")
        return
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    said = summary[-1].strip("= ") if summary else (done.stdout + done.stderr)[-500:]
    ok = done.returncode == 0 and cases == len(CASES)
    yield Finding(f"{cases} of {len(CASES)} cases", said, ok=ok)


def sanitized(size: Size, device: torch.device) -> Iterator[Finding]:
    """The cases: no matrix products, which take long under the tool."""
    del size
    for name, page in CASES:
        wrong = copies_of(FORMS[name], page, None, device)
        yield Finding(f"{name}, page {page}", wrong or "equal", ok=not wrong)
