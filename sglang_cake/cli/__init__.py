"""The command line: `sglang-cake patch|demo|doctor|plan|runahead|simulate|store|trace`.

Every sub-command is a module with `add_parser(subparsers)`, which sets `run`, a function from the
parsed arguments to an exit status. These modules import heavy packages only inside `run`. Only the
module of the given command is imported: others would take most of the start of `store serve`.
"""

import argparse
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from sglang_cake import __version__
from sglang_cake.core.errors import CakeError

PIPE_STATUS = 128 + signal.SIGPIPE
MODULES = {  # by command
    "demo": "demo",
    "doctor": "doctor",
    "patch": "patch",
    "plan": "plan",
    "runahead": "runahead_search",
    "simulate": "simulate",
    "store": "store",
    "trace": "trace_replay",
}


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-cake",
        description="Restores the KV cache of long prompts in SGLang from both ends at once.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-cake {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in argv[:1] if argv and argv[0] in MODULES else MODULES:
        import_module(f"{__name__}.{MODULES[name]}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; a `CakeError` is one line on stderr and exit status 2.

    Ctrl-C and a full disk are one line too. Without `argv`, Ctrl-C ends the process at once: Python
    would wait for threads, in which a call to a store may hang. If the reader of stdout has ended
    (`sglang-cake plan ... | head`), the command ends silently, with the status of a process that
    SIGPIPE ended. SIGPIPE itself stays ignored: sockets of servers and stores break too, and that
    must not end the process.
    """
    is_program = argv is None
    try:
        try:
            argv = sys.argv[1:] if argv is None else argv
            parser = _parser(argv)
            args, unknown = parser.parse_known_args(argv)
            if unknown and args.command != "doctor":
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            args.server_flags = unknown
            status: int = args.run(args)
        except CakeError as error:
            print(f"sglang-cake: {error}", file=sys.stderr)
            status = 2
        finally:
            is_interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            # After an interrupt the thread of a tool may hold stdout, as while nobody reads a pipe.
            if sys.stdout is not None and not is_interrupted:  # None: closed before the start
                sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_broken():
            raise
        _drop_stdout()
        return PIPE_STATUS
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"sglang-cake: cannot write: {error}", file=sys.stderr)
        _drop_stdout()
        return 2
    except KeyboardInterrupt:
        if is_program:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more ends it, without a traceback
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        clear_line = "\r\x1b[K" if is_terminal else ""  # of ^C, and of a progress bar
        with suppress(OSError):  # the reader of stderr has ended, as of the same Ctrl-C
            print(f"{clear_line}interrupted", file=sys.stderr, flush=True)
        if is_program:
            os._exit(130)
        return 130
    return status


def _drop_stdout() -> None:
    """Write stdout nowhere: Python flushes it again when it ends."""
    if sys.stdout is not None:  # it is if the caller has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_is_broken() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))
