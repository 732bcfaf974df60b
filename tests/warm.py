"""Programs forked from a process that has imported SGLang already: imports are most of a start.

That process is Python's own fork server; it has imported `warm_imports` and done nothing else. What
it forks becomes what `python -m sglang.launch_server` would have become, or `python program.py`:
the leader of a session, with its own command line, environment and log, that runs the module as
`__main__`. The processes that it starts in its turn (SGLang's scheduler, detokenizer, ...) are
forked, too, each from its parent as that was before it ran, where they would have been spawned.
`e2e/test_examples.py` has a server that is started as a user starts it.
"""

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn, util
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

# Tests run in two workers, on machines with two cores: more threads would wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# SGLang's small compiled functions run as they are written: on a CPU, tracing and compiling them
# takes longer than all that a test asks for. Read when they are defined, so by the fork server.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


class Forked:
    """`subprocess.Popen` as far as a `SglangServer` needs it.

    `command` is [the interpreter, "-m", a module, ...] or [the interpreter, a file, ...].
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["warm_imports"])
        first = {"PYTHONPATH": str(Path(__file__).parent)}
        # Threads are counted when torch is imported.
        with mock.patch.dict(os.environ, first | ONE_THREAD | UNCOMPILED):
            forkserver.ensure_running()
        self._process = context.Process(
            target=_become, args=(list(command[1:]), {**env, **UNCOMPILED}, out.name)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the server", timeout or 0.0)
        return self._process.exitcode


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
        return subprocess.CompletedProcess(command, status, out.read().decode(errors="replace"))


def _become(arguments: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    multiprocessing.process._parent_process = None  # SGLang's main process has none
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    resource_tracker.ensure_running()
    forkserver.set_forkserver_preload([])  # all is there
    _tell_children()
    _fork_children()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


def _tell_children() -> None:
    """Children are told of the environment, which they would have inherited."""
    tell, told = spawn.get_preparation_data, spawn.prepare

    def tell_environment(name: str) -> dict[str, Any]:
        return {**tell(name), "environ": dict(os.environ)}

    def take_environment(data: dict[str, Any]) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(data["environ"])
        told(data)
        _fork_children()

    spawn.get_preparation_data, spawn.prepare = tell_environment, take_environment


def _fork_children() -> None:
    """From now on what this process would spawn is forked from it as it is now.

    By a fork server of its own, which is its first child and ends with it. What children signal to
    their parent reaches us.
    """
    execute = util.spawnv_passfds

    def fork(_interpreter: str, arguments: Sequence[str], fds: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            util.spawnv_passfds = execute
            forkserver._forkserver._lock = threading.Lock()  # it is held here
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in fds:
                    with contextlib.suppress(OSError):  # the one that listed them
                        os.close(fd)
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
            try:
                exec(arguments[-1])  # the program of Python's fork server
            finally:
                os._exit(0)  # nothing here of what our callers would do
        return pid

    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = execute
    methods = multiprocessing.context._concrete_contexts
    methods["spawn"] = methods["forkserver"]
