"""Hostile files in a file store: answers are right or an error of the tree; nothing hangs, and no
call reads or writes what is not its block's."""

import json
import os

from filestore import path_of
from hostile import (
    KEYS,
    anything,
    changes_of_bytes,
    folder_with_blocks,
    put_in_place,
    remove,
    rewrite,
    use,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cake.core.keys import Namespace
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.testing.store_contract import NAMESPACE

FEW = settings(max_examples=max(1, settings.default.max_examples * 2 // 5))
SPACE = NAMESPACE.digest().hex()


def lose_index(root):
    for path in root.glob("index.*"):
        path.unlink()


BLOCK_DAMAGE = st.one_of(
    st.tuples(st.just("bytes"), changes_of_bytes()),
    st.tuples(st.just("replace"), anything),
    st.tuples(st.just("swap"), st.integers(0, 2)),
    st.tuples(st.just("link"), st.integers(0, 2)),
    st.tuples(st.just("symlink"), st.integers(0, 2)),
)


def damage_block(root, outside, path, how, what):
    if how == "bytes":
        rewrite(path, what)
        return
    if how == "replace":
        put_in_place(path, outside, what)
        return
    other = path_of(root, KEYS[what])
    if other == path or not os.path.lexists(other) or other.is_dir():  # a folder has no links
        return
    if how == "swap":
        spare = path.with_name("spare")
        if os.path.lexists(path):
            path.rename(spare)
        other.rename(path)
        if os.path.lexists(spare):
            spare.rename(other)
        return
    remove(path)
    os.link(other, path, follow_symlinks=False) if how == "link" else path.symlink_to(other)


@FEW
@given(st.lists(st.tuples(st.integers(0, 2), BLOCK_DAMAGE), min_size=1, max_size=4), st.booleans())
async def test_file_store_hostile_block_files_give_right_blocks_or_errors(damages, index_lost):
    def damage(root, outside):
        for block, (how, what) in damages:
            damage_block(root, outside, path_of(root, KEYS[block]), how, what)
        if index_lost:
            lose_index(root)

    async with folder_with_blocks(damage) as root:
        await use(root)


PLACES = st.sampled_from(["corrupt", "ab", "abcd", "key name", "tmp", "spare"])


@FEW
@given(st.lists(st.tuples(PLACES, st.integers(0, 2), anything), max_size=3), st.booleans())
async def test_file_store_hostile_names_and_folders_give_blocks_or_errors(damages, index_lost):
    def damage(root, outside):
        for place, block, what in damages:
            path = path_of(root, KEYS[block])
            target = {
                "corrupt": root / SPACE / "corrupt",
                "ab": path.parent.parent,
                "abcd": path.parent,
                "key name": path.parent / ("0" * 64),
                "tmp": path.parent / ".tmp-0123456789abcdef-1-0123456789abcdef",
                "spare": root / SPACE / b"\xff\xfe".decode(errors="surrogateescape"),
            }[place]
            if target.parent.is_dir():
                put_in_place(target, outside, what)
        if index_lost:
            lose_index(root)

    async with folder_with_blocks(damage) as root:
        await use(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
LARGE = {
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "half a character": b'{"a": "\\ud800"}',
    "half a character as name": b'{"\\ud800": "a"}',
    "long": b'{"a": "' + b"x" * (4 << 20) + b'"}',
    "number": b"1" * 100_000,
}
DESCRIPTIONS = st.one_of(
    anything,
    JSON.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.text(), JSON).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(sorted(LARGE)),
)


@FEW
@given(DESCRIPTIONS)
async def test_file_store_hostile_description_gives_right_blocks_or_errors(description):
    def damage(root, outside):
        put_in_place(root / SPACE / "namespace.json", outside, LARGE.get(description, description))

    async with folder_with_blocks(damage) as root:
        await use(root)
        for stored in await FileSource(root).namespaces():
            Namespace(tuple(stored.fields.items())).digest()  # fields of text, or none
