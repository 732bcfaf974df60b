"""Reads `namespace.json`, which anybody may have written."""

import json
import os
import re
import stat
from pathlib import Path

MAX_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_description(path: Path) -> dict[str, str]:
    """The fields that a namespace's description names; empty if it is not one."""
    try:
        # O_NONBLOCK does nothing to a file, and keeps a foreign pipe from hanging us.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return {}
            raw = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
        fields = json.loads(raw) if len(raw) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) and _is_text(fields) else {}


def _is_text(fields: dict[str, object]) -> bool:
    """Whether all of it is text that has bytes, which half a surrogate pair has not."""
    text = [part for field in fields.items() for part in field]
    return all(isinstance(part, str) and not _SURROGATE.search(part) for part in text)
