"""`sglang-cake` as a program that waits for the index of a file store for as long as a busy disk
takes to open it: the product waits 5 s, and refuses calls then."""

import sys

PROGRAM = """
import sys
from sglang_cake.cli import main
from sglang_cake.stores.file import index_supervisor
index_supervisor.OPEN_WAIT_S = 60.0
sys.exit(main())
"""
SGLANG_CAKE = (sys.executable, "-c", PROGRAM)  # in place of `python -m sglang_cake`
