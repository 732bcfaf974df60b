"""The digest of a model's files depends on all bytes and names, and on nothing else."""

import json
import logging
import mmap
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.identity import content
from sglang_cake.integration.identity.content import (
    ContentChanged,
    Files,
    FileState,
    content_digest,
    file_states,
    unhashed_bytes,
)
from sglang_cake.integration.identity.identity import ModelSource
from sglang_cake.stores.file.disk import file_system_type

LARGE_BYTES = (32 << 20) + 5  # more than is read at once
EXT4, SQUASHFS, OVERLAY, NFS, TMPFS = 0xEF53, 0x73717368, 0x794C7630, 0x6969, 0x01021994


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records; each test has its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "file_system_type", lambda path: EXT4)  # whatever it is here
    later_s = time.time() + content.SETTLED_S + 60.0
    monkeypatch.setattr("time.time", lambda: later_s)  # so that files of any age have records
    return tmp_path / "cache" / "sglang_cake" / "content"


# A class of SGLang's models that names the files of its weights.
_OVERRIDES = re.compile(r"allow_patterns_overrides *=|secondary_weights *=")


def _write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    return folder


def _states(folder: Path) -> Files:
    return file_states(folder.glob("*"))


def _digest(folder: Path) -> str:
    return content_digest(_states(folder))


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@given(st.binary(max_size=200), st.data())
@settings(max_examples=30)
def test_content_digest_one_flipped_bit_is_another_digest(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, data: st.DataObject
) -> None:
    folder = _write(tmp_path_factory.mktemp("m"), a=raw + b".", b=b"b")
    before = _digest(folder)
    _flip(folder / "a.safetensors", data.draw(st.integers(0, len(raw))))
    assert _digest(folder) != before


def test_content_digest_large_file_changed_under_equal_mtime_differs(
    tmp_path: Path,
) -> None:
    file = _write(tmp_path / "m", a=b"") / "a.safetensors"
    os.truncate(file, LARGE_BYTES)
    os.utime(file, ns=(1, 1))
    before = _digest(tmp_path / "m")
    _flip(file, LARGE_BYTES // 2 + 12345)
    os.utime(file, ns=(1, 1))
    assert _digest(tmp_path / "m") != before


def test_content_digest_equal_files_in_another_folder_are_equal(tmp_path: Path) -> None:
    one = _write(tmp_path / "a" / "model", x=b"1" * 5000, y=b"2")
    other = tmp_path / "b" / "other-name"
    shutil.copytree(one, other)
    os.utime(other / "x.safetensors", ns=(1, 1))
    assert _digest(one) == _digest(other)
    link = tmp_path / "snapshot"  # as in Hugging Face's cache
    link.mkdir()
    for file in one.iterdir():
        (link / file.name).symlink_to(file)
    assert _digest(link) == _digest(one)


def test_content_digest_file_names_and_file_borders_count(tmp_path: Path) -> None:
    folders = [
        _write(tmp_path / "1", a=b"12", b=b"3"),
        _write(tmp_path / "2", a=b"1", b=b"23"),
        _write(tmp_path / "3", a=b"3", b=b"12"),
        _write(tmp_path / "4", a=b"12", c=b"3"),
        _write(tmp_path / "5", a=b"12"),
    ]
    assert len({_digest(folder) for folder in folders}) == len(folders)


def test_content_digest_hashed_file_is_not_read_again(tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", a=b"1" * 5000, b=b"2" * 700)
    files = _states(folder)
    assert unhashed_bytes(files) == 5700
    first = content_digest(files)
    assert unhashed_bytes(files) == 0
    assert content_digest(files) == first
    _flip(folder / "a.safetensors", 0)
    assert unhashed_bytes(_states(folder)) == 5000


COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, from which file systems take times


@pytest.mark.parametrize(
    ("kind", "ctime_ns", "recorded"),
    [
        (EXT4, 1_700_000_000_123_456_789, True),
        (NFS, 1_700_000_000_123_456_789, True),
        (EXT4, 1_700_000_000_000_000_000, False),
        (NFS, 1_700_000_000_000_000_000, False),
        (SQUASHFS, 1_700_000_000_000_000_000, False),
        (SQUASHFS, 1_700_000_000_123_456_789, False),
        (OVERLAY, 1_700_000_000_123_456_789, False),
        (TMPFS, 1_700_000_000_123_456_789, False),
    ],
)
def test_content_digest_files_of_two_images_with_equal_times_are_both_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, ctime_ns: int, recorded: bool
) -> None:
    """One is mounted after the other."""
    monkeypatch.setattr(content, "file_system_type", lambda path: kind)
    state = FileState(1, 2, 1, 3, ctime_ns)
    monkeypatch.setattr(FileState, "of", lambda status: state)
    one, other = _write(tmp_path / "1", a=b"1"), _write(tmp_path / "2", a=b"2")
    first = _digest(one)
    assert unhashed_bytes(_states(other)) == (0 if recorded else 1)
    assert (_digest(other) == first) == recorded


def test_content_digest_each_file_system_whose_files_have_no_record_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [secrets.randbits(31) for _ in range(2)]  # the log of this process has none of them
    with caplog.at_level(logging.INFO, "sglang_cake"):
        for kind in kinds:
            monkeypatch.setattr(content, "file_system_type", lambda path, kind=kind: kind)
            _digest(_write(tmp_path / str(kind), a=b"1", b=b"2"))
    logged = [line for line in caplog.messages if "hashed at each start" in line]
    assert [f"0x{kind:x}" in line for kind, line in zip(kinds, logged, strict=True)] == [True] * 2


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_content_digest_file_written_through_a_mapping_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Such a write sets the times of a file on a disk if its page was clean, and never in tmpfs."""
    monkeypatch.setattr(content, "file_system_type", file_system_type)
    parent = tmp_path if place == "disk" else Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = _write(Path(name) / "m", a=b"1" * 8192)
        (file,) = folder.glob("a.*")
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as pages:
            pages[0] = 2
            first = _digest(folder)
            changed_ns = file.stat().st_ctime_ns
            while time.clock_gettime_ns(COARSE_CLOCK) <= changed_ns:
                pass  # else the file system would give the next change the same time
            pages[0] = 3
            assert _digest(folder) != first


def test_content_digest_recently_changed_file_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks of file systems are coarse, so it may change again without a change of its times."""
    files = _states(_write(tmp_path / "m", a=b"1"))
    (state,) = files.values()
    changed_s = state.ctime_ns / 1e9
    monkeypatch.setattr("time.time", lambda: changed_s + 0.9 * content.SETTLED_S)
    content_digest(files)
    assert unhashed_bytes(files) == 1
    monkeypatch.setattr("time.time", lambda: changed_s + 1.1 * content.SETTLED_S)
    content_digest(files)
    assert unhashed_bytes(files) == 0


@pytest.mark.parametrize("change", ["content", "longer", "shorter", "replaced", "gone"])
def test_files_that_changed_since_their_state_was_recorded_have_no_digest(
    tmp_path: Path, change: str
) -> None:
    folder = _write(tmp_path / "m", a=b"1" * 1000, b=b"2")
    file = folder / "a.safetensors"
    files = _states(folder)
    if change == "content":
        _flip(file, 3)
    elif change == "replaced":
        (folder / "new").write_bytes(b"3" * 1000)
        (folder / "new").rename(file)
    elif change == "gone":
        file.unlink()
    else:
        os.truncate(file, 2000 if change == "longer" else 10)
    with pytest.raises((ContentChanged, OSError)):
        content_digest(files)


def test_content_digest_pipe_in_place_of_a_file_raises(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(ContentChanged):
        _digest(folder)


def test_cancelled_work_ends(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ContentChanged, match="cancelled"):
        content_digest(_states(_write(tmp_path / "m", a=b"1")), cancelled)


def _records(cache: Path) -> list[Path]:
    return [file for file in cache.iterdir() if not file.name.startswith("lock-")]


@pytest.mark.parametrize("damage", ["empty", "short", "text", "link", "folder"])
def test_content_digest_damaged_record_is_ignored(tmp_path: Path, cache: Path, damage: str) -> None:
    files = _states(_write(tmp_path / "m", a=b"1"))
    right = content_digest(files)
    (record,) = _records(cache)
    kept = record.read_text()
    record.unlink()
    if damage == "link":
        (tmp_path / "forged").write_text(kept[:-1] + "0")
        record.symlink_to(tmp_path / "forged")
    elif damage == "folder":
        record.mkdir()
    else:
        record.write_text({"empty": "", "short": kept[:40], "text": "z" * 64}[damage])
    assert content_digest(files) == right


def test_content_digest_records_in_a_world_writable_folder_are_ignored(
    tmp_path: Path, cache: Path
) -> None:
    files = _states(_write(tmp_path / "m", a=b"1"))
    right = content_digest(files)
    (record,) = _records(cache)
    record.write_text("0" * 64)
    cache.chmod(0o777)
    assert content_digest(files) == right


def test_content_digest_records_are_accessible_to_the_user_only(
    tmp_path: Path, cache: Path
) -> None:
    _digest(_write(tmp_path / "m", a=b"1"))
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in cache.iterdir()} == {0o600}


def test_content_digest_without_a_cache_folder_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _states(_write(tmp_path / "m", a=b"1"))
    right = content_digest(files)
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert content_digest(files) == right


def test_content_digest_number_of_records_is_bounded(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MAX_RECORDS", 8)
    for number in range(30):
        folder = _write(tmp_path / str(number), a=b"%d" % number)
        _digest(folder)
        assert len(_records(cache)) <= 8


def test_content_digest_concurrent_processes_agree(tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", **{f"f{i}": bytes([i]) * (1 << 20) for i in range(8)})
    program = (
        "import sys, pathlib, time\n"
        "from sglang_cake.integration.identity import content\n"
        f"time.time = lambda: {time.time()}\n"
        "files = content.file_states(pathlib.Path(sys.argv[1]).glob('*'))\n"
        "print(content.content_digest(files))\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert printed == {_digest(folder) + "\n"}


def test_model_folder_weight_config_and_code_files_are_selected(tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", model=b"1")
    for name in (
        "config.json",
        "quantize_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "generation_config.json",
        "modeling.py",
        "README.md",
    ):
        (folder / name).write_text("{}")
    weights = {file.name for file in content.weight_files(str(folder), folder)}
    assert weights == {"model.safetensors", "model.safetensors.index.json"}
    config = {file.name for file in content.config_files(folder, code=False)}
    assert config == {"config.json", "quantize_config.json"}
    with_code = {file.name for file in content.config_files(folder, code=True)}
    assert with_code == config | {"modeling.py"}
    (folder / "layers" / "__pycache__").mkdir(parents=True)
    (folder / "layers" / "attention.py").touch()
    (folder / "layers" / "__pycache__" / "attention.pyc").touch()
    (folder / "layers" / "above").symlink_to(folder, target_is_directory=True)
    with_code = {file.name for file in content.config_files(folder, code=True)}
    assert with_code == config | {"modeling.py", "attention.py"}


def test_weight_files_in_every_subfolder_that_sglang_loads_from_count(tmp_path: Path) -> None:
    models = Path(str(distribution("sglang").locate_file("sglang/srt/models")))
    text = "".join(file.read_text() for file in models.glob("cosmos3*.py"))
    patterns = set(re.findall(r'"([^"\n]+/\*\.safetensors)"', text))
    assert "vision_encoder/*.safetensors" in patterns
    others = {file.name for file in models.glob("*.py") if _OVERRIDES.search(file.read_text())}
    assert others == {"cosmos3.py", "cosmos3_edge.py"}
    folder = _write(tmp_path, model=b"1")
    for pattern in ("transformer", "vision_encoder", "vae"):
        _write(folder / pattern, model=b"1")
    loaded = {file for pattern in patterns for file in folder.glob(pattern)}
    assert loaded == set(content.weight_files(str(folder), folder)) - {folder / "model.safetensors"}


def test_content_digest_folder_of_a_file_counts(tmp_path: Path) -> None:
    digests = set()
    for place in ("a", "b"):
        folder = _write(tmp_path / place, m=b"1")
        below = _write(folder / "layers" / place, m=b"2")
        digests.add(content_digest(_states(below) | file_states(folder.glob("*.safetensors"))))
    assert len(digests) == 2


def test_model_folder_without_weights_or_local_copy_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight files"):
        content.weight_files(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="no local copy"):
        ModelSource("nobody/nothing").folder()


def test_tensor_names_are_read_from_safetensors_files_only(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(1)}, tmp_path / "2.safetensors")
    assert content.tensor_names(tmp_path.glob("*.safetensors")) == {"a", "b"}
    (tmp_path / "3.bin").write_bytes(b"")
    assert content.tensor_names(tmp_path.iterdir()) is None
    (tmp_path / "4.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="no safetensors"):
        content.tensor_names([tmp_path / "4.safetensors"])


def test_tensor_names_of_files_that_the_index_does_not_list_are_left_out(tmp_path: Path) -> None:
    """SGLang does not load them, so an update leaves their tensors as they were."""
    import torch
    from safetensors.torch import save_file
    from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files

    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    loaded = filter_duplicate_safetensors_files(files, str(tmp_path), index.name)
    assert loaded == [str(tmp_path / "a.safetensors")]
    assert content.tensor_names(tmp_path.iterdir()) == {"a"}
    index.write_text("{}")
    assert content.tensor_names(tmp_path.iterdir()) is None
