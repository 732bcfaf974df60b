"""Programs forked from a process that has imported SGLang already: imports are most of a start.

What `warm_process.py` forks becomes what `python -m sglang.launch_server` would have become, or
`python program.py`: the leader of a session, with its own `sys.argv`, environment and log, that
runs the module as `__main__`. The processes that it starts in its turn are forked, too, each from
its parent as that was before it ran. Servers started as a user starts them are in the tests, too
(`start(..., warm=False)`).
"""

import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from warm_process import ANSWER_BYTES, ask

# Tests run in two workers, on machines with two cores: more threads would wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@functools.cache
def _warm_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It ends with this process."""
    warm, asked = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = Path(__file__).with_name("warm_process.py")
    with asked:
        process = subprocess.Popen(
            [sys.executable, str(program), str(asked.fileno())],
            env=os.environ | ONE_THREAD,  # counted when torch is imported
            stdin=subprocess.DEVNULL,
            pass_fds=[asked.fileno()],
            start_new_session=True,
        )
    return warm, process


class Forked:
    """`subprocess.Popen` as far as a `SglangServer` needs it.

    `command` is [the interpreter, "-m", a module, ...] or [the interpreter, a file, ...].
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> None:
        warm, _ = _warm_process()
        files = dict.fromkeys((1, 2), out.fileno())
        self._reply = ask(warm, command[1:], env, files, leads=True)
        self.pid = self._answer()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reply], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the server", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._answer())
            self._reply.close()
        return self.returncode

    def _answer(self) -> int:
        answer = self._reply.recv(ANSWER_BYTES)
        assert answer, "the warm process has ended"
        return int(answer)


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
