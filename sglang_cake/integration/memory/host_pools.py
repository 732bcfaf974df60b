"""Host memory of a scheduler process: allocated at the start, and pinned for a GPU."""

import contextlib
import logging
import resource
from functools import partial
from typing import Any

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import BufferPool, HostArena, buffer_counts, mib
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration.memory.kv_pool import DeviceKV, copying_thread

logger = logging.getLogger("sglang_cake")


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
    pinned = kv.device.type == "cuda" and pin(arena, kv.device)
    logger.log(
        logging.WARNING if counts.reduced else logging.INFO,
        "cake: %s of host memory, %s, %s: buffers of %s for %d blocks being loaded and %d being "
        "stored, of which a step computes up to %d%s",
        mib(arena.size_bytes),
        "pinned" if pinned else "pageable",
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


def pin(arena: HostArena, device: torch.device) -> bool:
    """Let the GPU copy to and from the arena directly, for as long as the arena's memory exists.

    False: the system refused, and the log says so. Copies work as well with pageable memory, but
    they are slower, and the host waits for them.
    """
    cudart: Any = torch.cuda.cudart()
    result = cudart.cudaHostRegister(arena.address, arena.size_bytes, 0)
    if int(result) == 0:
        arena.mapping.before_unmap = partial(_unpin, arena.address, arena.size_bytes, device)
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # the first launch after the failure reports it once more
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    logger.error(
        "cake: %s of host memory cannot be pinned (%s), so copies to and from the GPU are slow: "
        "raise the limit of locked memory, which is %s (ulimit -l, LimitMEMLOCK=infinity, docker "
        "run --ulimit memlock=-1), or lower --cake-staging-bytes, --cake-write-queue-bytes and the "
        "size of memory://",
        mib(arena.size_bytes),
        cudart.cudaGetErrorString(result),
        "infinite" if limit == resource.RLIM_INFINITY else mib(limit),
    )
    return False


def _unpin(address: int, size_bytes: int, device: torch.device) -> None:
    """Undo `pin`, in whatever thread the last use of the memory ends."""
    cudart: Any = torch.cuda.cudart()
    with copying_thread(device):
        result = cudart.cudaHostUnregister(address)
    if int(result) != 0:
        logger.error(
            "cake: %s of host memory cannot be unpinned (%s)",
            mib(size_bytes),
            cudart.cudaGetErrorString(result),
        )
