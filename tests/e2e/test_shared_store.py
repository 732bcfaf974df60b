"""Two servers on two machines, as far as they can tell: what one has computed, the other loads.

Blocks are stored with the codec that keeps every bit, so that it is seen to.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import BLOCK, VOCAB, Live, Start, StoreView, assert_same, until

from sglang_cake.codec.frame import HEADER_BYTES, read_header


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[tuple[str, StoreView]]:
    """A store server and its folder."""
    root = folder / "shared"
    command = [sys.executable, "-m", "sglang_cake", "store", "serve", "--root", str(root)]
    process = subprocess.Popen(
        [*command, "--capacity", "1GB", "--min-free", "0", "--port", "0"],
        stdout=subprocess.PIPE,
        env=os.environ,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], StoreView(root)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_server_loads_what_another_has_computed(
    start: Start, models: dict[str, Path], folder: Path, shared: tuple[str, StoreView], plain: Live
) -> None:
    url, central = shared
    source = random.Random(11)
    ids = [source.randrange(VOCAB) for _ in range(12 * BLOCK + 5)]
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--sleep-on-idle"),
        *("--cake-codec", "zstd"),
    )

    with start(
        models["first"], (*flags, "--cake-mode", "both"), store=folder / "tier-a", urls=[url]
    ) as one:
        assert_same(one.ask(ids), plain.know(ids))
        for file in central.until_stored(ids):  # written down in the background
            assert read_header(file.read_bytes()[:HEADER_BYTES]).codec == "zstd"

    with start(
        models["first"], (*flags, "--cake-mode", "load"), store=folder / "tier-b", urls=[url]
    ) as two:
        answer = two.ask(ids)
        assert_same(answer, plain.know(ids))
        assert answer.loaded == 12 * BLOCK
        assert answer.meta["cake"]["lossy_tokens"] == 0
        assert two.store.blocks() == []  # read once: the near tier is not filled for that
        two.flush()
        assert two.ask(ids).loaded == 12 * BLOCK
        until(lambda: len(two.store.blocks()) == 12, "read twice: moved up")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores")
def test_a_data_parallel_worker_loads_what_another_has_computed(
    start: Start, models: dict[str, Path], folder: Path, plain: Live
) -> None:
    source = random.Random(12)
    ids = [source.randrange(VOCAB) for _ in range(12 * BLOCK + 5)]
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--dp", "2")
    with start(
        models["first"],
        (*flags, "--cake-mode", "load"),
        store=folder / "store-dp",
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as live:
        live.keep(ids, routed_dp_rank=1)
        here, there = (live.ask(ids, routed_dp_rank=rank) for rank in (0, 1))
        assert [here.meta["dp_rank"], there.meta["dp_rank"]] == [0, 1]
        assert here.loaded == 12 * BLOCK
        assert there.loaded == 0  # it is in its own tree
        assert there.cached >= 12 * BLOCK
        for answer in (here, there):
            assert answer.tokens == plain.know(ids).tokens
        live.flush()  # both workers' trees
        assert live.ask(ids, routed_dp_rank=1).loaded == 12 * BLOCK
