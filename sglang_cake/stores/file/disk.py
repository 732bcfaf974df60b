"""Which kind of file system a folder is on."""

import ctypes
import os
from pathlib import Path
from typing import Final

# `f_type` in statfs(2), of file systems that several machines mount at once.
SHARED: Final = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x00C36400: "CephFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x5346414F: "AFS",
}
_statfs = ctypes.CDLL(None, use_errno=True).statfs
_statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_STATFS_BYTES = 512  # more than the structure has anywhere; `f_type` comes first, a long


def file_system_type(folder: Path) -> int:
    """Of a folder, as Linux numbers them; elsewhere whatever its structure begins with.
    Raises: OSError."""
    answer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _statfs(os.fsencode(folder), answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return int(answer[0]) & 0xFFFFFFFF
