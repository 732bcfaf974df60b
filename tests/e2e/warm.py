"""Servers forked from a process that has imported SGLang already: imports are most of a start.

That process is Python's own fork server; it has imported `warm_imports` and done nothing else. What
it forks becomes what `python -m sglang.launch_server` would have become: the leader of a session,
with its own command line, environment and log, that runs this module as `__main__`. SGLang's
scheduler and detokenizer are forked, from what it was before it ran, where they would have been
spawned; what they start in their turn is not. Servers started as a user starts them are in these
tests, too (`start(..., warm=False)`).
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
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn, util
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock


class Forked:
    """`subprocess.Popen` as far as a `Server` needs it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["warm_imports"])
        with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
            forkserver.ensure_running()
        _interpreter, _m, module, *flags = command
        self._process = context.Process(
            target=_become, args=(module, [module, *flags], dict(env), out.name)
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


def _become(module: str, argv: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = argv
    multiprocessing.process._parent_process = None  # SGLang's main process has none
    _fork_children()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork_children() -> None:
    """From now on what this process would spawn is forked from it as it is now.

    By a fork server of its own, which is its first child and ends with it. Children are told of
    the environment, which they would have inherited; what they signal to their parent reaches us.
    """
    tell, told = spawn.get_preparation_data, spawn.prepare

    def tell_environment(name: str) -> dict[str, Any]:
        return {**tell(name), "environ": dict(os.environ)}

    def take_environment(data: dict[str, Any]) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(data["environ"])
        told(data)

    def fork(_interpreter: str, arguments: Sequence[str], fds: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in fds:
                    with contextlib.suppress(OSError):  # the one that listed them
                        os.close(fd)
            signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getppid(), signal.SIGQUIT))
            exec(arguments[-1])  # the program of Python's fork server
        return pid

    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    resource_tracker.ensure_running()
    spawn.get_preparation_data, spawn.prepare = tell_environment, take_environment
    execute, util.spawnv_passfds = util.spawnv_passfds, fork
    forkserver.ensure_running()
    util.spawnv_passfds = execute
    methods = multiprocessing.context._concrete_contexts
    methods["spawn"] = methods["forkserver"]
