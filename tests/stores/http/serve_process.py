"""The process of an `OurServer`, forked from one that has imported this module: imports are most of
a start."""

import multiprocessing
import os
import signal
import sys
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from sglang_cake.cli import main, store, store_serve  # noqa: F401 - `main` imports them later
from sglang_cake.stores.file import index_supervisor
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.stores.http.auth import make_own_token
from sglang_cake.stores.http.server_processes import ServeSettings, serve


@cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


def start(root, options, limits, *, suspends=False):
    """A server with the environment of this process, and what it prints.

    Args:
        options: of `sglang-cake store serve`.
        limits: further fields of `ServeSettings`, in place of options; or None.
        suspends: the worker that announces the server is suspended right after, with `limits`.
    """
    reading, writing = os.pipe()
    streams = [Connection(fd, readable=False) for fd in (writing, os.dup(2))]
    given = (root, options, limits, suspends, dict(os.environ), streams)
    process = _context().Process(target=_run, args=given, daemon=True)
    process.start()
    for stream in streams:
        stream.close()
    return process, os.fdopen(reading)


def _run(root, options, limits, suspends, environment, streams):
    os.environ.clear()
    os.environ.update(environment)
    for fd, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), fd)
        stream.close()
    index_supervisor.OPEN_WAIT_S = 60.0  # as in `patient`
    if limits is None:
        sys.exit(main(["store", "serve", *options]))
    source = FileSource(root, min_free_bytes=0)
    settings = ServeSettings(source, "127.0.0.1", 0, make_own_token(), **limits)

    def announce(url):
        print(f"{root} is served at {url}", flush=True)
        if suspends:
            os.kill(os.getpid(), signal.SIGSTOP)

    serve(settings, announce)
