"""A process that has imported SGLang and is forked where Python would be started.

    python warm_process.py FD    FD: a socket, on which `warm.Forked` asks

What it forks runs a program as the interpreter would. Before that it forks a copy of itself, from
which come the processes that `multiprocessing` spawns (SGLang's scheduler, detokenizer, ...). They
become children of the process that spawns them, since that adopts orphans among its descendants.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_FDS = 2**17, 64  # of a request
ANSWER_BYTES = 64  # more than a number has
SET_CHILD_SUBREAPER = 36  # of prctl(2)
STATUS = [0]  # that this process ends with


def ask(
    warm: socket.socket,
    arguments: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[int, int],
    *,
    leads: bool,
) -> socket.socket:
    """Have a process forked. Returns a socket that gives its pid.

    Args:
        warm: of the process that forks it.
        arguments: of the interpreter.
        files: by the descriptors that the process has, beside 0 to 2 of the one that forks it.
        leads: it leads a session, and the socket gives its wait status, too. Else it is a child of
            the caller.
    """
    reply, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    request = {
        "arguments": list(arguments),
        "env": dict(env),
        "folder": os.getcwd(),
        "files": list(files),
        "leads": leads,
    }
    socket.send_fds(warm, [json.dumps(request).encode()], [theirs.fileno(), *files.values()])
    theirs.close()
    return reply


def serve(asked: socket.socket) -> None:
    """Fork what is asked for. Returns in each of these processes, which is to `run` `sys.argv`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        message, (*fds,), _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_FDS)
        if not message:  # nobody is left to ask
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            asked.detach()  # closed with the others
            _fork(json.loads(message), *fds)
            return
        for fd in fds:
            os.close(fd)


def _fork(request: dict[str, Any], reply: int, *fds: int) -> None:
    """Returns in the process that was asked for."""
    between = os.getpid()
    pid = os.fork()
    if pid:
        if request["leads"]:
            os.write(reply, b"%d" % pid)
            os.write(reply, b"%d" % os.waitpid(pid, 0)[1])
        os._exit(0)
    if request["leads"]:
        os.setsid()
    else:
        while os.getppid() == between:
            time.sleep(0.001)
        os.write(reply, b"%d" % os.getpid())
    _take_files(dict(zip(request["files"], fds, strict=True)))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["arguments"]


def _take_files(files: Mapping[int, int]) -> None:
    """Have these descriptors and 0 to 2, and no others."""
    above = max((*files, *files.values()), default=2) + 1
    lifted = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in files.items()}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in lifted.values():
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)
    for number, fd in lifted.items():
        os.dup2(fd, number)
        os.close(fd)


def run(arguments: Sequence[str]) -> None:
    """Run the program of these arguments of an interpreter, until its SystemExit."""
    from multiprocessing import util  # with a handler that is called before `end`

    warm, asked = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        warm.close()
        serve(asked)
        return run(sys.argv)
    asked.close()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = util.spawnv_passfds

    def spawn(interpreter: str, command: Sequence[str], fds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in command:  # the tracker of resources
            return start(interpreter, command, fds)
        code = command[command.index("-c") :]
        with ask(warm, code, os.environ, {int(fd): int(fd) for fd in fds}, leads=False) as reply:
            return int(reply.recv(ANSWER_BYTES))

    util.spawnv_passfds = spawn  # there is no public way to start processes in another way
    try:
        _run(*arguments)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        STATUS[0] = code if isinstance(code, int) else int(code is not None)
        raise


def _run(option: str, *rest: str) -> None:
    sys.path[0] = ""
    if option == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = [option, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


def end() -> None:
    """Do without freeing all that was imported, which takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS[0])


def import_all() -> None:
    """What every server would import."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang looks at the platform when it is imported
    for name in (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
    ):
        import_module(name)
    assert threading.active_count() == 1, "a forked process would miss these threads"
    assert "prometheus_client" not in sys.modules, "it takes its folder from the environment"


if __name__ == "__main__":
    atexit.register(end)  # the first that is registered is the last that is called
    import_all()
    gc.freeze()  # a forked process that collected what is imported would copy all of it
    serve(socket.socket(fileno=int(sys.argv[1])))
    run(sys.argv)
