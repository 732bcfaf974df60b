"""What may be written as a store URL, and one clear line for everything else."""

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storetools import ALICE, file_of, fill, refusal_of
from system_calls import Disk, failing

from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.file import disk as disk_module
from sglang_cake.stores.file.block_files import INDEX
from sglang_cake.stores.file.disk import file_system_type
from sglang_cake.stores.file.file_store import DEFAULT_MIN_FREE_BYTES, FileSource, default_source
from sglang_cake.stores.file.index import BlockIndex, ScannedFile
from sglang_cake.stores.file.scan import stats_in
from sglang_cake.stores.open_store import check_sources, parse_sources
from sglang_cake.stores.url import parse_bandwidth, parse_size, split_urls
from sglang_cake.testing.store_contract import key_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("200kB", 200_000),
        ("200KB", 200_000),
        ("200MB", 200_000_000),
        ("500GB", 500 * 10**9),
        ("500 GB", 500 * 10**9),
        ("10TB", 10**13),
        ("1PB", 10**15),
        ("1KiB", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("0.1GB", 10**8),
        ("999999999999999999", 10**18 - 1),
    ],
)
def test_parse_size_valid_text_gives_bytes(text, expected):
    assert parse_size(text) == expected


BAD_SIZES = [
    "",
    "GB",
    "-1",
    "1e9",
    "1.5.2GB",
    "1gb",
    "1Gb",
    "1G",
    "5 %",
    "inf",
    "1kiB",
    "1GB/s",
    "٣",
]


@pytest.mark.parametrize("text", BAD_SIZES)
def test_parse_size_invalid_text_raises_config_error(text):
    with pytest.raises(ConfigError) as error:
        parse_size(text)
    assert str(error.value) == (
        f"{text!r} is not a size: write bytes, or for example 500GB or 1.5GiB"
    )


@given(st.integers(0, 10**18 - 1))
def test_parse_size_digits_alone_are_exact_bytes(size_bytes):
    assert parse_size(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50MB/s", 50e6),
        ("1GiB/s", 2.0**30),
        ("32Gbps", 4e9),
        ("7Gbit/s", 0.875e9),
        ("8kbps", 1000.0),
        ("100B/s", 100.0),
        ("0.5MB/s", 0.5e6),
    ],
)
def test_parse_bandwidth_valid_text_gives_bytes_per_second(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["", "50", "50MB", "50Mb/s", "MB/s", "0MB/s", "0.0Gbps", "-1MB/s", "50MB/h", "1mbps"]
)
def test_parse_bandwidth_invalid_text_raises_config_error(text):
    with pytest.raises(ConfigError, match="is not a bandwidth: write for example 50MB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///nvme/kv", FileSource(Path("/nvme/kv"))),
        ("file:///nvme/kv/", FileSource(Path("/nvme/kv"))),
        ("file:////nvme/kv", FileSource(Path("/nvme/kv"))),
        ("file:///a%20b%2Cc%23", FileSource(Path("/a b,c#"))),
        ("file:///a/b~1", FileSource(Path("/a/b~1"))),
        ("file:///a?", FileSource(Path("/a"))),
        ("file:///a?fsync=data&min_free=20GB", FileSource(Path("/a"), "data", 20 * 10**9)),
        ("file:///a?min_free=0&fsync=off", FileSource(Path("/a"), "off", 0)),
        ("file:///a?min_free=1%20GB", FileSource(Path("/a"), min_free_bytes=10**9)),
    ],
)
def test_store_url_valid_text_is_parsed_into_its_source(text, expected):
    assert parse_sources(text) == [expected]


def test_store_url_bandwidth_option_wraps_the_source():
    (source,) = parse_sources("file:///a?bandwidth=50MB/s&fsync=data")
    assert source.inner == FileSource(Path("/a"), "data")
    assert source.bytes_per_s == 50e6


def test_store_url_with_several_stores_gives_them_in_order():
    assert parse_sources("file:///a,file:///b%2Cc") == [
        FileSource(Path("/a")),
        FileSource(Path("/b,c")),
    ]


def test_store_url_without_min_free_keeps_the_default_free_space():
    assert parse_sources("file:///a")[0].min_free_bytes == DEFAULT_MIN_FREE_BYTES > 0


BAD_URLS = {
    "": "the store URL is empty",
    "  ": "the store URL is empty",
    "/nvme/kv": "write for example file:///absolute/path",
    "file:/nvme/kv": "write for example file:///absolute/path",
    "gopher://host:8700": "unknown scheme",
    "://a": "unknown scheme ''",
    "FILE:///a": "unknown scheme 'FILE'",
    "file://": "the path is not absolute",
    "file:///": "names no folder",
    "file:///%00": "names no folder",
    "file://nvme/kv": "the path is not absolute, write file:///absolute/path",
    "file://~/kv": "'~' and '$' are not expanded",
    "file:///~/kv": "'~' and '$' are not expanded",
    "file://~me/kv": "'~' and '$' are not expanded",
    "file://$HOME/kv": "'~' and '$' are not expanded",
    "file:///$HOME/kv": "'~' and '$' are not expanded",
    "file:///a#b": "%23",
    "file:///a,b": "store URL 'b': write for example file:///absolute/path",
    "file:///a,": "store URL '': write for example file:///absolute/path",
    "file:///a?speed=1": "'speed': unknown key, allowed: admit, bandwidth, capacity, fair, "
    "fsync, key_file, min_free, policy, tenant_quota",
    "file:///a?capacity=1MB": "'capacity': '1MB' is too small, at least 16777216 bytes",
    "file:///a?tenant_quota=0": "'tenant_quota': '0' would keep nothing",
    "file:///a?policy=best": "'policy': 'best' is not possible, allowed: fifo, lru, lfu, gdfs, ",
    "file:///a?Fsync=off": "'Fsync': unknown key",
    "file:///a?&": "is given twice",
    "file:///a?fsync": "'fsync': '' is not possible, allowed: off, data",
    "file:///a?fsync=on": "'fsync': 'on' is not possible, allowed: off, data",
    "file:///a?fsync=off&fsync=off": "'fsync' is given twice",
    "file:///a?min_free=lots": "'min_free': 'lots' is not a size",
    "file:///a?bandwidth=50MB": "'bandwidth': '50MB' is not a bandwidth",
    "file:///a?bandwidth=50MB/s?fsync=off": "'bandwidth': '50MB/s?fsync=off' is not a bandwidth",
}


@pytest.mark.parametrize("text", BAD_URLS)
def test_store_url_invalid_text_is_one_config_error_line(text):
    refusal = refusal_of(text)
    assert BAD_URLS[text] in refusal
    if text.strip():
        assert repr(text.split(",")[-1]) in refusal


@given(st.one_of(st.text(), st.text().map(lambda text: "file:///a?" + text)))
def test_store_url_random_text_gives_sources_or_one_error_line(text):
    try:
        sources = parse_sources(text)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - both ways are fine
    else:
        assert all(source.path.is_absolute() for source in sources)


@pytest.mark.parametrize("names", ["", "abc"])
def test_default_source_takes_half_of_the_room_and_leaves_a_fifth_free(
    names, monkeypatch, tmp_path
):
    """Of the space that is free or its own, however full of other files the disk is."""
    folder = tmp_path / "sglang_cake/store"
    if names:
        folder.parent.mkdir(parents=True)
        fill(folder, ALICE, *names)
    own_bytes = stats_in(folder).used_bytes or 0
    assert (own_bytes > 0) == bool(names)
    disk = Disk(monkeypatch)
    disk.f_bavail = 1_024_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    room_bytes = 1_024_000 + own_bytes
    expected = FileSource(folder, min_free_bytes=room_bytes // 5, capacity_bytes=room_bytes // 2)
    assert default_source() == expected
    assert disk.asked == [folder if names else tmp_path]  # the nearest folder that is there
    assert names or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index_is", ["absent", "damaged", "rebuilt in part"])
def test_default_source_without_a_whole_index_counts_the_files_of_the_blocks(
    monkeypatch, tmp_path, index_is
):
    folder = tmp_path / "sglang_cake/store"
    folder.parent.mkdir(parents=True)
    fill(folder, ALICE, "a", "b", "c")
    own_bytes = sum(file_of(folder, ALICE, name).stat().st_blocks * 512 for name in "abc")
    if index_is == "rebuilt in part":
        with contextlib.closing(BlockIndex(folder / INDEX)) as index:
            index.clear()
            index.add_found(ALICE.digest, 0, [ScannedFile(key_of("a"), own_bytes // 3, 1.0, 1.0)])
    else:
        for file in folder.glob(f"{INDEX}*"):
            file.unlink()
    if index_is == "damaged":
        (folder / INDEX).write_bytes(b"no database at all")
    Disk(monkeypatch).f_bavail = 1_024_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_source().capacity_bytes == (1_024_000 + own_bytes) // 2


def test_default_source_counts_nothing_for_files_that_cannot_be_read(monkeypatch, tmp_path):
    folder = tmp_path / "sglang_cake/store"
    folder.parent.mkdir(parents=True)
    fill(folder, ALICE, "a")
    for file in folder.glob(f"{INDEX}*"):
        file.unlink()
    Disk(monkeypatch).f_bavail = 1_024_000
    monkeypatch.setattr(os, "listdir", failing(errno.EIO))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_source().capacity_bytes == 1_024_000 // 2


def test_default_source_after_a_reboot_takes_the_last_total_of_its_index(monkeypatch, tmp_path):
    folder = tmp_path / "sglang_cake/store"
    folder.parent.mkdir(parents=True)
    fill(folder, ALICE, "a", "b", "c")
    own_bytes = stats_in(folder).used_bytes
    with contextlib.closing(BlockIndex(folder / INDEX)) as index:
        index.mark_clean("an earlier boot")
    Disk(monkeypatch).f_bavail = 1_024_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_source().capacity_bytes == (1_024_000 + own_bytes) // 2


@pytest.mark.parametrize("value", [None, "", "relative/cache"])
def test_default_source_without_an_absolute_cache_folder_is_below_home(
    monkeypatch, tmp_path, value
):
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_source().path == tmp_path / ".cache/sglang_cake/store"


def test_default_source_without_a_home_folder_raises_config_error(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match=r"no default store .*: name one"):
        default_source()


def test_default_source_on_a_file_system_without_a_size_raises_config_error(monkeypatch, tmp_path):
    Disk(monkeypatch).lose_its_size()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no fixed size\): name one"):
        default_source()


def test_check_sources_wait_at_once_and_the_first_tier_with_an_error_is_named():
    met, second_failed = threading.Barrier(3), threading.Event()

    def passes():
        met.wait(60)

    def fails():
        met.wait(60)
        assert second_failed.wait(60)
        raise ConfigError("the first")

    def fails_sooner():
        met.wait(60)
        second_failed.set()
        raise ConfigError("the second")

    checks = [passes, fails, fails_sooner]
    with pytest.raises(ConfigError, match="the first"):
        check_sources([SimpleNamespace(check=check) for check in checks])


def test_file_source_check_creates_an_empty_private_folder(tmp_path):
    url = FileSource(tmp_path / "a" / "kv")
    url.check()
    url.check()
    assert list(url.path.iterdir()) == []
    assert url.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("below", ["", "kv", "a/kv"])
def test_file_source_check_of_an_impossible_folder_is_one_error_line(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below
    with pytest.raises(ConfigError) as error:
        FileSource(path).check()
    assert f"store folder {path} cannot be made or written: " in str(error.value)
    assert "\n" not in str(error.value)


def test_file_source_check_on_a_full_disk_raises_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(errno.ENOSPC))
    with pytest.raises(ConfigError, match="No space left on device"):
        FileSource(tmp_path).check()


@pytest.mark.parametrize(
    ("kind", "name"), [(0x6969, "NFS"), (0x5346414F, "AFS"), (0x6B414653, "AFS")]
)
def test_file_source_check_on_a_network_file_system_is_refused(tmp_path, monkeypatch, kind, name):
    # Only a machine with such a file system has one to test with.
    monkeypatch.setattr(disk_module, "file_system_type", lambda folder: kind)
    with pytest.raises(ConfigError, match=rf"is on {name},.*store serve") as error:
        FileSource(tmp_path).check()
    assert "\n" not in str(error.value)


@pytest.fixture
def mounted_as(tmp_path, monkeypatch):
    """A call that tells the name of the FUSE file system that the folder is in."""

    def mount(name):
        device = os.stat(tmp_path).st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        (tmp_path / "mounts").write_bytes(
            b"22 27 0:0 / /media/\xff rw,relatime shared:1 - fuse.other other rw\n"
            + f"23 27 {numbers} / / rw,relatime shared:2 master:1 - {name} here rw\n".encode()
        )

    monkeypatch.setattr(disk_module, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(disk_module, "file_system_type", lambda folder: 0x65735546)
    return mount


@pytest.mark.parametrize("name", ["ceph-fuse", "glusterfs", "juicefs", "sshfs", "s3fs"])
def test_file_source_check_on_a_network_file_system_over_fuse_is_refused(
    tmp_path, mounted_as, name
):
    mounted_as(f"fuse.{name}")
    with pytest.raises(ConfigError, match=rf"is on fuse\.{name}, over which"):
        FileSource(tmp_path / "kv").check()


@pytest.mark.parametrize("name", ["fuseblk", "fuse.fuse-overlayfs", "virtiofs"])
def test_file_source_check_on_a_disk_of_this_machine_over_fuse_passes(tmp_path, mounted_as, name):
    mounted_as(name)
    FileSource(tmp_path / "kv").check()


@pytest.mark.skipif(not shutil.which("stat"), reason="asks `stat` for the same")
@pytest.mark.parametrize("folder", ["/proc", "/dev/shm", "/"])
def test_file_system_type_equals_the_answer_of_stat(folder):
    said = subprocess.run(["stat", "-f", "-c", "%t", folder], capture_output=True, check=True)
    assert file_system_type(Path(folder)) == int(said.stdout, 16)


def test_store_url_same_folder_through_a_link_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    (tmp_path / "above").symlink_to(tmp_path)
    for again in ("link", "above/kv", "above/link", "kv/../kv"):
        with pytest.raises(ConfigError, match="is named twice"):
            split_urls(f"file://{tmp_path}/kv,file://{tmp_path}/{again}?fsync=data")
    assert len(split_urls(f"file://{tmp_path}/kv,file://{tmp_path}/above")) == 2
