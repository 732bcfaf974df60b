"""The process of an `OurServer`, forked from one that has imported this module: imports are most of
a start."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from sglang_cake.cli import main, store, store_serve  # noqa: F401 - `main` imports them later
from sglang_cake.stores.file import index_supervisor
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import make_own_token
from sglang_cake.stores.http.server_processes import ServeSettings, serve

SLOW_S = 5.0


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


class SlowSource(FileSource):
    """A process that finds the file `slow` beside the folder opens it after SLOW_S."""

    def folder(self):
        if _taken(self.path.parent / "slow"):
            time.sleep(SLOW_S)
        return super().folder()


def _taken(file):
    """Whether the file is there and empty. It has the id of this process then."""
    with contextlib.suppress(FileNotFoundError):
        if not file.read_text():
            file.write_text(str(os.getpid()))
            return True
    return False


def _suspend(file):
    if _taken(file):
        os.kill(os.getpid(), signal.SIGSTOP)


def start(root, options, limits, errors_fd):
    """A server with the environment of this process, and what it prints.

    Args:
        options: of `sglang-cake store serve`.
        limits: further fields of `ServeSettings`, in place of options; or None.
        errors_fd: what it writes to its standard error goes there.
    """
    reading, writing = os.pipe()
    streams = [Connection(fd, readable=False) for fd in (writing, os.dup(errors_fd))]
    given = (root, options, limits, dict(os.environ), streams)
    process = _context().Process(target=_run, args=given, daemon=True)
    process.start()
    for stream in streams:
        stream.close()
    return process, os.fdopen(reading)


def _run(root, options, limits, environment, streams):
    os.environ.clear()
    os.environ.update(environment)
    for fd, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), fd)
        stream.close()
    index_supervisor.OPEN_WAIT_S = 60.0  # as in `patient`
    if limits is None:
        sys.exit(main(["store", "serve", *options]))
    os.register_at_fork(after_in_child=partial(_suspend, root.parent / "suspend"))
    source = SlowSource(root, min_free_bytes=0)
    settings = ServeSettings(source, "127.0.0.1", 0, make_own_token(), **limits)
    serve(settings, lambda url: print(f"{root} is served at {url}", flush=True))
