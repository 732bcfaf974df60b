"""What the files of a model or an adapter hold: SHA-256 over every byte, computed once.

A digest is remembered in the user's cache folder under the file's device, inode, size, mtime and
ctime. It is not kept in the model's folder: whoever may write an adapter there could name another
adapter's digest for it, and would be served that one's KV.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from sglang_cake.core.atomic_write import atomic_write
from sglang_cake.core.cache_folder import cache_folder
from sglang_cake.core.errors import ConfigError

logger = logging.getLogger("sglang_cake")

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
# JSON files that say nothing of how KV is computed: keys are token ids already.
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
READ_BYTES = 1 << 20
MAX_THREADS = 8
TELL_EVERY_S = 5.0
TELL_BYTES = 1 << 30
# A file that changed this lately may change again with the same times: clocks of file systems are
# coarse. Its digest is used, and not remembered.
SETTLED_S = 2.0
MAX_RECORDS = 4096
_LOCKS = 64


class ContentChanged(Exception):
    """A file changed while it was being identified, so what was loaded from it is not known."""


@dataclass(frozen=True, slots=True)
class FileState:
    """One file as the file system describes it; equal states are equal content."""

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


# Path -> state, by name. Links are followed: a snapshot of Hugging Face's cache is made of them.
Files = dict[Path, FileState]


def look(paths: Iterable[Path]) -> Files:
    """The states of files. Raises: OSError if one cannot be read."""
    return {path: FileState.of(path.stat()) for path in sorted(paths)}


def model_folder(path: str, *, revision: str | None, download_dir: str | None) -> Path:
    """Where SGLang loads the model `path` from: a folder, or the local snapshot of a model on
    Hugging Face.

    Raises: ConfigError if nothing is there.
    """
    place = Path(path)
    if place.exists():
        return place if place.is_dir() else place.parent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                path, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(f"there is no local copy of {path!r}") from error


def weight_files(path: str, folder: Path) -> list[Path]:
    """The files that hold the weights, and the index that says which tensor is in which.

    Raises: ConfigError if there is none.
    """
    if Path(path).is_file():
        return [Path(path)]
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"there are no weight files in {folder}")
    return files + list(folder.glob("*.index.json"))


def config_files(folder: Path, *, code: bool) -> list[Path]:
    """The files that decide how the weights are used.

    Args: code: Python files in the folder may be run (`--trust-remote-code`).
    """
    found = [file for file in folder.glob("*.json") if file.name not in _TEXT_JSON]
    return [
        *(file for file in found if not file.name.endswith(".index.json")),
        *(folder.glob("*.py") if code else ()),
    ]


def all_files(path: Path) -> list[Path]:
    """The file, or every file below the folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def tensor_names(files: Iterable[Path]) -> frozenset[str] | None:
    """Names of all tensors in safetensors files; None if some weights are in another format.

    Raises: OSError, ValueError.
    """
    names: set[str] = set()
    for file in files:
        if file.name.endswith(".index.json"):
            continue
        if file.suffix != ".safetensors":
            return None
        with file.open("rb") as stream:
            size_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes > file.stat().st_size:
                raise ValueError(f"{file} is no safetensors file")
            names.update(json.loads(stream.read(size_bytes)))
    return frozenset(names - {"__metadata__"})


def unhashed_bytes(files: Files) -> int:
    """How much of the files would have to be read for a digest."""
    return sum(state.size_bytes for state in files.values() if _recall(state) is None)


def content_digest(files: Files, stop: threading.Event | None = None) -> str:
    """SHA-256, in hex, over the names of the files and the SHA-256 of each.

    Several processes that ask for the same files share the work. Long work logs its progress and
    its rate.

    Args: stop: set by another thread, it ends the work.
    Raises: ContentChanged if a file is not, or does not stay, as `files` says; OSError.
    """
    progress = _Progress(files, stop or threading.Event())
    digests: dict[Path, str] = {}
    for wait in (False, True):  # first files that no other process hashes now, then the others
        _hash_all({f: s for f, s in files.items() if f not in digests}, digests, progress, wait)
    progress.finished()
    whole = hashlib.sha256(b"sglang_cake content v1")
    for file in sorted(files, key=lambda path: path.name):
        name = os.fsencode(file.name)
        whole.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digests[file]))
    return whole.hexdigest()


def _hash_all(files: Files, digests: dict[Path, str], progress: "_Progress", wait: bool) -> None:
    """Put into `digests` what can be had; all of it, if `wait` is set. Raises: see above."""
    todo, failures = list(files.items()), list[Exception]()

    def work() -> None:
        try:
            while todo and not failures:
                with contextlib.suppress(IndexError):  # another thread took the last
                    file, state = todo.pop()
                    found = _file_digest(file, state, progress, wait=wait)
                    if found is not None:
                        digests[file] = found
        except (ContentChanged, OSError) as error:
            failures.append(error)

    # Daemons, not a pool: a hung disk must not keep the process from ending.
    count = min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2, len(todo))
    helpers = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


class _Progress:
    """Tells the log how far hashing is. Any thread."""

    def __init__(self, files: Files, stop: threading.Event) -> None:
        self._total = sum(state.size_bytes for state in files.values())
        self._lock, self._stop = threading.Lock(), stop
        self._read_bytes = 0
        self._began_s = self._told_s = time.monotonic()

    def read(self, size_bytes: int) -> None:
        """Raises: ContentChanged if the work is to end."""
        if self._stop.is_set():
            raise ContentChanged("the process ends")
        with self._lock:
            self._read_bytes += size_bytes
            now_s = time.monotonic()
            if now_s - self._told_s < TELL_EVERY_S:
                return
            self._told_s = now_s
        logger.info("cake: hashing weights, %s", self._text())

    def finished(self) -> None:
        if self._read_bytes >= TELL_BYTES:
            logger.info("cake: hashed weights, %s", self._text())

    def _text(self) -> str:
        took_s = max(1e-9, time.monotonic() - self._began_s)
        return (
            f"{self._read_bytes / 1e9:.2f} of {self._total / 1e9:.2f} GB read, "
            f"{self._read_bytes / took_s / 1e9:.2f} GB/s"
        )


def _file_digest(file: Path, state: FileState, progress: _Progress, *, wait: bool) -> str | None:
    """None if another process hashes the file now and `wait` is not set."""
    if FileState.of(file.stat()) != state:
        raise ContentChanged(f"{file} changed")
    if (known := _recall(state)) is not None:
        return known
    with _claim(state, wait=wait) as mine:
        if not mine:
            return None
        if (known := _recall(state)) is not None:
            return known
        found = _hash_file(file, state, progress)
        _remember(state, found)
        return found


def _hash_file(file: Path, state: FileState, progress: _Progress) -> str:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not hang us
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or FileState.of(status) != state:
            raise ContentChanged(f"{file} changed")
        digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        while size_bytes := os.readv(fd, [buffer]):
            digest.update(buffer[:size_bytes])
            progress.read(size_bytes)
        if FileState.of(os.fstat(fd)) != state:
            raise ContentChanged(f"{file} changed")
        return digest.hexdigest()
    finally:
        os.close(fd)


# ---- digests that were computed before ----


def _records() -> Path | None:
    """The folder of records, made here; None if there can be none that is the user's alone."""
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


def _recall(state: FileState) -> str | None:
    folder = _records()
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


def _remember(state: FileState, digest: str) -> None:
    """Losing a record costs time only, so nothing is synced; a name appears with its content."""
    folder = _records()
    if folder is None or time.time() - state.ctime_ns / 1e9 < SETTLED_S:
        return
    with contextlib.suppress(OSError):
        atomic_write(folder / _name(state), digest.encode())
        _forget_oldest(folder)


def _forget_oldest(folder: Path) -> None:
    records = [file for file in folder.iterdir() if not file.name.startswith("lock-")]
    if len(records) > MAX_RECORDS:
        ages = sorted((file.stat().st_mtime, file) for file in records)
        for _, file in ages[: len(ages) - MAX_RECORDS * 3 // 4]:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _claim(state: FileState, *, wait: bool) -> Iterator[bool]:
    """One process of this user hashes a file: this one, if True is yielded."""
    folder = _records()
    fd = -1
    if folder is not None:
        with contextlib.suppress(OSError):
            lock = folder / f"lock-{int(_name(state)[:4], 16) % _LOCKS}"
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        mine = True
        if fd >= 0:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:  # another process has it, or the file system has no locks
                mine = wait
        yield mine
    finally:
        if fd >= 0:
            os.close(fd)
