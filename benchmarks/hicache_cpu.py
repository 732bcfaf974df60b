"""SGLang's own launcher, with what its HiCache lacks on a CPU, and with a link of stated bandwidth.

    python -m benchmarks.hicache_cpu --model-path ... --enable-hierarchical-cache ...

Three things are replaced, when this is the main module: SGLang starts its processes with "spawn",
which imports the main module again, so they hold in the scheduler too.

- `transfer_kv_direct` of `sgl_kernel`, which has no CPU build: indexed copies in plain PyTorch.
- The host pool is not pinned, and 1 GiB of memory is left free beside it instead of 10.
- Reads of the file backend cross one link, one after another, as those of `ThrottledStore` do. The
  bandwidth stands in the file that $BENCH_LINK_FILE names and is read again while a read waits, so
  one server serves all bandwidths; 0 is no limit, which also ends what is under way.

Nothing else of HiCache is touched: when it reads, in which portions, how long it waits for them.
"""

import functools
import os
import runpy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

LINK_ENV = "BENCH_LINK_FILE"
HOST_RESERVE_BYTES = 2**30
LOOK_AGAIN_S = 0.02
CATCH_UP_S = 0.01


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the rows `src_indices` of each source to the rows `dst_indices` of its destination."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        rows = source[src_indices.to(source.device)]
        destination[dst_indices.to(destination.device)] = rows.to(destination.device)


class Link:
    """One transfer at a time, each of them as long as its bytes take at the file's bandwidth."""

    def __init__(self, bandwidth_file: Path, clock: Any = time) -> None:
        """Args: clock: has `monotonic` and `sleep`; tests pass their own."""
        self._file = bandwidth_file
        self._clock = clock
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the link was free again

    def bytes_per_s(self) -> float:
        """The bandwidth now; 0 is no limit, and so is a file that says nothing."""
        try:
            return float(self._file.read_text() or 0)
        except (OSError, ValueError):
            return 0.0

    def carry(self, size_bytes: int, read: Callable[[], Any]) -> Any:
        """Call `read`, and keep the link until `size_bytes` have had time to cross it.

        What passes between two reads in a row (Python, a sleep that ends late) is not lost to the
        link: HiCache asks for one page after the other, where Cake has several reads in flight.
        """
        with self._lock:
            begun_s = max(self._free_s, self._clock.monotonic() - CATCH_UP_S)
            result = read()
            while (limit := self.bytes_per_s()) > 0:
                left_s = begun_s + size_bytes / limit - self._clock.monotonic()
                if left_s <= 0:
                    break
                self._clock.sleep(min(left_s, LOOK_AGAIN_S))
            limit = self.bytes_per_s()
            now_s = self._clock.monotonic()
            self._free_s = min(now_s, begun_s + size_bytes / limit) if limit > 0 else now_s
            return result


def _pace_reads(link: Link) -> None:
    from sglang.srt.mem_cache import hicache_storage

    plain = hicache_storage.HiCacheFile.get

    @functools.wraps(plain)
    def get(self: Any, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> Any:
        size_bytes = target_location.numel() * target_location.element_size()
        return link.carry(size_bytes, lambda: plain(self, key, target_location, target_sizes))

    hicache_storage.HiCacheFile.get = get


def _repair_host_pool() -> None:
    from sglang.srt.mem_cache.pool_host import base, mha

    plain = mha.MHATokenToKVPoolHost.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "pin_memory": False})

    mha.MHATokenToKVPoolHost.__init__ = init
    mha.transfer_kv_direct = transfer_kv_direct
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES


if __name__ in ("__main__", "__mp_main__"):
    _repair_host_pool()
    if LINK_ENV in os.environ:
        _pace_reads(Link(Path(os.environ[LINK_ENV])))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
