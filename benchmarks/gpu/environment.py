"""What the machine is."""

import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from benchmarks.gpu.measuring import GB, Finding, Size

_LINK = "pcie.link.gen.{0},pcie.link.width.{0}"
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


def environment(size: Size, device: torch.device) -> Iterator[Finding]:
    """Names, versions and limits. Raises: RuntimeError without a GPU."""
    del size
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no NVIDIA GPU here")
    facts = torch.cuda.get_device_properties(device)
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    yield Finding("device", torch.cuda.get_device_name(device))
    yield Finding("multiprocessors", facts.multi_processor_count)
    yield Finding("device memory", all_bytes / GB, "GB")
    yield Finding("device memory, free", free_bytes / GB, "GB")
    yield Finding("driver", asked("driver_version"))
    yield Finding("PCIe now, generation and lanes", asked(_LINK.format("current")))
    yield Finding("PCIe at most", asked(_LINK.format("max")))
    yield Finding("CUDA of PyTorch", str(torch.version.cuda))
    yield Finding("Python", platform.python_version())
    for package in ("torch", "triton", "numpy", "numba", "sglang"):
        yield Finding(package, _version(package))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    yield Finding("locked memory", "unlimited" if unlimited else f"{limit / GB:.3g} GB")
    yield Finding("huge pages", _read(_HUGE_PAGES))
    yield Finding("cores", len(os.sched_getaffinity(0)))
    yield Finding("host memory, available", psutil.virtual_memory().available / GB, "GB")


def asked(query: str) -> str:
    """What the driver says of the first GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__})"
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return "not known"
