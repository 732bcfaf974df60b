"""Writers killed at any moment: every block whose put has returned is there and whole, no other
visible one is anything else, and nothing else looks like one."""

import asyncio
import contextlib
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import killed_writers
import pytest
from filestore import files_below
from killed_writers import BLOCKS, LAYOUT, NAMES

import sglang_cake
from sglang_cake.core.errors import BlockMissing
from sglang_cake.testing.store_contract import NAMESPACE, key_of, read

KILLS = 100
SINCE = ("", "begin", "put")  # what moments are counted from, in turns


class KilledWriters:
    """The other end of killed_writers.py."""

    def __init__(self, root):
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, killed_writers.__file__, str(root)],
            env=os.environ | {"PYTHONPATH": str(Path(sglang_cake.__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self, pid, after_s, *, since):
        """Args: since: the moment is counted from the next such word in the log, "" from now."""
        log = killed_writers.log_of(self.root)
        before = log.stat().st_size if log.exists() else 0
        while since and not any(line.startswith(since) for line in self._lines(log, before)):
            ended, _, _ = select.select([self.process.stdout], [], [], 0.001)
            assert not ended, f"the writer has {self.process.stdout.readline()}"
        time.sleep(after_s)  # random moments are the point of these tests
        os.kill(pid, signal.SIGKILL)
        assert self.ended() == signal.SIGKILL

    def _lines(self, log, start):
        if not log.exists():
            return []
        with log.open() as file:
            file.seek(start)
            return file.read().splitlines()

    def ended(self):
        word, status = self.process.stdout.readline().split()
        assert word == "ended"
        return int(status)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def writers(tmp_path):
    with contextlib.closing(KilledWriters(tmp_path)) as it:
        yield it


def check(root):
    """Every visible block reads back right, and all that were promised are visible; returns the
    names of those. Sweeps, as an open does."""

    async def main():
        store = killed_writers.opened(root)
        try:
            found = await store.contains([key_of(name) for name in NAMES])
            names = []
            for name in NAMES:
                if found[name]:
                    try:
                        assert await read(store, key_of(name), LAYOUT) == BLOCKS[name]
                    except BlockMissing:  # killed after its file had gone, before its booking had
                        assert await store.contains([key_of(name)]) == [False]
                    else:
                        names.append(name)
            return names
        finally:
            await store.close()

    names = asyncio.run(main())
    assert killed_writers.promised(root) <= {key_of(name) for name in names}
    folder = root / NAMESPACE.digest().hex()
    files = {str(path.relative_to(folder)) for path in files_below(folder)}
    blocks = {key_of(name).hex() for name in names}
    assert files - {"namespace.json"} == {f"{key[:2]}/{key[2:4]}/{key}" for key in blocks}
    assert "namespace.json" in files or not blocks
    return names


def test_file_store_writers_killed_at_random_lose_no_finished_block(writers, tmp_path):
    moments = random.Random(7)
    kept = 0
    for turn in range(KILLS):
        pid = writers.start("run")
        writers.kill(pid, moments.uniform(0, 0.03), since=SINCE[turn % 3])
        kept += len(check(tmp_path))
    assert kept >= KILLS // 3  # since its first put, a writer's every second block is there


def test_file_store_put_killed_before_each_system_call_is_atomic(writers, tmp_path):
    check(tmp_path)
    visible = []
    for at in range(100):
        writers.start(f"crash {at}")
        status = writers.ended()
        left = list(tmp_path.rglob(".tmp-*"))
        assert all(re.fullmatch(r"\.tmp-[0-9a-f-]+", path.name) for path in left)
        visible.append(check(tmp_path) == [0])
        if status == 0:
            break
        assert status == signal.SIGKILL
        shutil.rmtree(tmp_path)  # as if there had been no put
    # Invisible up to the rename, visible from then on: folders, description, open, writes, sync,
    # close, rename.
    assert visible == sorted(visible)
    assert visible.count(False) > 8
    assert visible.count(True) > 2


def test_file_store_same_blocks_from_two_processes_are_stored_whole(writers, tmp_path):
    for _ in range(5):
        writers.start("race")
        assert writers.ended() == 0
        assert check(tmp_path) == list(NAMES)
        for name in NAMES:
            key = key_of(name).hex()
            (tmp_path / NAMESPACE.digest().hex() / key[:2] / key[2:4] / key).unlink()
