"""Programs forked from a process that has imported SGLang already: imports are most of a start.

That process runs `warm_process.py`. What it forks becomes what `python -m sglang.launch_server`
would have become, or `python program.py`: the leader of a session, with its own command line,
environment and log, that runs the module as `__main__`. The server of the quickstart is started as
a user starts it (tests/e2e/test_examples.py).
"""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

# Tests run in two or three workers, on machines with two cores: more threads would wait for each
# other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# SGLang's small compiled functions run as they are written: on a CPU, tracing and compiling them
# takes longer than all that a test asks for.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


@functools.cache
def _warm_process() -> socket.socket:
    """The connection to the process that forks programs. It ends when this process has ended."""
    ours, its = socket.socketpair()
    with its:
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_process.py")), str(its.fileno())],
            env=os.environ | ONE_THREAD | UNCOMPILED,  # both are read when torch is imported
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


class Forked:
    """`subprocess.Popen` as far as a `SglangServer` needs it.

    `command` is [the interpreter, "-m", a module, ...] or [the interpreter, a file, ...].
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> None:
        self.returncode: int | None = None
        reports, reporting = os.pipe()
        self._reports = os.fdopen(reports, "rb", buffering=0)
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps([list(command[1:]), {**env, **UNCOMPILED}]).encode())
            request.seek(0)
            with os.fdopen(reporting, "wb"):
                fds = [request.fileno(), out.fileno(), reporting]
                socket.send_fds(_warm_process(), [b"\n"], fds)
        self.pid = int(self._reports.readline())

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("the server", timeout or 0.0)
        return status

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._reports], (), (), timeout_s)[0]:
            self.returncode = int(self._reports.readline())
            self._reports.close()
        return self.returncode


def run_forked(
    command: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`; `stdout` is all that it printed, errors included.

    Raises: subprocess.TimeoutExpired; whatever runs then is killed.
    """
    with (folder / f"said-{os.urandom(4).hex()}").open("w+b") as out:
        process = Forked(command, env, out)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        out.seek(0)
        return subprocess.CompletedProcess(command, status, out.read().decode(errors="replace"))
