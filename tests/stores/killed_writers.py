"""Forks writers for test_crash.py, which kills them: `python killed_writers.py ROOT`.

One line in, for each writer: `run` (puts and deletes until killed), `fill POLICY` (puts more than
there is room for), `crash N` (kills itself before its N-th system call that changes the disk),
`aside N` (the same while it sets a corrupt block aside), `half` (kills itself in the middle of a
block) or `race` (two writers of the same blocks). Lines out: the writer's pid, then `ended STATUS`
once it is gone and its pid is free.

Beside ROOT lies a log of what `run` and `fill` have done: `begin KEY` before a put, `put KEY` once
it has returned, `gone KEY` before a block is deleted or evicted.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import BlockCorrupt
from sglang_cake.core.layout import BlockLayout
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.file.block_files import FolderSettings
from sglang_cake.stores.file.block_folder import BlockFolder
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.testing.store_contract import NAMESPACE, block_of, key_of, read

LAYOUT = BlockLayout.plain(layers=1, parts=(("kv", (256,)),), dtype="float32", block_tokens=256)
FRAME = BlockFrame(NAMESPACE, LAYOUT)
NAMES = range(12)
FILL = [("fill", number) for number in range(80)]
BLOCKS = [block_of(name, LAYOUT) for name in NAMES]  # 256 KiB each
DEADLINE_S = 120.0
KEY_CHARS = 64  # names of block files
LINE_BYTES = 128  # no line of a log lies in two pages, so none is cut when its writer is killed


def in_pieces(writev):
    """As `writev` of a disk that takes a quarter of a block at a time: several writes a block."""
    most = LAYOUT.block_bytes // 4
    return lambda fd, views: writev(fd, [view[:most] for view in views[:1]])


os.writev = in_pieces(os.writev)


def log_of(root):
    return root.with_name(root.name + ".log")


def promised(root):
    """The keys whose puts have returned and that nobody has begun to take away since."""
    begun, stored = set(), set()
    for line in log_of(root).read_text().splitlines() if log_of(root).exists() else []:
        word, name = line.split()
        key = bytes.fromhex(name)
        if word == "begin":
            begun.add(key)
        elif word == "gone":
            begun.discard(key)
            stored.discard(key)
        elif key in begun:
            stored.add(key)
    return stored


class Log:
    def __init__(self, root):
        self._fd = os.open(log_of(root), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, word, key):
        os.write(self._fd, f"{word} {key.hex()}".ljust(LINE_BYTES - 1).encode() + b"\n")

    async def put(self, store, key, block):
        self.say("begin", key)
        if await store.put(key, block):
            self.say("put", key)

    async def delete(self, store, key):
        self.say("gone", key)
        await store.delete(key)

    def evictions(self):
        """Write down from now on what this process evicts."""
        unlink = os.unlink

        def say_and_unlink(path, **kwargs):
            if len(str(path)) == KEY_CHARS:  # no temporary file
                self.say("gone", bytes.fromhex(path))
            unlink(path, **kwargs)

        os.unlink = say_and_unlink


def opened(root, fsync="off", **options):
    """With its index open, however long that takes: the product waits for it OPEN_WAIT_S."""
    folder = BlockFolder(FolderSettings(root, fsync, **options))
    store, end_s = FileStore(folder, FRAME, threads=2), time.monotonic() + DEADLINE_S
    while folder.stats().blocks is None:
        assert time.monotonic() < end_s
    return store


async def put_all(store):
    return await asyncio.gather(*(store.put(key_of(name), BLOCKS[name]) for name in NAMES))


async def run(root):
    store, log = opened(root), Log(root)
    while True:
        await asyncio.gather(*(log.put(store, key_of(name), BLOCKS[name]) for name in NAMES))
        await asyncio.gather(*(log.delete(store, key_of(name)) for name in NAMES[::2]))


async def fill(root, policy):
    """Writes more than there is room for, over and over, for requests of three kinds."""
    log = Log(root)
    log.evictions()
    store = opened(root, capacity_bytes=16 << 20, policy=policy)
    for number in itertools.count():
        for name in FILL:
            facts = RequestFacts(f"{os.getpid()}-{number}-{name}", 256, f"w{name[1] % 3}")
            await store.on_access([key_of(name)], facts)
            await log.put(store, key_of(name), block_of(name, LAYOUT))


async def race(root):
    store = opened(root)
    await put_all(store)
    await store.close()


async def crash(root, at):
    store = opened(root, fsync="data")
    # From now on the put alone changes the disk.
    die_at(at, "open", "mkdir", "writev", "fdatasync", "close", "replace", "fsync", "rmdir")
    await store.put(key_of(0), BLOCKS[0])
    os._exit(0)


async def aside(root, at):
    store = opened(root, capacity_bytes=16 << 20)
    await store.put(key_of(0), BLOCKS[0])
    name = key_of(0).hex()
    os.truncate(root / NAMESPACE.digest().hex() / name[:2] / name[2:4] / name, 200_000)
    die_at(at, "mkdir", "replace", "rmdir")
    with contextlib.suppress(BlockCorrupt):
        await read(store, key_of(0), LAYOUT)
    os._exit(0)


def die_at(at, *names):
    """Kill this process before call number `at` of these."""
    left = at

    def dying(real):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, dying(getattr(os, name)))


async def half(root):
    store, real = opened(root, capacity_bytes=16 << 20), os.writev

    def once(fd, views):
        os.writev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, views)

    os.writev = once
    await store.put(key_of(0), BLOCKS[0])


def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(work)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    work.close()
    return pid


def main():
    root = Path(sys.argv[1])
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "crash":
            pids = [fork(crash(root, int(rest[0])))]
        elif command == "aside":
            pids = [fork(aside(root, int(rest[0])))]
        elif command == "half":
            pids = [fork(half(root))]
        elif command == "race":
            pids = [fork(race(root)), fork(race(root))]
        elif command == "fill":
            pids = [fork(fill(root, rest[0]))]
        else:
            pids = [fork(run(root))]
        print(pids[0], flush=True)
        status = [os.waitpid(pid, 0)[1] for pid in pids]
        print("ended", max(status), flush=True)


if __name__ == "__main__":
    main()
