"""Codecs of other packages: the example, as its author would test and use it, and bad ones."""

import asyncio
import json
import sys
from pathlib import Path

import distributions
import pytest
from polling import until_deleted

from sglang_cake.cli import main
from sglang_cake.codecs.catalogue import chain_of, decode, parse
from sglang_cake.codecs.codec_steps import Malformed
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES, HEADER_BYTES, encoded_frame, read_header
from sglang_cake.config import resolve
from sglang_cake.core.codec_names import own_names
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockCorrupt, BlockMissing, ConfigError
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.testing.codec_contract import SMOOTH, CodecContract, kv_like
from sglang_cake.testing.store_contract import key_of

EXAMPLE = Path(__file__).parents[2] / "examples/own_codec"
BLOCK = kv_like(SMOOTH)
KEY = key_of("a")


@pytest.fixture
def install(tmp_path_factory, monkeypatch):
    """Install a distribution as pip would: its entry point, and a module that it may bring."""
    site = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(site))

    def install(entry_point, module="", code=""):
        name = f"package_{len(list(site.glob('*.dist-info')))}"
        distributions.install(site, name, "sglang_cake.codecs", entry_point)
        if module:
            (site / f"{module}.py").write_text(code)

    return install


@pytest.fixture
def deflate(install):
    """`pip install examples/own_codec`."""
    install("deflate = cake_deflate_codec:CHAIN")


@pytest.mark.usefixtures("deflate")
class TestDeflate(CodecContract):
    def chain(self, layout):
        return chain_of("deflate", layout)


def test_example_codec_pyproject_names_the_tested_entry_point():
    assert 'deflate = "cake_deflate_codec:CHAIN"' in (EXAMPLE / "pyproject.toml").read_text()


def test_example_refuses_parameters_of_no_deflate(deflate):
    chain_of("deflate", SMOOTH)
    for level in ("0", "10", "true", '"1"', "1.0"):
        with pytest.raises(Malformed):
            parse(f'[["planes",{{}}],["deflate",{{"level":{level}}}]]'.encode())


def namespace(codec):
    return Namespace((("model", "m"), ("layout", SMOOTH.describe()), ("codec", codec)))


def opened(folder, codec, counters=None):
    sources = parse_sources(f"{folder.as_uri()}?min_free=0")
    return open_blocks(sources, [namespace(codec)], SMOOTH, codec=codec, depth=1, counters=counters)


async def read(store):
    out = bytearray(SMOOTH.block_bytes)
    await store.get_into(KEY, memoryview(out))
    return bytes(out)


@pytest.mark.usefixtures("deflate")
def test_store_describe_own_codec_is_a_layer(capsys):
    assert main(["store", "describe", "file:///nowhere/kv", "--codec", "deflate"]) == 0
    assert capsys.readouterr().out.startswith("EncodedStore  codec=deflate\n")


async def test_own_codec_is_named_by_flag_and_stored_in_frames(deflate, tmp_path):
    config = resolve({"codec": "deflate"}, {}, spell=str)
    assert not config.lossy
    assert "deflate" in own_names()
    counters = Counters()
    store = opened(tmp_path, config.codec, counters)
    assert await store.put(KEY, memoryview(BLOCK))
    assert await read(store) == BLOCK
    await store.close()
    assert counters.snapshot()["encoded_blocks", "deflate"] == 1
    stored = next(tmp_path.rglob(KEY.hex())).read_bytes()
    assert len(stored) < SMOOTH.block_bytes
    assert read_header(stored[:HEADER_BYTES]).codec == "deflate"
    text_bytes = int.from_bytes(stored[HEADER_BYTES : HEADER_BYTES + 4], "little")
    text = stored[HEADER_BYTES + 4 : HEADER_BYTES + 4 + text_bytes]
    assert json.loads(text) == [["planes", {}], ["deflate", {"level": 1}]]


def test_own_lossy_codec_is_told_by_its_chain(install):
    code = "from sglang_cake.codecs.groups import Groups\n"
    code += "from sglang_cake.codecs.pipeline import Chain\n"
    code += "CHAIN = Chain(Groups(8, group=64))"
    install("int8by64 = cake_int8_by_64:CHAIN", "cake_int8_by_64", code)
    assert resolve({"codec": "int8by64"}, {}, spell=str).lossy
    assert chain_of("int8by64", SMOOTH).of_first().leading is not None


def test_block_of_a_codec_that_is_not_installed_is_a_miss_and_imports_nothing(install, tmp_path):
    """A stored name imports nothing, also where a package registers that very name."""
    install("trap = cake_trap:CHAIN", "cake_trap", "raise AssertionError('imported')")

    async def go():
        text = b'[["trap",{}]]'
        payload = (len(text).to_bytes(4, "little") + text).ljust(64, b"\0") + bytes(100)
        for codec in ("zstd", "trap"):
            frame = encoded_frame(namespace(codec), SMOOTH, codec)
            (source,) = parse_sources(f"{tmp_path.as_uri()}?min_free=0")
            inner = source.open(frame, depth=1)
            await inner.put(KEY, memoryview(payload))
            await inner.close()
        store = opened(tmp_path, "zstd")
        with pytest.raises(BlockCorrupt):
            await read(store)
        await until_deleted(store, KEY)
        with pytest.raises(BlockMissing):
            await read(store)
        await store.close()

    asyncio.run(go())
    assert main(["store", "ls", tmp_path.as_uri()]) == 0
    assert main(["store", "verify", tmp_path.as_uri()]) == 0
    assert "trap" in own_names()
    assert "cake_trap" not in sys.modules


A_CHAIN = """
from dataclasses import dataclass
from typing import ClassVar
from sglang_cake.codecs.pipeline import Chain, Raw

@dataclass(frozen=True)
class Step(Raw):
    text: str = {text!r}
    name: ClassVar[str] = {name!r}

CHAIN = Chain(Step())
"""


@pytest.mark.parametrize(
    ("codec", "code", "why"),
    [
        ("absent", None, "No module named"),
        ("broken", "raise RuntimeError('no driver\\nfound')", "no driver found"),
        ("empty", "", "has no attribute 'CHAIN'"),
        ("number", "CHAIN = 3", "is a int, not a Chain"),
        ("Deflate", A_CHAIN.format(text="", name="x"), "a name has 1 to 9 characters"),
        ("much_too_long", A_CHAIN.format(text="", name="x"), "a name has 1 to 9 characters"),
        ("wordy", A_CHAIN.format(text="x" * 1000, name="wordy"), "need more than"),
    ],
)
def test_own_codec_that_cannot_be_used_is_one_line(install, codec, code, why):
    module = f"cake_codec_{codec.lower()}"
    install(f"{codec} = {module}:CHAIN", "" if code is None else module, code or "")
    with pytest.raises(ConfigError) as error:
        resolve({"codec": codec}, {}, spell=str)
    assert why in str(error.value)
    assert codec in str(error.value)
    assert "\n" not in str(error.value)
    assert resolve({"codec": "zstd"}, {}, spell=str).codec == "zstd", "others are not disturbed"


def test_own_codec_of_two_packages_is_refused(install, deflate):
    install("deflate = cake_other:CHAIN")
    with pytest.raises(ConfigError, match="cake_deflate_codec:CHAIN, cake_other:CHAIN"):
        resolve({"codec": "deflate"}, {}, spell=str)


def test_own_lossy_codec_leaves_room_for_the_step_of_the_first_block(install):
    code = "from sglang_cake.codecs.groups import Groups\n"
    code += "from sglang_cake.codecs.pipeline import Chain\n"
    code += "from sglang_cake.codecs.zstd import Zstd\n"
    code += "FOUR, FIVE = (Chain(Groups(8), compressors=(Zstd(1),) * n) for n in (3, 4))"
    install("four = cake_many_steps:FOUR", "cake_many_steps", code)
    install("five = cake_many_steps:FIVE")
    chain = chain_of("four", SMOOTH).of_first()
    payload = memoryview(bytearray(SMOOTH.block_bytes + ENCODED_HEAD_BYTES))
    size = chain.encode(SMOOTH, memoryview(BLOCK), payload)
    assert decode(SMOOTH, payload[:size], memoryview(bytearray(SMOOTH.block_bytes))) == chain
    with pytest.raises(ConfigError, match=r"'five'.*6 steps"):
        chain_of("five", SMOOTH)


def test_own_step_cannot_replace_another_one(install):
    code = A_CHAIN.format(text="", name="groups")
    install("thief = cake_codec_thief:CHAIN", "cake_codec_thief", code)
    with pytest.raises(ConfigError, match="another step is called 'groups' already"):
        chain_of("thief", SMOOTH)


def test_own_codec_cannot_replace_a_built_in_one(install):
    install("zstd = cake_codec_zstd:CHAIN", "cake_codec_zstd", "raise AssertionError")
    assert resolve({"codec": "zstd"}, {}, spell=str).codec == "zstd"
    assert "zstd" not in own_names()
    assert chain_of("zstd", SMOOTH) == parse(chain_of("zstd", SMOOTH).describe().encode())
    assert "cake_codec_zstd" not in sys.modules


def test_unknown_codec_names_the_installed_ones(deflate):
    with pytest.raises(ConfigError, match=r"zstd.*deflate.*did you mean deflate"):
        resolve({"codec": "deflat"}, {}, spell=str)
