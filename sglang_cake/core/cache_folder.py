"""Where this user's cached data is kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/sglang_cake`, or the same in `~/.cache`. Not created here.

    Raises: RuntimeError if there is no home folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # unset, or to be ignored by the XDG specification
        cache = Path.home() / ".cache"
    return cache / "sglang_cake"
