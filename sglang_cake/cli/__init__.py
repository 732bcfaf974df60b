"""The command line: `sglang-cake patch|demo|doctor|plan|runahead|simulate|store|trace`.

Every sub-command is a module with `add_parser(subparsers)`, which sets `run`, a function from the
parsed arguments to an exit status. These modules import heavy packages only inside `run`.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

from sglang_cake import __version__
from sglang_cake.cli.demo import add_parser as add_demo
from sglang_cake.cli.doctor import add_parser as add_doctor
from sglang_cake.cli.patch import add_parser as add_patch
from sglang_cake.cli.plan import add_parser as add_plan
from sglang_cake.cli.runahead_search import add_parser as add_runahead
from sglang_cake.cli.simulate import add_parser as add_simulate
from sglang_cake.cli.store import add_parser as add_store
from sglang_cake.cli.trace_replay import add_parser as add_trace
from sglang_cake.core.errors import CakeError

PIPE_STATUS = 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-cake",
        description="Restores the KV cache of long prompts in SGLang from both ends at once.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-cake {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    adds = (add_demo, add_doctor, add_patch, add_plan, add_runahead, add_simulate, add_store)
    for add in (*adds, add_trace):
        add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; a `CakeError` is one line on stderr and exit status 2.

    If the reader of stdout has ended (`sglang-cake plan ... | head`), the command ends silently,
    with the status of a process that SIGPIPE ended. SIGPIPE itself stays ignored: sockets of
    servers and stores break too, and that must not end the process.
    """
    try:
        try:
            parser = _parser()
            args, unknown = parser.parse_known_args(argv)
            if unknown and args.command != "doctor":
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            args.server_flags = unknown
            status: int = args.run(args)
        except CakeError as error:
            print(f"sglang-cake: {error}", file=sys.stderr)
            status = 2
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_broken():
            raise
        # Python flushes stdout again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_STATUS
    return status


def _stdout_is_broken() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))
