"""A hostile index beside good blocks: what is read stays right, nothing hangs, and no other file is
touched. Writing may rest; where the index is plainly not ours it is made anew."""

import sqlite3
from contextlib import closing

import pytest
from filestore import with_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hostile import KEYS, NAMES, anything, changes_of_bytes, folder_with_blocks, put_in_place, use

from sglang_cake.testing.store_contract import block_of, key_of, read

pytestmark = pytest.mark.timeout(120)
FEW = settings(
    deadline=None,
    max_examples=max(1, settings.default.max_examples * 3 // 10),
    suppress_health_check=[HealthCheck.too_slow],
)
FILES = st.sampled_from(["index.db", "index.db-wal", "index.db-shm", "index.lock"])


@FEW
@given(st.lists(st.tuples(FILES, anything | changes_of_bytes()), min_size=1, max_size=3))
def test_hostile_index_files(damages):
    def damage(root, outside):
        for name, what in damages:
            path = root / name
            if callable(what):
                raw = path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 24 else b""
                path.write_bytes(what(raw)) if not path.is_dir() else None
            else:
                put_in_place(path, outside, what)

    with folder_with_blocks(damage) as root:
        use(root)
