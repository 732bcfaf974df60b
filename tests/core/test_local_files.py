"""A file is replaced whole, or stays as it was; a temporary folder goes with its processes."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from system_calls import failing

from sglang_cake.core.local_files import atomic_write, temporary_folder


@pytest.mark.parametrize("durable", [False, True])
def test_atomic_write_existing_file_is_replaced_by_a_private_one(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b"old")
    path.chmod(0o644)
    atomic_write(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b"old")

    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from sglang_cake.core.local_files import atomic_write\n"
        "print('go', flush=True)\n"
        "for n in range(10**9): atomic_write(Path(sys.argv[1]), b'%d' % (n % 10) * 100_000)\n"
    )
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            while not path.exists():
                pass
            for _ in range(50):
                assert len(set(path.read_bytes())) == 1
            writer.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 100_000
        assert len(set(content)) == 1


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folder_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with temporary_folder("some-") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
        with temporary_folder("some-") as other:  # does not take the first, which is in use
            assert sorted(temporary.iterdir()) == sorted([folder, other])
        assert (folder / "file").exists()
    assert list(temporary.iterdir()) == []


def test_temporary_folder_of_a_killed_process_is_removed_by_the_next_one(temporary: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from sglang_cake.core.local_files import temporary_folder\n"
        "with temporary_folder('some-') as folder:\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        (left,) = temporary.iterdir()
        process.kill()
        process.wait()
        with temporary_folder("some-"):
            assert left.exists()  # its child holds the lock
        os.kill(child, signal.SIGKILL)
        process.stdout.read()  # until the child has ended
    with temporary_folder("some-") as folder:
        assert list(temporary.iterdir()) == [folder]


def test_temporary_folder_link_to_another_folder_is_not_followed(temporary: Path) -> None:
    other = temporary / "other"
    other.mkdir()
    (other / "file").touch()
    (temporary / "some-link").symlink_to(other)
    with temporary_folder("some-"):
        pass
    assert (other / "file").exists()
