"""Removing what killed writers left behind."""

import contextlib
import os
import threading
import time
from pathlib import Path

from sglang_cake.store.file.paths import TMP_PREFIX, this_host, tmp_owner

STALE_S = 3600.0  # a writer touches its file every PIECE_BYTES; none is silent that long


def sweep_stale(folder: Path, stop: threading.Event) -> int:
    """Remove temporary files of dead writers below `folder`; how many were removed.

    A file is stale if its writer's process is gone (told only for processes of this host) or if
    it was not written to for STALE_S. Should a writer be that slow after all, its put fails and
    nothing wrong becomes visible. Files and folders that vanish meanwhile, or that may not be
    read, are passed over: another process may be sweeping too.
    """
    removed, folders = 0, [folder]
    while folders and not stop.is_set():
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.name.startswith(TMP_PREFIX) and _is_stale(entry):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        removed += 1
    return removed


def _is_stale(entry: os.DirEntry[str]) -> bool:
    owner = tmp_owner(entry.name)
    if owner is None:  # nobody's we know of: not ours to remove
        return False
    if owner.host == this_host() and not _is_alive(owner.pid):
        return True
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_S
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
