"""The content of the files of a model or an adapter: SHA-256 over every byte, computed once.

A digest is recorded in the user's cache folder under the file's device, inode, size, mtime and
ctime, if a clock has set the ctime. Digests are not kept in the model's folder: a writer of that
folder could record a false digest, and would be served the KV of another adapter.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import as_completed
from dataclasses import astuple, dataclass
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.local_files import atomic_write, cache_folder
from sglang_cake.core.threads import DaemonPool
from sglang_cake.stores.file.disk import file_system_type

logger = logging.getLogger("sglang_cake")

WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.npz",
    "transformer/*.safetensors",  # of Cosmos3
    "vision_encoder/*.safetensors",
)
# JSON files without effect on KV. Keys are made of token ids, so those of the tokenizer are here.
_TEXT_JSON = {
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "video_preprocessor_config.json",
    "vocab.json",
}
# `f_type` in statfs(2) of file systems whose kernel, or whose server, sets the ctime of a file by
# its clock at each change. Others are left out: in squashfs, EROFS and ISO 9660, the builder of an
# image has chosen all times, and with FUSE, 9p and virtiofs a program does. An overlay hides which
# one is below it. tmpfs sets no time when a file is written through a mapping.
_LUSTRE = 0x0BD00BD0
_CLOCKED = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0xF2F52010,  # F2FS
    0x2FC12FC1,  # ZFS
    0x6969,  # NFS
    0x00C36400,  # CephFS
    _LUSTRE,
    0x47504653,  # GPFS
}
READ_BYTES = 1 << 20
MAX_THREADS = 8
LOG_EVERY_S = 5.0
LOG_BYTES = 1 << 30  # work of this size is logged when it is finished
MAX_CODE_FILES = 2000  # of one model, with the folders
# The digest of a file that changed within this time is not recorded. Clocks of file systems are
# coarse, so the file may change again without a change of its times.
SETTLED_S = 2.0
MAX_RECORDS = 4096  # if there are more, the oldest quarter is removed
_LOCKS = 64
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WRITE_AND_WAIT


class ContentChanged(Exception):
    """A file changed after its state was recorded, so it is unknown what was loaded from it."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's metadata. Equal states mean equal content, if `_is_clocked`."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


# Links are followed, since a snapshot in Hugging Face's cache consists of links.
Files = dict[Path, FileState]


def file_states(paths: Iterable[Path]) -> Files:
    """The current states of files, sorted by path. Raises: OSError if one cannot be read."""
    return {path: _state_of(path) for path in sorted(paths)}


def _state_of(file: Path) -> FileState:
    """The state of a file whose next change sets its ctime. A page of a mapping that is dirty
    already takes further writes without that; once its pages are written back, none is dirty."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    try:
        _sync_file_range(fd, 0, 0, _WRITE_AND_WAIT)  # unlike fsync, of no cost for a clean file
        return FileState.of(os.fstat(fd))
    finally:
        os.close(fd)


def weight_files(path: str, folder: Path) -> list[Path]:
    """The files with the weights, and the index that assigns tensors to files.

    Raises: ConfigError if there is none.
    """
    if Path(path).is_file():
        return [Path(path)]
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"there are no weight files in {folder}")
    return files + list(folder.glob("*.index.json"))


def config_files(folder: Path, *, code: bool) -> list[Path]:
    """The files that define the computation with the weights.

    Args: code: include Python files, which the server may run (`--trust-remote-code`).
    """
    found = [file for file in folder.glob("*.json") if file.name not in _TEXT_JSON]
    return [
        *(file for file in found if not file.name.endswith(".index.json")),
        *(code_files(folder) if code else ()),
    ]


def code_files(folder: Path) -> list[Path]:
    """All Python files below a folder, also where links lead to. Hidden folders, and virtual
    environments, have none of the folder's own.

    Raises: ConfigError if there are more files and folders than `MAX_CODE_FILES`; OSError.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        # Sorted, so that the first of several links to a folder counts.
        status = os.stat(place)
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:  # else a link to a folder above has no end
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        found += [Path(place, name) for name in names if name.endswith(".py")]
        if len(found) + len(seen) > MAX_CODE_FILES:
            raise ConfigError(f"{folder} has more than {MAX_CODE_FILES} Python files and folders")
    return found


def all_files(path: Path) -> list[Path]:
    """The file, or every file below the folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def tensor_names(files: Iterable[Path]) -> frozenset[str] | None:
    """Names of all tensors in safetensors files; of those that an index lists, if there is one:
    SGLang loads no other. None if a file of weights has another format, or if no tensor is found.

    Raises: OSError, ValueError.
    """
    files = list(files)
    indices = [file for file in files if file.name.endswith(".safetensors.index.json")]
    maps = [json.loads(index.read_bytes()).get("weight_map", {}) for index in indices]
    listed = {Path(name).name for each in maps for name in each.values()}
    names: set[str] = set()
    for file in files:
        if file.name.endswith(".index.json"):
            continue
        if file.suffix != ".safetensors":
            return None
        if indices and file.name not in listed:
            continue
        with file.open("rb") as stream:
            size_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes > file.stat().st_size:
                raise ValueError(f"{file} is no safetensors file")
            names.update(json.loads(stream.read(size_bytes)))
    return frozenset(names - {"__metadata__"}) or None


def _recorded(state: FileState) -> str | None:
    """The digest of a file that was computed before; None if there is no record, or if it is
    damaged."""
    folder = _records_folder()
    if folder is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(folder / _name(state), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            text = os.read(fd, 100).decode("ascii")
        finally:
            os.close(fd)
        if len(bytes.fromhex(text)) == hashlib.sha256().digest_size:
            return text
    return None


def _record(state: FileState, digest: str) -> None:
    """Nothing is synced, since losing a record costs only time."""
    folder = _records_folder()
    if folder is None or time.time() - state.ctime_ns / 1e9 < SETTLED_S:
        return
    with contextlib.suppress(OSError):
        atomic_write(folder / _name(state), digest.encode())
        records = [file for file in folder.iterdir() if not file.name.startswith("lock-")]
        if len(records) > MAX_RECORDS:
            records.sort(key=lambda file: file.stat().st_mtime)
            for file in records[: len(records) - MAX_RECORDS * 3 // 4]:
                file.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(state: FileState) -> Iterator[None]:
    """Inside, no other process of this user hashes the file, if the folder can have locks."""
    folder = _records_folder()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(OSError):
                path = folder / f"lock-{int(_name(state)[:4], 16) % _LOCKS}"
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(path, flags, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _records_folder() -> Path | None:
    """The folder of records, one file each, made if necessary; None if there is none that only the
    user can enter."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder() / "content"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if stat.S_ISDIR(status.st_mode) and private:
            return folder
    return None


def _name(state: FileState) -> str:
    return hashlib.sha256(repr(astuple(state)).encode()).hexdigest()


def _is_clocked(file: Path, state: FileState) -> bool:
    """Whether a clock has set the file's ctime. Two images whose builder has chosen it may agree in
    device, inode, size and times, one mounted after the other.

    The image of a disk (ext4 with SOURCE_DATE_EPOCH) may have chosen times too, and a server of NFS
    may export an image. Such times are whole seconds; those of a clock are not, but on Lustre.
    """
    try:
        kind = file_system_type(file)
    except OSError:
        return False
    clocked = kind in _CLOCKED and (kind == _LUSTRE or state.ctime_ns % 10**9 != 0)
    if not clocked:
        _log_unclocked(kind)
    return clocked


@functools.cache  # one line for each file system
def _log_unclocked(kind: int) -> None:
    logger.info(
        "cake: files are hashed at each start, since their times may be those of an image (file "
        "system type 0x%x)",
        kind,
    )


def unhashed_bytes(files: Files) -> int:
    """How many bytes have to be read for the digest of the files."""
    return sum(
        state.size_bytes
        for file, state in files.items()
        if not _is_clocked(file, state) or _recorded(state) is None
    )


def content_digest(files: Files, cancelled: threading.Event | None = None) -> str:
    """SHA-256, in hex, over the SHA-256 of each file and its name, which begins in the folder that
    all files are in.

    Several processes that need the same files share the work. Long work logs its progress and its
    rate.

    Args: cancelled: another thread may set it to end the work.
    Raises: ContentChanged if the state of a file differs from `files`, or if the work is cancelled;
        OSError.
    """
    progress = _Progress(files, cancelled or threading.Event())
    pool = DaemonPool(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)), "cake-hash")
    try:
        begun = {pool.submit(_file_digest, file, files[file], progress): file for file in files}
        digests = {begun[each]: each.result() for each in as_completed(begun)}
    finally:
        pool.shutdown(cancel_futures=True)
    progress.finished()
    whole = hashlib.sha256(b"sglang_cake content v1")
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    names = {file: os.fsencode(os.path.relpath(file, top)) for file in files}
    for file, name in sorted(names.items(), key=lambda each: each[1]):
        whole.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digests[file]))
    return whole.hexdigest()


class _Progress:
    """Logs the progress of hashing. Any thread."""

    def __init__(self, files: Files, cancelled: threading.Event) -> None:
        self._total = sum(state.size_bytes for state in files.values())
        self._lock = threading.Lock()
        self._cancelled = cancelled
        self._read_bytes = 0
        self._began_s = time.monotonic()
        self._logged_s = self._began_s

    def read(self, size_bytes: int) -> None:
        """Count bytes that were hashed. Raises: ContentChanged if the work is cancelled."""
        if self._cancelled.is_set():
            raise ContentChanged("cancelled")
        with self._lock:
            self._read_bytes += size_bytes
            now_s = time.monotonic()
            if now_s - self._logged_s < LOG_EVERY_S:
                return
            self._logged_s = now_s
        logger.info("cake: hashing weights, %s", self._text())

    def finished(self) -> None:
        if self._read_bytes >= LOG_BYTES:
            logger.info("cake: hashed weights, %s", self._text())

    def _text(self) -> str:
        took_s = max(1e-9, time.monotonic() - self._began_s)
        return (
            f"{self._read_bytes / 1e9:.2f} of {self._total / 1e9:.2f} GB read, "
            f"{self._read_bytes / took_s / 1e9:.2f} GB/s"
        )


def _file_digest(file: Path, state: FileState, progress: _Progress) -> str:
    if FileState.of(file.stat()) != state:
        raise ContentChanged(f"{file} changed")
    if not _is_clocked(file, state):
        return _hash_file(file, state, progress)
    if (known := _recorded(state)) is not None:
        return known
    with _locked(state):
        known = _recorded(state)  # another process may have written it in the meantime
        if known is None:
            known = _hash_file(file, state, progress)
            _record(state, known)
        return known


def _hash_file(file: Path, state: FileState, progress: _Progress) -> str:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or FileState.of(status) != state:
            raise ContentChanged(f"{file} changed")
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(READ_BYTES))
        while size_bytes := os.readv(fd, [buffer]):
            digest.update(buffer[:size_bytes])
            progress.read(size_bytes)
        if FileState.of(os.fstat(fd)) != state:
            raise ContentChanged(f"{file} changed")
        return digest.hexdigest()
    finally:
        os.close(fd)
