"""The program that imports what every SGLang server would import, and forks servers (warm.py).

A server starts processes of its own (scheduler, detokenizer, ...), each in an interpreter without
modules (`spawn`). Here it forks them before it runs, and they wait for a job.
"""

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, NoReturn

SPARES = 4  # of a process; what it starts beyond them is spawned as ever
Job = tuple[Callable[..., object], Sequence[Any], Mapping[str, Any]]


def become(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the program, as `__main__`, with what a new interpreter would have."""
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    spares.fork()
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        leave.status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:
        leave.status = 1
        raise


class Leave:
    """The end of a process, after threads and `atexit`. An interpreter takes seconds to take down
    all that is imported here."""

    status = 0

    def __call__(self) -> None:
        for process in multiprocessing.active_children():
            process.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.status)


leave = Leave()


# ---- processes that a server starts ----


class Spares:
    """Forked processes that wait for a job."""

    def __init__(self) -> None:
        self._waiting: list[tuple[multiprocessing.Process, Connection]] = []

    def fork(self) -> None:
        """Fork them, from this process as it is now. It must have one thread."""
        assert threading.active_count() == 1
        for _ in range(SPARES):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            others = [each for _, each in self._waiting]
            process = multiprocessing.get_context("fork").Process(
                target=_wait, args=(receiver, [*others, sender])
            )
            process.start()
            receiver.close()
            self._waiting.append((process, sender))
        atexit.register(self.end)  # before multiprocessing waits for all processes

    def take(self) -> tuple[multiprocessing.Process, Connection] | None:
        return self._waiting.pop(0) if self._waiting else None

    def end(self) -> None:
        """Those without a job end."""
        for _, sender in self._waiting:
            sender.close()
        self._waiting.clear()


spares = Spares()


def _wait(receiver: Connection, senders: Sequence[Connection]) -> None:
    """The life of a spare process. Args: senders: copies of its parent's."""
    for sender in senders:
        sender.close()
    spares._waiting.clear()
    try:
        env, preparation, job = pickle.loads(receiver.recv_bytes())
    except EOFError:  # the parent has ended
        return
    os.environ.clear()
    os.environ.update(env)
    spawn.prepare(preparation)
    target, args, kwargs = pickle.loads(job)
    if target.__module__.endswith("data_parallel_controller"):  # it starts the schedulers
        spares.fork()
    try:
        target(*args, **kwargs)
    finally:
        spares.end()


class SpareProcess:
    """A `multiprocessing.Process` that takes over a spare one."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        daemon: bool = False,
    ) -> None:
        self._job: Job = (target, args, kwargs or {})
        self._name = name or target.__name__
        self._daemon = daemon

    def start(self) -> None:
        found = spares.take()
        if found is None:
            target, args, kwargs = self._job
            self._process: Any = multiprocessing.get_context("spawn").Process(
                target=target, args=args, kwargs=kwargs, name=self._name, daemon=self._daemon
            )
            self._process.start()
            return
        self._process, sender = found
        job = bytes(ForkingPickler.dumps(self._job))
        preparation = spawn.get_preparation_data(self._name)
        del preparation["authkey"]  # a forked process has it
        sender.send_bytes(ForkingPickler.dumps((dict(os.environ), preparation, job)))
        sender.close()
        if self._daemon:
            atexit.register(self._process.terminate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """A job may refer to its process, and does not use it."""
        return object, ()


class Multiprocessing:
    """The module, for SGLang's own modules."""

    Process = SpareProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


# ---- what is imported ----


class SglangModules:
    """In place of `sys`: the modules that may have imported a function of SGLang."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: it for name, it in sys.modules.items() if name.startswith("sglang")}


def import_sglang() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang looks at the platform when it is imported
    for name in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
        "sglang.srt.constrained.xgrammar_backend",
        "sglang.srt.dllm.algorithm",
        "sglang.srt.entrypoints.openai.serving_responses",
        "uvicorn.protocols.http.auto",
    ):
        import_module(name)
    for name in ("entrypoints.engine", "managers.data_parallel_controller"):
        import_module(f"sglang.srt.{name}").mp = Multiprocessing()
    import_module("uvicorn._subprocess").spawn = Multiprocessing()  # with several tokenizers

    # For each hook SGLang looks at all names of all modules (45 ms), which may have imported the
    # hooked function. No module has imported a method, and nearly all hooks are on methods.
    hook_registry: Any = import_module("sglang.srt.plugins.hook_registry")
    hook_registry.sys = SglangModules()
    propagate = hook_registry._propagate_patch
    hook_registry._propagate_patch = lambda original, wrapped, source: (
        0 if isinstance(source, type) else propagate(original, wrapped, source)
    )
    assert threading.active_count() == 1, "a forked process would miss these threads"
    assert "prometheus_client" not in sys.modules, "it takes its folder from the environment"
    # SGLang collects garbage when it starts, and counts the objects that may be some: not these.
    gc.collect()
    gc.freeze()


# ---- requests ----


def serve(requests: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork a process for each request, until their sender has ended. Returns in such a process:
    its command line and its environment."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of a process that reports nothing is asked
    while True:
        byte, fds, _, _ = socket.recv_fds(requests, 1, 3)
        if not byte:
            sys.exit()
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, log, reports = fds
    if pid := os.fork():
        report(pid, reports)
    os.close(reports)
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    with os.fdopen(request) as file:
        arguments, env = json.load(file)
    return arguments, env


def report(pid: int, reports: int) -> NoReturn:
    """Write the process's id, and its status when it has ended."""
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(reports, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(reports, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    atexit.register(leave)  # first, so it is called last
    import_sglang()
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
