"""The demo, shortened, as benchmarks run it: as a process, of whose output the last line counts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import facts

CAKE = (sys.executable, "-m", "sglang_cake")
LIMIT_S = 900.0
ARMS = ("compute", "load", "both")


def demo(*flags: str, env: Mapping[str, str] = {}) -> dict[str, Any]:
    """What `sglang-cake demo` found with 2,048 tokens, each arm once. Raises: as `said`."""
    command = [*CAKE, "demo", "--prompt-tokens", "2048", "--repeats", "1", *flags]
    found: dict[str, Any] = json.loads(said(command, env))
    return found


def said(command: Sequence[str], env: Mapping[str, str] = {}) -> str:
    """The last line of what it prints. Raises: SystemExit with its last words if it fails."""
    with subprocess.Popen(
        command,
        cwd=facts.ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            out, words = child.communicate(timeout=LIMIT_S)
        except BaseException:
            child.terminate()  # and not killed: it has servers to stop
            raise
    if child.returncode != 0:
        last = (out + words)[-2000:]
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{last}")
    return out.splitlines()[-1]
