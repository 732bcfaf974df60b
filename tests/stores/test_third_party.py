"""Stores of others: a scheme that an installed package registers (docs/extending.md says how)."""

import asyncio
import sys

import distributions
import pytest
from storetools import ALICE, store

from sglang_cake.config import resolve
from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.stores.throttled import ThrottledStore
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.store_contract import FRAME, StoreContract, block_of, key_of, read

SHELVES = """
from sglang_cake.stores.base import StoredNamespace
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.stores.url import parse_size

SHELVES = {}


class KeptStore(MemoryStore):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks


class ShelfSource:
    def __init__(self, name, shelves):
        self.name, self.shelves = name, shelves

    def check(self):
        pass

    def open(self, frame, *, depth):
        shelf = SHELVES.setdefault(self.name, {})
        fields = frame.namespace.describe()
        return KeptStore(shelf.setdefault(frame.digest, (fields, {}))[1])

    async def namespaces(self):
        shelf = SHELVES.get(self.name, {})
        return [StoredNamespace(digest, fields) for digest, (fields, _) in shelf.items()]


def parse(url):
    if not url.place:
        raise url.error("names no shelf")
    return ShelfSource(url.place, url.option("shelves", parse_size, 1))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a module with an entry point, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, code, entry_point):
        (tmp_path / f"{name}.py").write_text(code)
        distributions.install(tmp_path, name, "sglang_cake.stores", entry_point)
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


class TestShelves(StoreContract):
    """What the author of such a package would write."""

    @pytest.fixture(autouse=True)
    def _installed(self, install):
        install("cake_shelves", SHELVES, "shelf = cake_shelves:parse")

    def open(self, folder):
        return open_store(parse_sources(f"shelf://{folder.name}?shelves=3"), self.frame, depth=2)


async def test_registered_scheme_opens_alone_and_as_a_tier(install, tmp_path):
    install("cake_shelves", SHELVES, "shelf = cake_shelves:parse")
    url = f"shelf://a?bandwidth=1GB/s,file://{tmp_path}/kv?min_free=0,shelf://b"
    assert resolve({"store": url}, {}, spell=str).store == url
    sources = parse_sources(url)
    tiers = open_store(sources, FRAME, depth=2)
    assert isinstance(tiers, TieredStore)
    await tiers.put(key_of("a"), block_of("a"))
    await tiers.close()
    alone = sources[0].open(FRAME, depth=2)
    assert isinstance(alone, ThrottledStore)
    assert await read(alone, key_of("a")) == block_of("a")


def test_registered_scheme_works_with_the_store_tools(install, capsys):
    install("cake_shelves", SHELVES, "shelf = cake_shelves:parse")

    async def put():
        await parse_sources("shelf://c")[0].open(ALICE, depth=1).put(key_of("a"), block_of("a"))

    asyncio.run(put())
    assert store("ls", "shelf://c") == 0
    assert "alice-7b" in capsys.readouterr().out
    assert store("verify", "shelf://c") == 0
    assert store("cp", "shelf://c", "shelf://d") == 0
    assert store("stat", "shelf://d") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[2] == "1"
    assert store("gc", "shelf://d", "--to", "0") == 0
    assert store("gc", "shelf://d") == 2
    assert "only file stores need it" in capsys.readouterr().err
    assert store("clear", "shelf://c", "--yes") == 0
    assert "1 blocks deleted" in capsys.readouterr().out
    sizes = ["--sizes", "8KiB", "--depths", "2", "--bytes", "64KiB"]
    assert store("bench", "shelf://d", *sizes) == 0
    assert "page cache" not in capsys.readouterr().out


def test_registered_scheme_invalid_url_names_the_mistake(install):
    install("cake_shelves", SHELVES, "shelf = cake_shelves:parse")
    for url, message in {
        "shelf://": "store URL 'shelf://': names no shelf",
        "shelf://a?shelfs=2": "'shelfs': unknown key, allowed: bandwidth, key_file, shelves",
        "shelf://a?shelves=many": "'shelves': 'many' is not a size",
        "shelv://a": "unknown scheme 'shelv', allowed: file",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse_sources(url)
        assert message in str(error.value)
    assert "shelf" in str(error.value), "the scheme that is installed is named"


@pytest.mark.parametrize(
    ("code", "entry", "why"),
    [
        ("import no_such_package_at_all", "cake_broken:parse", "No module named"),
        ("raise RuntimeError('no driver\\nfound')", "cake_broken:parse", "no driver found"),
        ("this is no Python", "cake_broken:parse", "invalid syntax"),
        ("", "cake_broken:parse", "has no attribute 'parse'"),
        ("", "cake_absent:parse", "No module named 'cake_absent'"),
    ],
)
def test_registered_scheme_import_error_is_one_line_with_its_name(
    install, capsys, code, entry, why
):
    install("cake_broken", code, f"broken = {entry}")
    with pytest.raises(ConfigError) as error:
        parse_sources("broken://x")
    message = str(error.value)
    assert message.startswith(f"store URL 'broken://x': {entry} cannot be imported: ")
    assert why in message
    assert len(message.splitlines()) == 1
    assert store("ls", "broken://x") == 2
    assert capsys.readouterr().err == f"sglang-cake: {message}\n"
    assert parse_sources("file:///a"), "others are not disturbed"


def test_registered_scheme_cannot_replace_a_built_in_scheme(install):
    install("cake_thief", "def parse(url): raise AssertionError", "file = cake_thief:parse")
    assert parse_sources("file:///a")[0].path.name == "a"
