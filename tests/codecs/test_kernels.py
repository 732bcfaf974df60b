"""Compiled loops and the folder that keeps them: whatever is wrong with it, a loop is compiled."""

import contextlib
import importlib.util
import os
import resource

import numba
import pytest

from sglang_cake.codecs.kernels import compiled


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """A loop as a new process has it. Its argument is the factor in its source."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    source = tmp_path / "loops.py"

    def loop(factor):
        text = f"def times(number):\n    return number * {factor}\n"
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        spec = importlib.util.spec_from_file_location("loops", source)
        loops = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loops)
        return compiled(loops.times)

    return loop


@contextlib.contextmanager
def full_disk(free_bytes):
    """No file may become larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def is_loaded(loop):
    """Whether its calls found it compiled."""
    return bool(loop.stats.cache_hits)


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", ["nothing", "half", "zeros"])
def test_compiled_loop_with_damaged_files_is_compiled_and_kept_again(tmp_path, loop, kind, left):
    """As after a crash of the machine: numba renames its files before they are on the disk."""
    assert loop(2)(3) == 6
    (file,) = tmp_path.rglob(f"*.{kind}")
    whole = file.read_bytes()
    half = whole[: len(whole) // 2]
    file.write_bytes({"nothing": b"", "half": half, "zeros": bytes(len(whole))}[left])
    for loaded in (False, True):
        again = loop(2)
        assert again(3) == 6
        assert is_loaded(again) == loaded


@pytest.mark.parametrize("free_bytes", [0, 2048])
def test_compiled_loop_on_a_full_disk_runs_and_leaves_no_older_one(loop, free_bytes):
    assert loop(2)(3) == 6
    newer = loop(10)
    with full_disk(free_bytes):  # 2,048 bytes are enough for numba's index
        assert newer(3) == 30
    for loaded in (False, True):
        again = loop(10)
        assert again(3) == 30
        assert is_loaded(again) == loaded


def test_compiled_loop_of_a_process_between_two_writes_of_another_is_not_older(loop, monkeypatch):
    assert loop(2)(3) == 6
    replace = os.replace
    seen = []

    def replace_and_run(old, new):
        replace(old, new)
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            seen.append(loop(10)(3))

    monkeypatch.setattr(os, "replace", replace_and_run)
    assert loop(10)(3) == 30
    assert seen == [30, 30]
