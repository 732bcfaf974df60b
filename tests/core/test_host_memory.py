"""Host memory for blocks: where buffers lie, and how many there are."""

import gc
import os
import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_calls import is_mapped

from sglang_cake.core.buffers import (
    COPIED_BLOCKS,
    PAGE_BYTES,
    BufferCounts,
    BufferPool,
    HostArena,
    available_bytes,
    buffer_counts,
    is_on_page,
)
from sglang_cake.core.errors import ConfigError

MIB, GIB = 2**20, 2**30
SIZES = st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=20)


# ---- what there is ----


def machine(root: Path, *, cgroups: str, **files: str) -> Path:
    """A machine of which 8 GiB are available. Args: files: of cgroups, `/` written as `__`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:    {8 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = {
    "memory__job__memory_limit_in_bytes": f"{3 * GIB}\n",
    "memory__job__memory_usage_in_bytes": f"{2 * GIB}\n",
    "memory__job__memory_stat": f"cache 7\ninactive_file 9\ntotal_inactive_file {GIB // 2}\n",
    "memory__memory_limit_in_bytes": "9223372036854771712\n",
    "memory__memory_usage_in_bytes": "12345\n",
    "memory__memory_stat": "",
}
# The path is that of the host, and the mount is the container's.
V1_IN_CONTAINER = {name.replace("__job", ""): text for name, text in list(V1.items())[:3]}
V2 = {
    "a.slice__memory_max": f"{4 * GIB}\n",
    "a.slice__memory_current": f"{3 * GIB}\n",
    "a.slice__memory_stat": f"anon 1\ninactive_file {GIB // 4}\n",
    "a.slice__b.scope__memory_max": "max\n",
    "a.slice__b.scope__memory_current": f"{2 * GIB}\n",
    "a.slice__b.scope__memory_stat": "inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("cgroups", "files", "expected_bytes"),
    [
        ("", {}, 8 * GIB),
        ("9:pids:/job\n4:cpu,memory:/job\n0::/\n", V1, GIB + GIB // 2),
        ("4:memory:/docker/0123\n", V1_IN_CONTAINER, 3 * GIB // 2),
        ("0::/a.slice/b.scope\n", V2, GIB + GIB // 4),  # the group above has the limit
        ("0::/a.slice\n", {**V2, "a.slice__memory_current": f"{9 * GIB}"}, 0),  # it was lowered
        ("0::/a.slice\n", {**V2, "a.slice__memory_max": f"{99 * GIB}"}, 8 * GIB),
        ("3:pids:/a.slice\n", V2, 8 * GIB),  # a limit on another process
    ],
    ids=["none", "v1", "v1-container", "v2-above", "v2-over", "v2-large", "other-group"],
)
def test_available_bytes_are_the_least_of_the_machine_and_its_cgroups(
    tmp_path: Path, cgroups: str, files: dict[str, str], expected_bytes: int
) -> None:
    assert available_bytes(machine(tmp_path, cgroups=cgroups, **files)) == expected_bytes


def test_available_bytes_without_cgroups_are_those_of_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroups="")
    (root / "proc/self/cgroup").unlink()
    assert available_bytes(root) == 8 * GIB
    assert available_bytes() > 0, "this machine"


# ---- the arena ----


@given(SIZES, st.booleans())
def test_host_arena_buffers_start_on_pages_and_do_not_overlap(
    sizes: list[int], prefault: bool
) -> None:
    arena = HostArena(sizes, prefault=prefault)
    assert [len(buffer.view) for buffer in arena.buffers] == sizes
    assert all(is_on_page(buffer.view) for buffer in arena.buffers)
    assert arena.size_bytes == len(arena.mapping)
    assert arena.size_bytes - sum(sizes) < PAGE_BYTES * len(sizes)
    for number, buffer in enumerate(arena.buffers):
        buffer.view[:] = bytes([number + 1]) * len(buffer.view)
    for number, buffer in enumerate(arena.buffers):
        assert bytes(buffer.view) == bytes([number + 1]) * len(buffer.view)
    written = sorted({*arena.mapping[:]} - {0})
    assert written == [number + 1 for number in range(len(sizes))]


def test_host_arena_memory_lives_as_long_as_one_buffer() -> None:
    arena = HostArena([10, 10], prefault=True)
    freed = weakref.finalize(arena.mapping, lambda: None)
    last = arena.buffers[1]
    del arena
    gc.collect()
    last.view[:] = b"0123456789"
    assert freed.alive
    del last
    gc.collect()
    assert not freed.alive


def test_host_arena_prefaulted_memory_is_resident() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    arena = HostArena([64 * MIB], prefault=True)
    assert resident_bytes() - before > 60 * MIB
    del arena


def test_host_arena_forked_child_does_not_have_it() -> None:
    arena = HostArena([PAGE_BYTES], prefault=True)
    child = os.fork()
    if child == 0:
        os._exit(is_mapped(arena.address))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_mapped(arena.address)


def test_host_arena_too_large_is_an_oserror() -> None:
    with pytest.raises(OSError, match="memory"):
        HostArena([2**60], prefault=False)


# ---- the pool ----


def test_buffer_pool_hands_out_each_buffer_once() -> None:
    buffers = HostArena([1] * 5, prefault=False).buffers
    pool = BufferPool(buffers)
    taken = [pool.take() for _ in range(5)]
    assert {id(buffer) for buffer in taken} == {id(buffer) for buffer in buffers}
    assert pool.take() is None
    assert (pool.free, pool.capacity) == (0, 5)
    assert taken[2] is not None
    pool.give(taken[2])
    assert pool.free == 1
    assert pool.take() is taken[2]


# ---- how many ----


def counts(
    block_bytes: int = MIB,
    *,
    load_bytes: int | None = None,
    reads: int = 4,
    chunk_blocks: int = 4,
    pool_blocks: int = 10**6,
    staging_bytes: int | None = None,
    write_queue_bytes: int | None = None,
    available_bytes: int = 2**50,
) -> BufferCounts:
    return buffer_counts(
        load_bytes=load_bytes or block_bytes,
        write_bytes=block_bytes,
        reads=reads,
        chunk_blocks=chunk_blocks,
        pool_blocks=pool_blocks,
        staging_bytes=staging_bytes,
        write_queue_bytes=write_queue_bytes,
        available_bytes=available_bytes,
    )


def test_buffer_counts_large_model_has_two_chunks_of_writes() -> None:
    """Llama-3-8B in bfloat16 with chunks of 8,192 tokens: blocks of 16 MiB, 64 in a chunk."""
    assert counts(16 * MIB, chunk_blocks=64) == BufferCounts(loads=64, writes=128)


def test_buffer_counts_small_model_has_the_defaults_in_bytes() -> None:
    assert counts(MIB // 4, chunk_blocks=4) == BufferCounts(loads=4096, writes=1024)


def test_buffer_counts_encoded_block_takes_one_page_more() -> None:
    """A payload has a head of 1 KiB, and buffers start on pages."""
    assert counts(16 * MIB, load_bytes=16 * MIB + 1024, chunk_blocks=64).loads == 63


def test_buffer_counts_huge_blocks_leave_room_for_every_read() -> None:
    assert counts(GIB, reads=7).loads == 7 + COPIED_BLOCKS


def test_buffer_counts_small_kv_pool_bounds_the_defaults_only() -> None:
    assert counts(pool_blocks=10) == BufferCounts(loads=20, writes=20)
    set_by_user = counts(pool_blocks=10, staging_bytes=GIB, write_queue_bytes=GIB)
    assert set_by_user == BufferCounts(loads=1024, writes=1024)


def test_buffer_counts_set_sizes_are_kept_but_for_what_reads_need() -> None:
    assert counts(staging_bytes=40 * MIB, write_queue_bytes=3 * MIB) == BufferCounts(40, 3)
    assert counts(staging_bytes=1, write_queue_bytes=1, reads=2) == BufferCounts(6, 1)


def test_buffer_counts_defaults_are_reduced_to_half_of_the_available_memory() -> None:
    reduced = counts(available_bytes=GIB)  # of 1 GiB + 256 MiB
    assert reduced == BufferCounts(loads=409, writes=102, reduced=True)
    kept = counts(available_bytes=GIB, write_queue_bytes=200 * MIB)
    assert kept == BufferCounts(loads=312, writes=200, reduced=True)


@pytest.mark.parametrize(
    "setting",
    [
        {"staging_bytes": GIB},
        {"write_queue_bytes": GIB},
        {"staging_bytes": 300 * MIB, "write_queue_bytes": 300 * MIB},
        {"reads": 600},
    ],
)
def test_buffer_counts_too_much_is_one_line_with_numbers_and_flags(
    setting: dict[str, int],
) -> None:
    with pytest.raises(ConfigError) as error:
        counts(available_bytes=GIB, **setting)  # type: ignore[arg-type]
    message = str(error.value)
    assert "\n" not in message
    assert "half of the 1,024 MiB" in message
    for flag in ("staging-bytes", "write-queue-bytes", "queue-depth", "block-tokens"):
        assert f"--cake-{flag}" in message


@given(
    block_bytes=st.integers(1, 64 * MIB),
    reads=st.integers(1, 64),
    chunk_blocks=st.integers(1, 2**24),
    pool_blocks=st.integers(1, 10**6),
    staging_bytes=st.none() | st.integers(1, 2**40),
    write_queue_bytes=st.none() | st.integers(1, 2**40),
    available_bytes=st.integers(0, 2**40),
)
def test_buffer_counts_take_at_most_half_of_the_available_memory(**args: int) -> None:
    try:
        found = counts(**args)  # type: ignore[arg-type]
    except ConfigError:
        return
    stride = -(-args["block_bytes"] // PAGE_BYTES) * PAGE_BYTES
    assert (found.loads + found.writes) * stride <= args["available_bytes"] // 2
    assert found.loads >= args["reads"] + COPIED_BLOCKS
    assert found.writes >= 1
    if args["write_queue_bytes"] is None and not found.reduced:
        assert found.writes >= 2 * min(args["chunk_blocks"], args["pool_blocks"])
