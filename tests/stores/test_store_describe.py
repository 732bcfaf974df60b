"""`sglang-cake store describe`: the layers of a store, of which nothing is opened."""

import json
import sys
import types

import pytest

from sglang_cake.cli import main

FILE = (
    "FileStore  path=/nowhere/kv  capacity=500 GB  min_free=1.0 GB  policy=lru  fsync=data"
    "  fair=off  admit=0.0"
)
FILE_URL = "file:///nowhere/kv?capacity=500GB&policy=lru&fsync=data"
HTTP_URL = "https://kv.invalid:8700/prefix?token_file=/nowhere/token&bandwidth=1Gbps"
S3_URL = "s3://bucket/kv?endpoint=http://s3.invalid:9000&region=eu-central-1&key_file=/nowhere/key"
MOONCAKE_URL = "mooncake://kv.invalid:50051?segment=64MB"
HTTP = "HttpStore  base=https://kv.invalid:8700/prefix  token_file=/nowhere/token"
S3 = "S3Store  bucket=bucket  prefix=kv  endpoint=http://s3.invalid:9000  region=eu-central-1"
MOONCAKE = (
    "MooncakeStore  master=kv.invalid:50051  segment=64.0 MB  protocol=tcp  metadata=P2PHANDSHAKE"
)


@pytest.fixture(autouse=True)
def mooncake(monkeypatch):
    """A URL needs the library, which is not used."""
    monkeypatch.setitem(sys.modules, "mooncake.store", types.ModuleType("mooncake.store"))


@pytest.mark.parametrize(
    ("url", "layers"),
    [
        (FILE_URL, ["CountedStore", "  LazyStore", f"    {FILE}"]),
        (
            HTTP_URL,
            [
                "CountedStore",
                "  LazyStore",
                "    ThrottledStore  bandwidth=125 MB/s",
                f"      {HTTP}",
            ],
        ),
        (
            S3_URL,
            [
                "CountedStore",
                "  LazyStore",
                "    EncryptedStore  key_file=/nowhere/key",
                f"      {S3}",
            ],
        ),
        (
            f"memory://64GB?fair=on,{FILE_URL}",
            [
                "CountedStore",
                "  TieredStore",
                "    LazyStore",
                "      HostMemoryStore  capacity=64.0 GB  policy=cake-prefix  fair=on",
                "    LazyStore",
                f"      {FILE}  direct_writes=on",
            ],
        ),
        (MOONCAKE_URL, ["CountedStore", "  LazyStore", f"    {MOONCAKE}"]),
        (
            f"{FILE_URL},{HTTP_URL},{MOONCAKE_URL}",
            [
                "CountedStore",
                "  TieredStore",
                "    LazyStore",
                f"      {FILE}",
                "    LazyStore",
                "      ThrottledStore  bandwidth=125 MB/s",
                f"        {HTTP}",
                "    LazyStore",
                f"      {MOONCAKE}",
            ],
        ),
    ],
    ids=["file", "http", "s3", "memory", "mooncake", "tiers"],
)
def test_layers_are_printed_one_a_line_outermost_first(url, layers, capsys):
    assert main(["store", "describe", url]) == 0
    assert capsys.readouterr().out.splitlines() == layers


def test_store_describe_codec_is_a_layer(capsys):
    assert main(["store", "describe", FILE_URL, "--codec", "int8"]) == 0
    layers = ["EncodedStore  codec=int8", "  LazyStore", f"    {FILE}"]
    assert capsys.readouterr().out.splitlines() == layers


def test_programs_get_one_object(capsys):
    assert main(["store", "describe", f"{FILE_URL},{S3_URL}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (tiers,) = found["inner"]
    assert (found["layer"], tiers["layer"]) == ("CountedStore", "TieredStore")
    assert [tier["layer"] for tier in tiers["inner"]] == ["LazyStore", "LazyStore"]
    file, encrypted = (tier["inner"][0] for tier in tiers["inner"])
    assert file["settings"]["capacity_bytes"] == 500 * 10**9
    assert encrypted["inner"][0]["settings"]["bucket"] == "bucket"


def test_store_describe_bad_url_is_one_line(capsys):
    assert main(["store", "describe", "file:///a?speed=1"]) == 2
    assert "unknown key" in capsys.readouterr().err
