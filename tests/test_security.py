"""What docs/security.md claims and no other test shows."""

import ast
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_cake
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.keys import KeySeed, Namespace, block_keys
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

ROOT = Path(sglang_cake.__file__).parent
DOC = (ROOT.parent / "docs" / "security.md").read_text()
CONTRACT = "\n".join(path.read_text() for path in (ROOT / "testing").glob("*_contract.py"))
DIGEST = Namespace((("model", "m"),)).digest()
TENANTS = st.tuples(st.none() | st.text(max_size=4), st.none() | st.text(max_size=4))


@given(
    st.lists(st.integers(0, 2**31), min_size=8, max_size=64),
    st.lists(TENANTS, min_size=2, max_size=4, unique=True),
)
def test_block_keys_of_tenants_with_other_salts_are_all_different(tokens, tenants):
    keys = [
        block_keys(KeySeed(DIGEST, extra_key, cache_salt), tokens, 4)
        for extra_key, cache_salt in tenants
    ]
    assert all(len(each) == len(tokens) // 4 for each in keys)
    assert len({key for each in keys for key in each}) == sum(map(len, keys))


async def test_file_store_while_open_all_files_are_accessible_to_the_owner_only(tmp_path):
    root = tmp_path / "kv"
    old = os.umask(0)
    try:
        store = FileSource(root, min_free_bytes=0).open(FRAME, depth=1)
        try:
            for name in ("a", "b"):
                await store.put(key_of(name), block_of(name))
            os.truncate(next(root.rglob(key_of("a").hex())), 100)
            with pytest.raises(BlockCorrupt):
                await read(store, key_of("a"))
            assert (root / FRAME.digest.hex() / "corrupt" / key_of("a").hex()).exists()
            names = {path.name for path in root.iterdir()}
            assert names >= {"index.db", "index.db-wal", "index.db-shm", "index.lock"}
            for path in (root, *root.rglob("*")):
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
        finally:
            await store.close()
    finally:
        os.umask(old)


RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = re.compile(r"\b(torch|np|numpy|yaml)\.(load|unsafe_load|full_load)\(|allow_pickle|shell=")


def test_package_source_has_no_call_that_executes_data():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 50
    for path in files:
        text = path.read_text()
        assert not METHODS.search(text), path
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & RUNS_WHAT_IT_READS, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in CALLS, f"{path}:{node.lineno}"


def test_package_source_search_matches_known_unsafe_calls():
    assert METHODS.search("torch.load(path)")
    assert METHODS.search("run(cmd, shell=True)")
    assert not METHODS.search("yaml.safe_load(text)")


def test_security_page_every_row_of_a_table_of_facts_names_a_test_that_exists():
    files = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("*.py"))
    tests = {*re.findall(r"\b(?:def|class) (\w+)\(", files + CONTRACT)}
    tables = re.findall(r"^\|.*\| (?:shown by|a change is noticed) \|\n((?:\|.*\n)+)", DOC, re.M)
    assert len(tables) == 3
    for table in tables:
        separator, *rows = table.splitlines()
        assert not separator.strip("|-")
        assert len(rows) > 5
        for row in rows:
            named = re.findall(r"`(\w+)`", row.split("|")[-2])
            assert named, row
            assert tests.issuperset(named), row
