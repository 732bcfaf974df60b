"""Random numbers of this package alone.

SGLang seeds Python's global generator alike on all ranks, and shuffles its queue with it
(`--schedule-policy random`). A number that one rank alone drew from that generator, for a pause or
an eviction, would have the ranks compute other requests. So nothing here draws from it, nor from
those of NumPy and PyTorch; ruff refuses the calls (`pyproject.toml`).
"""

import random  # noqa: TID251

OWN_RANDOM = random.Random()
