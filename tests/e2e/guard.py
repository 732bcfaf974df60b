"""Run beside tests that start servers: ends those that are left when the tests were killed.

It is told of servers through its standard input, a line each: the process group of one that has
started, or minus that of one that has ended. When nobody is left who could tell, it kills the rest.
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
