"""docs/format.md says what the code does: its table of the header and its worked example."""

import hashlib
import json
import re
import struct
from pathlib import Path

import pytest
import xxhash

from sglang_cake.codecs import frame
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.keys import KeySeed, Namespace, block_keys
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import MAX_SET_ASIDE, BlockFolder
from sglang_cake.stores.file.file_store import FileStore

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLE = json.loads(re.search(r"```json\n(.*?)```", DOC, re.DOTALL)[1])
NAMESPACE = Namespace(tuple(EXAMPLE["namespace"].items()))


def table():
    """(offset, bytes or None, name) of every row."""
    rows = re.findall(r"^\| (\d+) \| (`layout_bytes`|\d+) \| `(\w+)` \|", DOC, re.MULTILINE)
    return [(int(at), int(size) if size.isdigit() else None, name) for at, size, name in rows]


@pytest.fixture
async def block_file(tmp_path):
    """The example's block as the store writes it: (path below the root, bytes)."""
    layout = BlockLayout.parse(EXAMPLE["layout"])
    folder = BlockFolder(FolderSettings(tmp_path, min_free_bytes=0))
    store = FileStore(folder, BlockFrame(NAMESPACE, layout), threads=1)
    key = bytes.fromhex(EXAMPLE["keys"][1])
    await store.put(key, memoryview(bytes.fromhex(EXAMPLE["payload"])))
    await store.close()
    path = tmp_path / EXAMPLE["path"]
    return path, path.read_bytes()


def test_format_doc_header_table_matches_the_fields():
    rows = table()
    at = 0
    for (offset, size, name), (expected, code) in zip(rows, frame.FIELDS, strict=False):
        assert (offset, size, name) == (at, struct.calcsize("<" + code), expected)
        at += size
    checksum_at = frame.HEADER_BYTES - frame.CHECKSUM_BYTES
    assert rows[len(frame.FIELDS) :] == [
        (at, None, "layout"),
        (checksum_at, frame.CHECKSUM_BYTES, "header_checksum"),
    ]


def test_format_doc_example_file_is_parsed_by_the_table(block_file):
    path, raw = block_file
    found = {name: raw[at : at + size] for at, size, name in table() if size}
    number = {name: int.from_bytes(value, "little") for name, value in found.items()}
    payload = raw[number["header_bytes"] :]
    assert found["magic"] == b"CAKEKV\0\1"
    assert number["version"] == 1
    assert number["payload_bytes"] == len(payload)
    assert found["namespace"].hex() == EXAMPLE["namespace_digest"] == path.parts[-4]
    assert found["key"].hex() == EXAMPLE["keys"][1] == path.name
    assert found["codec"].rstrip(b"\0") == b"raw"
    assert raw[128 : 128 + number["layout_bytes"]].decode() == EXAMPLE["layout"]
    assert payload.hex() == EXAMPLE["payload"]
    checksum = xxhash.xxh3_128_digest(payload)
    assert found["payload_checksum"] == checksum == bytes.fromhex(EXAMPLE["payload_checksum"])
    head = xxhash.xxh3_128_digest(raw[:4080])
    assert found["header_checksum"] == head == bytes.fromhex(EXAMPLE["header_checksum"])
    assert hashlib.sha256(raw).hexdigest() == EXAMPLE["file_sha256"]


def test_format_doc_example_digests_follow_from_its_text():
    def sized(text):
        if text is None:
            return b"\xff" * 8
        return len(text.encode()).to_bytes(8, "little") + text.encode()

    facts = {name: text for name, text in EXAMPLE["namespace"].items() if name != "name"}
    fields = b"".join(sized(part) for field in facts.items() for part in field)
    namespace = hashlib.sha256(b"sglang_cake namespace v2" + fields).digest()
    assert namespace.hex() == EXAMPLE["namespace_digest"] == NAMESPACE.digest().hex()
    parts = b"".join(sized(EXAMPLE[name]) for name in ("extra_key", "cache_salt", "adapter"))
    previous = hashlib.sha256(b"sglang_cake key v1" + namespace + parts).digest()
    assert previous.hex() == EXAMPLE["seed_digest"]
    size = EXAMPLE["block_tokens"]
    full = len(EXAMPLE["tokens"]) // size
    assert len(EXAMPLE["keys"]) == full
    for block, key in enumerate(EXAMPLE["keys"]):
        tokens = EXAMPLE["tokens"][block * size : (block + 1) * size]
        packed = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
        previous = hashlib.sha256(previous + packed).digest()
        assert previous.hex() == key


def test_format_doc_example_keys_equal_those_of_block_keys():
    names = ("extra_key", "cache_salt", "adapter")
    seed = KeySeed(NAMESPACE.digest(), **{name: EXAMPLE[name] for name in names})
    keys = block_keys(seed, EXAMPLE["tokens"], EXAMPLE["block_tokens"])
    assert [key.hex() for key in keys] == EXAMPLE["keys"]


def test_format_doc_limit_of_corrupt_files_is_the_coded_one():
    assert f"at most {MAX_SET_ASIDE} are kept" in DOC
