"""Host memory in front of a slow file store, in a real server."""

import os
from collections.abc import Callable
from pathlib import Path

from live import BLOCK, Live, Start, assert_same
from polling import until

Make = Callable[[int], list[int]]
BLOCKS = 12


def flags(store: Path, ranks: int) -> tuple[str, ...]:
    urls = f"memory://64MB,file://{store}?min_free=0&bandwidth=20MB/s"
    return (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load"),
        *("--cake-store", urls, "--enable-metrics"),
        *(("--tp", "2") if ranks > 1 else ()),
    )


def counted(live: Live, tier: int, event: str) -> float:
    """Blocks of the first rank. Each rank publishes its counts every few seconds."""
    return live.metric("tier_blocks_total", tier=str(tier), event=event, tp_rank="0")


def until_read(live: Live, blocks: int) -> None:
    """Wait until so many reads are published; blocks that memory lends count as well."""
    until(lambda: counted(live, 1, "read") + counted(live, 2, "read") == blocks, f"{blocks} reads")


def test_memory_tier_loads_from_memory_also_after_a_weight_update(
    start: Start, models: dict[str, Path], folder: Path, plain: Live, prompt: Make
) -> None:
    ids = prompt(BLOCKS * BLOCK + 5)
    store = folder / "store-below-memory"
    ranks = 2 if (os.cpu_count() or 1) >= 2 else 1
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}
    with start(models["first"], flags(store, ranks), store=store, env=env) as live:
        assert_same(live.ask(ids), plain.reference(ids))
        live.store.until_stored(ids)  # written down in the background
        for _ in range(2):
            answer = live.ask_flushed(ids)
            assert_same(answer, plain.reference(ids))
            assert answer.loaded == BLOCKS * BLOCK
        until_read(live, 2 * BLOCKS)
        assert counted(live, 1, "read") == 2 * BLOCKS
        assert counted(live, 1, "put") == counted(live, 2, "put") == BLOCKS
        live.post("/update_weights_from_disk", model_path=str(models["first"]))
        answer = live.ask_flushed(ids)
        assert_same(answer, plain.reference(ids))
        assert answer.loaded == BLOCKS * BLOCK
        until_read(live, 3 * BLOCKS)
        assert counted(live, 1, "read") == 3 * BLOCKS, "memory has survived the update"
