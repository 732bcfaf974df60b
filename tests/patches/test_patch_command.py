"""`sglang-cake patch` in a process of its own, on a copied SGLang in front of the real one."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_copy import VERSION, Copies, record_hash, write_metadata

import sglang_cake
from sglang_cake.cli import patch as patch_command
from sglang_cake.core.errors import PatchError

NAMES = [
    "0001-torchvision-optional",
    "0002-cpu-sgl-kernel-standins",
    "0003-torch-native-lower-right-causal",
    "0004-torch-native-window-slots",
]


def command(site: Path, action: str) -> subprocess.CompletedProcess[str]:
    package = Path(sglang_cake.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "sglang_cake", "patch", action],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(package)])},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


def snapshot(site: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and inode of every file: a rewritten file shows even if its bytes are equal."""
    return {
        path.relative_to(site).as_posix(): (
            path.read_bytes(),
            stat.S_IMODE(path.stat().st_mode),
            path.stat().st_ino,
        )
        for path in sorted(site.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def contents(site: Path) -> dict[str, bytes]:
    return {path: content for path, (content, _, _) in snapshot(site).items()}


def assert_refused(site: Path, action: str, *words: str) -> None:
    before = snapshot(site)
    result = command(site, action)
    assert result.returncode == 2
    assert result.stderr.startswith("sglang-cake: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert snapshot(site) == before


def test_patch_apply_writes_the_repaired_files_and_nothing_else(site: Path, copies: Copies) -> None:
    before = contents(site)
    assert command(site, "apply").returncode == 0
    assert contents(site) == before | copies.repaired
    assert all(copies.repaired[path] != copies.released[path] for path in copies.released)


def test_patch_apply_twice_changes_no_file(site: Path) -> None:
    command(site, "apply")
    before = snapshot(site)
    assert command(site, "apply").returncode == 0
    assert snapshot(site) == before


def test_patch_revert_restores_the_recorded_bytes(site: Path, copies: Copies) -> None:
    before = contents(site)
    command(site, "apply")
    assert command(site, "revert").returncode == 0
    assert contents(site) == before
    for path, digest in copies.recorded.items():
        assert record_hash((site / path).read_bytes()) == digest


def test_patch_revert_of_released_files_changes_no_file(site: Path) -> None:
    before = snapshot(site)
    assert command(site, "revert").returncode == 0
    assert snapshot(site) == before


def test_patch_apply_keeps_the_mode_of_a_file_and_a_hard_linked_copy(
    site: Path, copies: Copies, tmp_path: Path
) -> None:
    name = next(iter(copies.released))
    (site / name).chmod(0o640)
    (tmp_path / "cache").hardlink_to(site / name)
    command(site, "apply")
    assert stat.S_IMODE((site / name).stat().st_mode) == 0o640
    assert (tmp_path / "cache").read_bytes() == copies.released[name]


def test_patch_status_has_one_line_per_patch(site: Path) -> None:
    result = command(site, "status")
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [f"{name}: not applied" for name in NAMES],
    )
    command(site, "apply")
    result = command(site, "status")
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [f"{name}: applied" for name in NAMES],
    )


def test_patch_apply_interrupted_is_shown_and_finished(site: Path, copies: Copies) -> None:
    path = "sglang/srt/mem_cache/allocation.py"
    (site / path).write_bytes(copies.repaired[path])
    assert f"{NAMES[1]}: partly applied" in command(site, "status").stdout
    assert command(site, "apply").returncode == 0
    assert copies.repaired.items() <= contents(site).items()


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("start", ["released", "repaired"])
def test_patch_changed_file_is_refused_before_any_write(
    site: Path, copies: Copies, action: str, start: str
) -> None:
    if start == "repaired":
        command(site, "apply")
    # The last file in order, and a change far from every hunk: only the recorded hash can tell.
    path = sorted(copies.released)[-1]
    with (site / path).open("ab") as file:
        file.write(b"# local change\n")
    assert_refused(site, action, path)


def test_patch_change_inside_a_hunk_is_refused(site: Path, copies: Copies) -> None:
    path = "sglang/kernels/ops/kvcache/cache_move.py"
    changed = copies.released[path].replace(b"import triton\n", b"import triton  # local\n", 1)
    (site / path).write_bytes(changed)
    assert_refused(site, "apply", path)
    status = command(site, "status")
    assert status.returncode == 2
    assert f"{NAMES[1]}: does not fit" in status.stdout
    assert f"{NAMES[0]}: not applied" in status.stdout


def test_patch_apply_without_a_record_refuses_a_shifted_hunk(site: Path, copies: Copies) -> None:
    write_metadata(site, VERSION, {})
    path = "sglang/kernels/ops/kvcache/cache_move.py"
    (site / path).write_bytes(b"# one line more\n" + copies.released[path])
    assert_refused(site, "apply", path)


@pytest.mark.parametrize(
    ("action", "version"),
    [("status", "0.5.21"), ("apply", "0.5.24"), ("revert", "0.5.23.post1")],
)
def test_patch_other_sglang_version_is_refused(
    site: Path, copies: Copies, action: str, version: str
) -> None:
    write_metadata(site, version, copies.recorded)
    assert_refused(site, action, version, VERSION)


def test_patch_missing_file_is_refused(site: Path, copies: Copies) -> None:
    path = next(iter(copies.released))
    (site / path).unlink()
    assert_refused(site, "apply", path)


def test_patch_failed_write_leaves_all_files_unchanged(
    site: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(site)
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PatchError, match="No space left"):
        patch_command.write_files(site, copies.released, copies.repaired)
    assert snapshot(site) == before


def test_patch_files_begin_with_their_reason() -> None:
    folder = patch_command.patches_root() / f"sglang-{VERSION}"
    assert sorted(path.stem for path in folder.glob("*.patch")) == NAMES
    for path in folder.glob("*.patch"):
        header = path.read_text().split("--- a/")[0]
        assert "Why: " in header
        assert "What fails without it: " in header
