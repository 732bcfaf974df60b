"""Runs beside tests that start servers, and kills servers that are left when the tests were killed.

Each line of its standard input is a process group: of a server that has started, or, as a negative
number, of one that has ended. When its input ends, it kills all servers that have not ended.
"""

import contextlib
import os
import signal
import sys

groups: set[int] = set()
for line in sys.stdin:
    if (number := int(line)) > 0:
        groups.add(number)
    else:
        groups.discard(-number)
for group in groups:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
