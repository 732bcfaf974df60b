"""Host memory of a scheduler process: allocated at the start, and pinned for a GPU."""

import contextlib
import logging
import mmap
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import BufferPool, HostArena, buffer_counts, mib, pin_advice
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.memory.kv_pool import DeviceKV, copying_thread

logger = logging.getLogger("sglang_cake")

# The least size of one registration. Meanwhile CUDA takes no other call of the process, so no
# forward is launched. Others measured 0.12 s a GB (pull request 51414 of vLLM), so these take 8 ms.
# Newer drivers also refuse 512 GiB in one call.
PIN_BYTES: Final = 64 * 2**20


def host_pools(
    kv: DeviceKV,
    config: CakeConfig,
    *,
    chunk_tokens: int,
    free_bytes: int,
    reads: int,
    end_blocks: int = 0,
) -> tuple[BufferPool, BufferPool]:
    """Buffers for blocks that are being loaded, and for blocks that are being stored.

    The calling thread touches all of the memory, so that it lies on the NUMA node of that thread.
    SGLang binds the process to the node of its GPU before.

    Args:
        chunk_tokens: the most tokens of one step that this rank stores.
        free_bytes: free host memory; defaults take at most half of it.
        reads: how many reads of the store run at once.
        end_blocks: blocks of an end state. They are held until the last of them is there.

    Raises: ConfigError if the machine does not have the memory.
    """
    layout = kv.layout
    chunk_blocks = -(-chunk_tokens // layout.block_tokens)
    counts = buffer_counts(
        load_bytes=kv.load_buffer_bytes,
        write_bytes=layout.block_bytes,
        reads=reads,
        chunk_blocks=chunk_blocks,
        pool_blocks=kv.slots // layout.block_tokens,
        end_blocks=end_blocks,
        staging_bytes=config.staging_bytes,
        write_queue_bytes=config.write_queue_bytes,
        available_bytes=free_bytes,
    )
    sizes = [kv.load_buffer_bytes] * counts.loads + [layout.block_bytes] * counts.writes
    try:
        arena = HostArena(sizes, prefault=True)
    except OSError as error:
        raise ConfigError(
            f"{mib(sum(sizes))} of host memory cannot be allocated ({error.strerror}): lower "
            "--cake-staging-bytes or --cake-write-queue-bytes"
        ) from None
    pinned = pin(arena, kv.device) if kv.device.type == "cuda" else 0
    logger.log(
        logging.WARNING if counts.reduced else logging.INFO,
        "cake: %s of host memory, %s, %s: buffers of %s for %d blocks being loaded and %d being "
        "stored, of which a step computes up to %d%s",
        mib(arena.size_bytes),
        "pageable" if not pinned else "pinned" if pinned == len(sizes) else "pinned in part",
        "huge pages" if arena.huge_pages else "no huge pages",
        mib(layout.block_bytes),
        counts.loads,
        counts.writes,
        chunk_blocks,
        "; less than the default, which is more than half of the available memory"
        if counts.reduced
        else "",
    )
    loads, writes = arena.buffers[: counts.loads], arena.buffers[counts.loads :]
    return BufferPool(loads), BufferPool(writes)


def pin(arena: HostArena, device: torch.device) -> int:
    """Let the GPU copy to and from the buffers of a new arena directly, for as long as the arena's
    memory exists. The calling thread touches all that is pinned.

    Returns: how many buffers, from the first one on. Fewer than all: the system refused the next
    ones, and the log says so. Copies work as well with pageable memory, but they are slower, and
    the host waits for them.
    """
    cudart: Any = torch.cuda.cudart()
    pinned: list[tuple[int, int]] = []
    buffers = start = 0
    for next_buffers, stop in _chunks(arena):
        # Otherwise CUDA allocates the pages, and all other calls wait for that. This is also the
        # pause in which they run: CUDA's lock is not fair. Without one, a launch waited
        # 2 s for registrations of 1 GB (as above).
        arena.touch(start, stop)
        chunk = arena.address + start, stop - start
        result = cudart.cudaHostRegister(*chunk, 0)
        if int(result) != 0:
            break
        pinned.append(chunk)
        arena.mapping.before_unmap = partial(_unpin, pinned, device)
        buffers, start = next_buffers, stop
    else:
        return buffers
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # the first launch after the failure reports it once more
    logger.error(
        "cake: %s of host memory cannot be pinned (%s), so copies to and from the GPU are slow: %s",
        mib(arena.size_bytes - start),
        cudart.cudaGetErrorString(result),
        pin_advice(start),
    )
    return buffers


def _chunks(arena: HostArena) -> Iterator[tuple[int, int]]:
    """Where each registration ends: the number of buffers up to there, and of bytes.

    A buffer lies in one of them, since CUDA refuses a copy that crosses from one to the next. A
    page of the system, which may be larger than those of buffers, does so too.
    """
    start = 0
    for buffers, stop in enumerate(arena.stops, 1):
        whole = stop - start >= PIN_BYTES and stop % mmap.PAGESIZE == 0
        if whole or stop == arena.size_bytes:
            yield buffers, stop
            start = stop


def _unpin(pinned: list[tuple[int, int]], device: torch.device) -> None:
    """Undo `pin`, in whatever thread the last use of the memory ends."""
    cudart: Any = torch.cuda.cudart()
    failed_bytes = 0
    with copying_thread(device):
        for address, size_bytes in pinned:
            begun_s = time.perf_counter()
            result = cudart.cudaHostUnregister(address)
            # Threads that wait for CUDA run meanwhile, as in `pin`.
            time.sleep(time.perf_counter() - begun_s)
            if int(result) != 0:
                failed_bytes += size_bytes
                error = cudart.cudaGetErrorString(result)
    if failed_bytes:
        logger.error("cake: %s of host memory cannot be unpinned (%s)", mib(failed_bytes), error)
