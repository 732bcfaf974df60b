"""`sglang-cake store ...` on sealed stores, with the key and without."""

import shutil

import pytest
from private_files import write_private
from storetools import ALICE, file_of, fill, flip, store, told, url_of

from sglang_cake.codecs.frame import sealed_frame
from sglang_cake.stores.encrypted import MasterKey
from sglang_cake.testing.store_contract import block_of, key_of

SEALED = sealed_frame(ALICE, MasterKey(bytes(32)).name)


@pytest.fixture
def sealed_url(tmp_path):
    """Of a store that holds two sealed blocks, and a plain one of the same namespace."""
    path = write_private(tmp_path / "key", "0" * 64)
    root = tmp_path / "plain"
    fill(root, ALICE, "a", "b")
    url = f"{url_of(tmp_path / 'kv')}&key_file={path}"
    (tmp_path / "kv").mkdir()
    assert store("cp", url_of(root), url) == 0
    fill(tmp_path / "kv", ALICE, "c")
    return url


def test_store_cp_from_sealed_to_plain_writes_plain_blocks(sealed_url, tmp_path, capsys):
    plain = tmp_path / "copy"
    plain.mkdir()
    capsys.readouterr()
    answer = told(capsys, "cp", sealed_url, url_of(plain))
    assert answer["copied"] == 2
    raw = next(plain.rglob(key_of("a").hex())).read_bytes()
    assert raw.endswith(bytes(block_of("a")))
    for path in (tmp_path / "kv").rglob(key_of("a").hex()):
        assert bytes(block_of("a"))[:64] not in path.read_bytes()


def test_store_ls_with_the_key_lists_only_its_sealed_blocks(sealed_url, capsys):
    capsys.readouterr()
    (listed,) = told(capsys, "ls", sealed_url)["stores"][0]["namespaces"]
    assert listed["blocks"] == 2
    assert listed["namespace"] == ALICE.digest.hex()


@pytest.mark.parametrize("with_key", [True, False])
def test_store_verify_sealed_store_finds_the_damaged_block(sealed_url, tmp_path, capsys, with_key):
    root = tmp_path / "kv"
    shutil.rmtree(root / ALICE.digest.hex())
    flip(file_of(root, SEALED, "a"))
    capsys.readouterr()
    (answer,) = told(capsys, "verify", sealed_url if with_key else url_of(root), status=1)["stores"]
    assert (answer["ok"], answer["corrupt"]) == (1, 1)


def test_store_bench_sealed_store_is_measured_and_left_unchanged(sealed_url, tmp_path, capsys):
    before = sorted(path.name for path in (tmp_path / "kv").iterdir() if path.is_dir())
    capsys.readouterr()
    runs = told(
        capsys, "bench", sealed_url, "--sizes", "64KiB", "--depths", "2", "--bytes", "4KiB"
    )["runs"]
    assert runs
    assert sorted(path.name for path in (tmp_path / "kv").iterdir() if path.is_dir()) == before


def test_store_tools_with_the_key_name_damaged_namespaces_and_leave_them(
    sealed_url, tmp_path, capsys
):
    root = tmp_path / "kv"
    damaged = root / SEALED.digest.hex()
    (damaged / "namespace.json").write_text("")
    before = sorted(root.rglob("*"))
    for tool in (["verify", sealed_url], ["clear", sealed_url, "--yes"]):
        capsys.readouterr()
        (answer,) = told(capsys, *tool, status=1)["stores"]
        assert list(answer["unreadable_namespaces"]) == [damaged.name]
    assert sorted(root.rglob("*")) == before, "it may be one of another key"
    assert store("clear", url_of(root), "--yes") == 0
    assert not damaged.exists()


def test_store_cp_of_sealed_blocks_to_a_sealed_store_is_refused(sealed_url, tmp_path, capsys):
    shutil.rmtree(tmp_path / "kv" / ALICE.digest.hex())
    other = f"{url_of(tmp_path / 'twice')}&key_file={tmp_path / 'key'}"
    (tmp_path / "twice").mkdir()
    assert store("cp", url_of(tmp_path / "kv"), other) == 2
    assert "these blocks are sealed already" in capsys.readouterr().err
