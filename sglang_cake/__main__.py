"""`python -m sglang_cake` is `sglang-cake`."""

import sys

from sglang_cake.cli import main

sys.exit(main())
