"""The disk of a file store: kind of file system, free space, errors."""

import contextlib
import ctypes
import errno
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from sglang_cake.core.errors import StoreError, StoreFull, StoreUnavailable

# `f_type` in statfs(2), of file systems that several machines can mount. 9p is none of them: gVisor
# gives its number to all folders of the machine.
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
    0x5346414F: "AFS",  # of OpenAFS
    0x6B414653: "AFS",  # of Linux
}
_FUSE = 0x65735546
# The same over FUSE, by type in `/proc/self/mountinfo`.
SHARED_FUSE: Final = frozenset(
    f"fuse.{name}"
    for name in ("ceph", "ceph-fuse", "gcsfuse", "glusterfs", "juicefs", "rclone", "s3fs", "sshfs")
)
MOUNTS = Path("/proc/self/mountinfo")
_statfs = ctypes.CDLL(None, use_errno=True).statfs
_statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_STATFS_BYTES = 512  # more than the structure has on any system; `f_type`, a long, comes first


def file_system_type(folder: Path) -> int:
    """File system of a folder, as numbered by Linux. Raises: OSError."""
    answer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _statfs(os.fsencode(folder), answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return int(answer[0]) & 0xFFFFFFFF


def shared_file_system(folder: Path) -> str | None:
    """Name of the folder's file system if several machines can mount it. Raises: OSError."""
    kind = file_system_type(folder)
    if kind != _FUSE:
        return SHARED.get(kind)
    device = folder.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    for line in os.fsdecode(MOUNTS.read_bytes()).split("\n"):
        fields = line.split(" ")
        if numbers in fields[2:3]:
            name = fields[fields.index("-") + 1]  # after a varying number of fields
            return name if name in SHARED_FUSE else None
    return None


FRESH_S = 1.0  # time for which an answer of the file system is used
NEAR_BYTES = 16 << 30  # more than several processes together write in FRESH_S
REFUSED_S = 600.0  # longer than a pause of writing, so that eviction precedes each further try
# These file systems report the space of removed files only after their next commit.
FREES_LATE: Final = {0x9123683E: "btrfs", 0x2FC12FC1: "ZFS"}
LATE_S = 30.0  # time for which that space counts as free before they report it
# These may answer with the free space of some seconds ago.
_REPORT_LATE: Final = frozenset((*FREES_LATE, *SHARED, _FUSE))
_UNLIMITED = 1 << 62
FILES_PER_BLOCK = 3  # inodes: the block, and at most two new folders
FOLDER_BYTES = 4096  # of an almost empty folder on the disk
ENTRY_BYTES = 256  # of a name in its folder: 105 to 150 measured on ext4


def on_disk_bytes(root: Path, size_bytes: int) -> int:
    """Bytes that a file of this size below `root` takes on the disk. Raises: OSError."""
    unit_bytes = _unit_bytes(root)
    return -(-size_bytes // unit_bytes) * unit_bytes


@functools.cache
def _unit_bytes(root: Path) -> int:
    return max(4096, os.statvfs(root).f_frsize)


def free_bytes(disk: os.statvfs_result) -> int | None:
    """Bytes that are free for this user; None if the file system has no fixed size (tmpfs with
    `size=0`)."""
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


class Amount(NamedTuple):
    """Space in a file system; false if it is zero, and nothing was passed."""

    bytes: int = 0
    files: int = 0  # inodes
    passed: int = 0  # blocks that an eviction took from the order, and that freed nothing

    def __bool__(self) -> bool:
        return self.bytes > 0 or self.files > 0 or self.passed > 0

    def at_most(self, other: "Amount") -> "Amount":
        return Amount(min(self.bytes, other.bytes), min(self.files, other.files))

    def exceeds(self, other: "Amount") -> bool:
        return self.bytes > other.bytes or self.files > other.files


class FreeSpace:
    """Keeps `min_free_bytes` of a file system free, and the same share of its inodes. Thread-safe.

    Bytes are ignored where the size of the file system is not fixed, and inodes where their number
    is not.

    A disk may refuse blocks although the file system tells of free space, as beyond the quota of a
    user. For REFUSED_S after that, blocks of this process take only space that it has freed. So it
    evicts what its puts need, and nothing without a put. Each further process learns of the limit
    by a refused block of its own.

    Where removed files free space late (FREES_LATE), bytes that this process freed count for LATE_S
    until the file system reports them. Elsewhere they do not: the space would be missing if other
    programs took it within that time.
    """

    def __init__(
        self, folder: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self.min_free_bytes = min_free_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._usable_bytes = 0
        self._usable_files = 0
        self._refused_s = 0.0
        self._freed_bytes = _UNLIMITED  # since a block was refused, and not taken yet
        self._newly_freed_bytes = 0  # since the file system was asked
        # Freed bytes that the file system has not reported, and the times at which they expire.
        self._unreported: deque[tuple[float, int]] = deque()

    def take(self, size_bytes: int) -> Amount:
        """Take the space for a block of `size_bytes`; returns the missing space, or zero.

        The file system is asked every FRESH_S. In between, the blocks of this process are
        subtracted, so that a burst of writes stays within the limit. With less than NEAR_BYTES, it
        is asked each time, since other processes take the same space.
        Raises: OSError.
        """
        with self._lock:
            missing = self._missing(size_bytes, FILES_PER_BLOCK)
            if not missing:
                self._usable_bytes -= size_bytes
                self._freed_bytes -= size_bytes
                self._usable_files -= FILES_PER_BLOCK
            return missing

    def missing(self) -> Amount:
        """Space that should be freed now. Raises: OSError."""
        with self._lock:
            return self._missing(0, 0)

    def unused_bytes(self) -> int:
        """Bytes that blocks may take before space is missing. What other processes have taken
        counts at once. Raises: OSError."""
        with self._lock:
            self._missing(0, 0)  # asks the file system if it is time
            if self._usable_files < FILES_PER_BLOCK:
                return 0
            reported_bytes = self._reported_bytes(os.statvfs(self._folder))
            return max(0, min(reported_bytes, self._usable_bytes, self._freed_bytes))

    def freed(self, amount: Amount) -> None:
        """Add space that was freed since the file system was asked; zero: there is no more."""
        with self._lock:
            self._usable_bytes += amount.bytes
            self._newly_freed_bytes += amount.bytes
            self._usable_files += amount.files
            self._freed_bytes += amount.bytes
            if not amount:  # only a write can show whether the disk has room now
                self._freed_bytes = _UNLIMITED

    def refused(self) -> None:
        """The disk refused a block: it was full, or a quota of it was used up."""
        with self._lock:
            self._refused_s = self._clock()
            self._freed_bytes = 0

    def _missing(self, size_bytes: int, files: int) -> Amount:
        now_s = self._clock()
        if self._asked_s is None or now_s - self._asked_s >= FRESH_S:
            self._refresh(now_s)
            self._asked_s = now_s
        elif self._usable_bytes < NEAR_BYTES:
            self._subtract_others()
        # A limit of which the file system tells needs no other rule.
        if self._usable_bytes < 0 or now_s - self._refused_s >= REFUSED_S:
            self._freed_bytes = _UNLIMITED
        room_bytes = min(self._usable_bytes, self._freed_bytes)
        return Amount(max(0, size_bytes - room_bytes), max(0, files - self._usable_files))

    def _refresh(self, now_s: float) -> None:
        stat = os.statvfs(self._folder)
        share = 0.0
        reported_bytes = self._reported_bytes(stat)
        if stat.f_blocks:
            self._usable_bytes = reported_bytes + self._unreported_bytes(reported_bytes, now_s)
            share = self.min_free_bytes / (stat.f_blocks * stat.f_frsize)
        else:
            self._usable_bytes = reported_bytes
        if stat.f_files:
            self._usable_files = stat.f_favail - int(stat.f_files * share)
        else:  # created on demand, as by btrfs
            self._usable_files = _UNLIMITED

    def _subtract_others(self) -> None:
        """Lower the usable bytes to what the file system reports now."""
        reported_bytes = self._reported_bytes(os.statvfs(self._folder))
        if file_system_type(self._folder) in _REPORT_LATE:  # or each block would evict many
            reported_bytes += self._newly_freed_bytes + sum(freed for _, freed in self._unreported)
        self._usable_bytes = min(self._usable_bytes, reported_bytes)

    def _reported_bytes(self, stat: os.statvfs_result) -> int:
        free = free_bytes(stat)
        return _UNLIMITED if free is None else free - self.min_free_bytes

    def _unreported_bytes(self, reported_bytes: int, now_s: float) -> int:
        """Freed bytes that count beside `reported_bytes`, the new answer of the file system."""
        if self._newly_freed_bytes and file_system_type(self._folder) in FREES_LATE:
            self._unreported.append((now_s + LATE_S, self._newly_freed_bytes))
        self._newly_freed_bytes = 0
        while self._unreported and self._unreported[0][0] <= now_s:
            self._unreported.popleft()
        unreported_bytes = sum(freed for _, freed in self._unreported)
        # If there is more than this process expects, the file system has reported the oldest ones.
        newly_reported_bytes = min(
            unreported_bytes, reported_bytes + unreported_bytes - self._usable_bytes
        )
        unreported_bytes -= max(0, newly_reported_bytes)
        while newly_reported_bytes > 0:
            expires_s, freed = self._unreported.popleft()
            if freed > newly_reported_bytes:
                self._unreported.appendleft((expires_s, freed - newly_reported_bytes))
            newly_reported_bytes -= freed
        return unreported_bytes


# Errors of damaged sectors. Reads past the page cache get the block layer's own codes in place of
# EIO.
_SECTOR_ERRORS = frozenset(
    (
        errno.EIO,
        errno.ENODATA,  # "critical medium error"
        errno.EREMOTEIO,  # "critical target error"
        errno.EILSEQ,  # "protection error"
    )
)
_DISK_ERRORS = _SECTOR_ERRORS | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# A file system reports a damaged file so. It says nothing about other files.
DAMAGE_ERRORS = _SECTOR_ERRORS | {errno.EUCLEAN, errno.EBADMSG}


@contextlib.contextmanager
def os_errors(root: Path, failed: Callable[[StoreError], None] | None = None) -> Iterator[None]:
    """A context that turns OSError into StoreFull or StoreUnavailable, with the name of the store.

    Args:
        failed: called with errors of the disk.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = (StoreFull if full else StoreUnavailable)(f"{root}: {error}")
        if failed is not None and error.errno in _DISK_ERRORS:
            failed(failure)
        raise failure from error
