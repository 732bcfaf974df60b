"""Folders of blocks in which somebody else had a hand, for the fuzz tests."""

import itertools
import logging
import os
import socket
import tempfile
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from filestore import opened, waiting_for_the_index
from hypothesis import strategies as st

from sglang_cake.core.errors import ConfigError, StoreError
from sglang_cake.stores.file.file_store import FileSource
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

NAMES = ["a", "b", "c"]
KEYS = [key_of(name) for name in NAMES]
HUGE_BYTES = 1 << 42
SHORT_WAIT_S = 0.1  # for an index that may never come
# What a call may read from all files beside the block: the index, folders, the system's own.
SPARE_BYTES = 8 << 20
_NUMBERS = itertools.count()
OUTSIDE = b"somebody else's file\n"


@asynccontextmanager
async def folder_with_blocks(damage):
    """A folder with three blocks and whatever `damage(root, outside)` does to it; `outside` is a
    file that is none of the store's business."""
    with tempfile.TemporaryDirectory() as place:
        root, outside = Path(place) / "kv", Path(place) / "outside"
        outside.write_bytes(OUTSIDE)
        await _fill(root)
        with waiting_for_the_index(SHORT_WAIT_S):
            damage(root, outside)
            yield root
        assert outside.read_bytes() == OUTSIDE


async def _fill(root):
    store = opened(root)
    for name, key in zip(NAMES, KEYS, strict=True):
        await store.put(key, block_of(name))
    await store.close()


def read_bytes():
    """Bytes that this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def use(root):
    """Do with the store whatever can be done; every answer is right, or an error of the tree."""
    with no_mistakes():
        try:
            store = FileSource(root, min_free_bytes=0).open(FRAME, depth=1)
        except (StoreError, ConfigError) as error:
            assert "\n" not in str(error)  # noqa: PT017 - both ways are fine
            return
        try:
            await _use(store)
        finally:
            await store.close()


@contextmanager
def no_mistakes():
    """Nothing unforeseen happens to the thread that keeps the index; it would only log it."""
    found = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = found.append
    logger = logging.getLogger("sglang_cake.stores.file")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not found, logging.Formatter().format(found[0])


async def _use(store):
    await _allowed(store.contains(KEYS))
    for name, key in zip(NAMES, KEYS, strict=True):
        for _ in range(2):
            before = read_bytes()
            got = await _allowed(read(store, key))
            assert got is None or got == block_of(name)
            assert read_bytes() - before < SPARE_BYTES
    for name, key in zip(NAMES, KEYS, strict=True):
        if await _allowed(store.put(key, block_of(name))):
            assert await read(store, key) == block_of(name)
    assert all(len(block.key) == 32 for block in await _allowed(_listed(store)) or [])
    await _allowed(store.stats())
    await _allowed(store.delete(KEYS[0]))
    assert await _allowed(read(store, KEYS[0])) in (None, block_of(NAMES[0]))


async def _listed(store):
    return [block async for block in store.list_blocks()]


async def _allowed(call):
    """What it returns; None after an error that a store may answer with."""
    try:
        return await call
    except StoreError as error:
        assert len(str(error)) < 10_000  # noqa: PT017 - both ways are fine
        return None


# ---- what may be where a file or a folder should be ----


def remove(path):
    """Have nothing at `path`; what it was may lie beside it."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"moved-{next(_NUMBERS)}-{path.name}"))
    else:
        path.unlink(missing_ok=True)


def _socket(path):
    if len(str(path)) > 100:  # more than a socket's name may have
        return
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


THINGS = {
    "nothing": lambda path, outside: None,
    "folder": lambda path, outside: path.mkdir(),
    "folder with a file": lambda path, outside: (path.mkdir(), (path / "x").write_text("x")),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: _socket(path),
    "huge": lambda path, outside: (path.touch(), os.truncate(path, HUGE_BYTES)),
    "empty": lambda path, outside: path.touch(),
    "outside": lambda path, outside: path.symlink_to(outside),
    "outside folder": lambda path, outside: path.symlink_to(outside.parent),
    "dangling": lambda path, outside: path.symlink_to("nowhere"),
    "loop": lambda path, outside: path.symlink_to(path.name),
    "zeros": lambda path, outside: path.symlink_to("/dev/zero"),
    "unreadable": lambda path, outside: (path.touch(), path.chmod(0)),
}


def put_in_place(path, outside, thing):
    """Have `path` be one of THINGS, or a file of some bytes."""
    remove(path)
    if isinstance(thing, bytes):
        path.write_bytes(thing)
    else:
        THINGS[thing](path, outside)


def rewrite(path, change):
    """Change the bytes of a plain file of a plain size; leave anything else."""
    plain = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK | os.W_OK)
    if plain and path.stat().st_size < 1 << 24:
        path.write_bytes(change(path.read_bytes()))


anything = st.one_of(st.sampled_from(sorted(THINGS)), st.binary(max_size=300))


@st.composite
def changes_of_bytes(draw):
    """A function that changes the bytes of a file, here and there."""
    flips = draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), max_size=8))
    cut = draw(st.none() | st.integers(0, 1 << 14))
    more = draw(st.binary(max_size=8))

    def change(raw):
        raw = bytearray(raw[:cut]) + more
        for at, mask in flips if raw else ():
            raw[at % len(raw)] ^= mask
        return bytes(raw)

    return change
