"""The example of a store of one's own, as its author would test and use it."""

import importlib.util
import sqlite3
import sys
from pathlib import Path

import pytest
from distributions import install

from sglang_cake.core.errors import BlockCorrupt, ConfigError, StoreUnavailable
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.testing.store_contract import FRAME, StoreContract, block_of, key_of, read

EXAMPLE = Path(__file__).parents[2] / "examples/own_store"


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """The package as `pip install examples/own_store` would install it."""
    site = tmp_path_factory.mktemp("site")
    install(site, "cake_sqlite_store", "sglang_cake.stores", "sqlite = cake_sqlite_store:parse")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("cake_sqlite_store", None)


def test_example_store_pyproject_names_the_tested_entry_point():
    assert 'sqlite = "cake_sqlite_store:parse"' in (EXAMPLE / "pyproject.toml").read_text()
    assert importlib.util.find_spec("cake_sqlite_store") is not None


class TestSqliteStore(StoreContract):
    def open(self, folder):
        return open_store(parse_sources(f"sqlite://{folder}/kv.db"), self.frame, depth=2)


async def test_sqlite_store_damaged_block_is_corrupt(tmp_path):
    store = open_store(parse_sources(f"sqlite://{tmp_path}/kv.db"), FRAME, depth=2)
    await store.put(key_of("a"), block_of("a"))
    with sqlite3.connect(tmp_path / "kv.db") as db:
        (framed,) = db.execute("SELECT framed FROM blocks").fetchone()
        db.execute("UPDATE blocks SET framed = ?", (framed[:-1] + bytes([framed[-1] ^ 1]),))
    with pytest.raises(BlockCorrupt):
        await read(store, key_of("a"))
    await store.close()


async def test_sqlite_store_foreign_file_is_unavailable_and_kept(tmp_path):
    path = tmp_path / "kv.db"
    path.write_bytes(b"no database, but somebody's letters")
    store = open_store(parse_sources(f"sqlite://{path}"), FRAME, depth=2)
    with pytest.raises(StoreUnavailable):
        await store.contains([key_of("a")])
    await store.close()
    assert path.read_bytes() == b"no database, but somebody's letters"


def test_sqlite_url_mistakes_are_one_line(tmp_path):
    for url in ("sqlite://kv.db", f"sqlite://{tmp_path}/kv.db?speed=1"):
        with pytest.raises(ConfigError) as error:
            parse_sources(url)
        assert "\n" not in str(error.value)
    (source,) = parse_sources(f"sqlite://{tmp_path}/none/kv.db")
    with pytest.raises(ConfigError, match="create it"):
        source.check()
