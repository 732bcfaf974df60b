"""A GPU under SGLang's overlap scheduler, in virtual time.

The coordinator, the loader, the device slots, the costs and the writer are the server's own, with
blocks of real size. Models stand in for the rest:

- `VirtualGpu`: streams, copy engines, forwards, and the time that launches take of a host thread.
- `VirtualStore`: a link of one bandwidth in each direction, or memory that lends its blocks;
  blocks without bytes.
- `VirtualScheduler`: SGLang's loop (`scheduler_loop.py`).

Times of copies are those that `make gpu-check` measured on an H100; those of launches are derived
from that (`benchmarks/reports/gpu.md`). Forwards have the costs of `sglang-cake plan`, which are
estimates. The interpreter is not modelled: on a device, threads that load at 25 GB/s also slow the
launches of a forward.
"""

import math
import weakref
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import Buffer, BufferPool, TellBytes, buffer_counts
from sglang_cake.core.errors import BlockMissing
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.memory.copier import Copier
from sglang_cake.integration.memory.kv_pool import Copy, CopyMemory, pieces_of
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, StepWork
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.hardware import GPUS, PLAN_S, prefill_cost
from sglang_cake.simulator.machine import Machine
from sglang_cake.simulator.shapes import find_shape
from sglang_cake.simulator.ttft_lower_bound import ttft_lower_bound
from sglang_cake.stores.base import USUAL_DEPTH, BlockInfo, LentBlock, Store, StoreStats
from sglang_cake.testing.scheduler_loop import PromptRun, SchedulerLoop, prompt
from sglang_cake.testing.virtual_time import VirtualIo, virtual_time

BLOCK_TOKENS = 128
STORE_LATENCY_S = 0.0005
DMA_BYTES_PER_S = 53e9  # PCIe Gen5 x16, pinned memory
HBM_BYTES_PER_S = 2.57e12
KERNEL_S = 3e-6  # the least time of a kernel
# A kernel beside a forward starts when a matrix product of the forward ends: they take this long.
PRODUCT_S = 1.6e-3
LAUNCH_S = 25e-6  # host time of one launch from Python, with its views
# The same within a copy of blocks. Derived, not measured: the code around it takes 1 / 1.7 of what
# it took with the 25 us. A loaded block takes 50 us so, and took 63 us on an H100.
COPY_LAUNCH_S = 15e-6
EVENT_S = 4e-6
LAYER_BLOCKS = 64  # blocks of which one kernel copies a layer
# SGLang's default sizes of prefill graphs (`generate_prefill_cuda_graph_batch_sizes`).
GRAPH_TOKENS = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A model on a GPU (one rank of it), with the true cost of its prefill.

    Attributes:
        prefix_flops: as `PrefillCost.prior` has it.
    """

    name: str
    layers: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    prefill: PrefillCost
    prefix_flops: float
    chunk_tokens: int = 8192

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout.plain(self.layers, self.parts, "bfloat16", BLOCK_TOKENS)

    def ideal_s(self, tokens: int, link_bytes_per_s: float) -> float:
        """T* of a wholly stored prompt."""
        load = LoadCost(STORE_LATENCY_S, self.layout.block_bytes / link_bytes_per_s)
        return ttft_lower_bound(
            Machine(self.prefill, load),
            tokens,
            chunk_tokens=self.chunk_tokens,
            block_tokens=BLOCK_TOKENS,
        ).ttft_s


def _gpu_model(name: str, kv_heads: int, head_dim: int, gpus: int) -> GpuModel:
    shape = find_shape(name)
    cost = prefill_cost(shape, GPUS["h100"], gpus=gpus, chunk_tokens=8192)
    cost = replace(cost, graph_tokens=GRAPH_TOKENS)
    token = (kv_heads, head_dim)
    parts = (("k", token), ("v", token)) if head_dim == 128 else (("kv", token),)
    full_name = f"{name} TP{gpus}" if gpus > 1 else name
    return GpuModel(full_name, shape.layers, parts, cost, shape.prefix_flops / shape.layers)


LLAMA_8B = _gpu_model("llama-3.1-8b", 8, 128, 1)
LLAMA_70B = _gpu_model("llama-3.1-70b", 1, 128, 8)
DEEPSEEK_V3 = _gpu_model("deepseek-v3", 1, 576, 8)
MODELS = (LLAMA_8B, LLAMA_70B, DEEPSEEK_V3)


# ---- the GPU ----


class Engine:
    """Does one thing at a time. Work takes the first gap in which it fits."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def run(self, ready_s: float, work_s: float) -> float:
        """When work that is ready then ends."""
        begin_s = ready_s
        for start_s, stop_s in self._busy:
            if stop_s <= begin_s:
                continue
            if start_s - begin_s >= work_s:
                break
            begin_s = stop_s
        insort(self._busy, (begin_s, begin_s + work_s))
        del self._busy[:-200]
        return begin_s + work_s


class VirtualStream:
    """Launches in it run in order. `tail_s`: the end of the last one."""

    tail_s = 0.0

    def wait(self, until_s: float) -> None:
        self.tail_s = max(self.tail_s, until_s)


@dataclass
class HostTime:
    """The time that a host thread spent on the GPU."""

    launches: int = 0
    events: int = 0  # of the copier's thread, and waits for them; the scheduler's are launches
    launch_s: float = 0.0
    syncs: int = 0  # waits for the device
    waits: int = 0  # for the copier's thread
    wait_s: float = 0.0


class VirtualGpu:
    """Streams and engines of one GPU.

    Attributes:
        forwards: (begin, end) of each.
        held_back_s: how long forwards waited for copies, in all.
        layers: forwards follow the copies that they need layer by layer, so many; 0: they begin
            when these are complete, as the server has it.
        scratch_bytes, peak_scratch_bytes: device memory that copies hold.
    """

    def __init__(self, io: VirtualIo, layers: int = 0) -> None:
        self.io = io
        self.layers = layers
        self._followed_s = 0.0  # when the copies end that the next forward follows
        self.schedule = VirtualStream()
        self.forward_stream = VirtualStream()
        self.to_device = Engine()
        self.to_host = Engine()
        self.scheduler = HostTime()
        self.copier = HostTime()
        self.kernels_s = 0.0  # of copies since the last forward, which the next one pays for
        self.held_back_s = 0.0
        self.forwards: list[tuple[float, float]] = []
        self.scratch_bytes = 0
        self.peak_scratch_bytes = 0

    def launch(self, count: int, took_s: float) -> None:
        """The scheduler thread launches work."""
        self.scheduler.launches += count
        self.scheduler.launch_s += took_s
        self.io.until(self.io.now_s + took_s)

    def sync(self, until_s: float) -> None:
        """The scheduler thread waits for the device."""
        self.scheduler.syncs += 1
        self.io.until(max(until_s, self.io.now_s))

    def follow(self, until_s: float) -> None:
        """Forwards that are launched from now on need copies that end then."""
        if self.layers:
            self._followed_s = max(self._followed_s, until_s)
        else:
            self.forward_stream.wait(until_s)

    def hold(self, owner: object, size_bytes: int) -> None:
        """`owner` holds device memory as long as it lives."""
        self.scratch_bytes += size_bytes
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, self.scratch_bytes)
        weakref.finalize(owner, self._drop, size_bytes)

    def _drop(self, size_bytes: int) -> None:
        self.scratch_bytes -= size_bytes

    def forward(self, work_s: float) -> float:
        """Launch a forward. Returns when it ends."""
        free_s = max(self.io.now_s, self.forwards[-1][1] if self.forwards else 0.0)
        begin_s = max(free_s, self.forward_stream.tail_s, self.schedule.tail_s)
        copies_s = max(0.0, self._followed_s - begin_s)
        followed_s = max(copies_s, work_s) - work_s
        if copies_s:  # the first layer waits for its copy, or the last one is computed after it
            followed_s += min(copies_s, work_s) / self.layers
        self.held_back_s += begin_s - free_s + followed_s
        end_s = begin_s + work_s + followed_s + self.kernels_s
        self.kernels_s = 0.0
        self.forward_stream.tail_s = end_s
        self.forwards.append((begin_s, end_s))
        return end_s


# ---- the KV pool and its copies, as in `kv_pool.CudaKV` and `copier.CopyThread` ----


def virtual_pool(buffers: int) -> BufferPool:
    """Host memory of so many blocks, without their bytes."""
    return BufferPool([Buffer(memoryview(bytearray(8))) for _ in range(buffers)])


@dataclass(eq=False)
class VirtualCopy:
    """A copy that ends at `end_s`, and leaves the KV pool at `pool_s`."""

    gpu: VirtualGpu
    end_s: float
    pool_s: float
    took_s: float

    def done(self) -> bool:
        return self.gpu.io.now_s >= self.end_s

    def seconds(self) -> float:
        return self.took_s


class VirtualKV:
    """Copies as `CudaKV` launches them.

    Attributes:
        launched_s: when the copier's thread has launched all its copies.
    """

    encoded = False
    moves = False

    def __init__(self, gpu: VirtualGpu, layout: BlockLayout, dma_bytes_per_s: float) -> None:
        self.gpu = gpu
        self.layout = layout
        self.launched_s = 0.0
        self._waited: dict[VirtualStream, tuple[float, ...]] = {}  # the last fence of each
        self._in = VirtualStream()
        self._out = VirtualStream()
        self._dma_s = layout.block_bytes / dma_bytes_per_s
        self._pieces = len(pieces_of(layout))
        kernel_s = 2 * layout.block_bytes / HBM_BYTES_PER_S
        self._kernel_s = max(self._pieces * KERNEL_S, kernel_s)  # of all pieces
        memory = CopyMemory.of_blocks(layout.block_bytes)
        self._out_places = memory.out_places
        self._read_s = deque([0.0] * memory.in_places)  # when each place has been read
        gpu.hold(self, memory.all_bytes)

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fence(self) -> tuple[float, ...]:
        self.gpu.launch(2, 2 * EVENT_S)
        return (self.gpu.schedule.tail_s, self.gpu.forward_stream.tail_s)

    def load(self, block: Any, slots: torch.Tensor, after: tuple[float, ...]) -> VirtualCopy:
        gpu = self.gpu
        events = self._waits(self._in, after) + 1 + 4 * self._pieces
        by_layer_s = gpu.layers * (LAUNCH_S + EVENT_S) / LAYER_BLOCKS
        self._launch(2 * self._pieces, events, by_layer_s or None)
        begin_s = max(self._in.tail_s, self.launched_s, *after)
        for _ in range(self._pieces):
            ready_s = max(self.launched_s, self._read_s.popleft())
            fetched_s = gpu.to_device.run(ready_s, self._dma_s / self._pieces)
            self._in.tail_s = self._kernel_starts_s(max(fetched_s, *after))
            self._in.tail_s += self._kernel_s / self._pieces
            self._read_s.append(self._in.tail_s)
        gpu.kernels_s += self._kernel_s
        end_s = self._in.tail_s
        return VirtualCopy(gpu, end_s, end_s, end_s - begin_s)

    def _kernel_starts_s(self, ready_s: float) -> float:
        """When a kernel of the stream into the pool starts: after the one before it at once, and
        otherwise between two products of a forward that runs then."""
        if ready_s <= self._in.tail_s:
            return self._in.tail_s
        for begin_s, end_s in reversed(self.gpu.forwards):
            if end_s <= ready_s:
                break
            if begin_s <= ready_s:
                products = math.ceil((ready_s - begin_s) / PRODUCT_S)
                return min(end_s, begin_s + products * PRODUCT_S)
        return ready_s

    def save(
        self, slots: torch.Tensor, blocks: Sequence[Any], after: tuple[float, ...]
    ) -> VirtualCopy:
        gpu = self.gpu
        self._launch(0, self._waits(self._out, after))
        self._out.wait(max(*after, gpu.io.now_s))
        begin_s = self._out.tail_s
        pool_s = begin_s
        for start in range(0, len(blocks), self._out_places):
            count = len(blocks[start : start + self._out_places])
            for _ in range(self._pieces):
                self._launch(1 + count, 1)
                self._out.wait(self.launched_s)
                self._out.tail_s += count * self._kernel_s / self._pieces
                pool_s = self._out.tail_s
                self._out.tail_s = gpu.to_host.run(pool_s, count * self._dma_s / self._pieces)
            gpu.kernels_s += count * self._kernel_s
        self._launch(0, 1)
        return VirtualCopy(gpu, self._out.tail_s, pool_s, self._out.tail_s - begin_s)

    def freed(self) -> None:
        """Nothing: slots are freed in the scheduler's stream."""

    def order_forwards_after(self, copies: Sequence[VirtualCopy]) -> None:
        if copies:
            self.gpu.launch(1, EVENT_S)
            self.gpu.follow(max(copy.pool_s for copy in copies))

    order_writes_after = order_forwards_after  # no other server writes to slots

    def _waits(self, stream: VirtualStream, after: tuple[float, ...]) -> int:
        """Of a stream for a fence. Slots of many blocks have one."""
        known = self._waited.get(stream) is after
        self._waited[stream] = after
        return 0 if known else len(after)

    def _launch(self, launches: int, events: int, took_s: float | None = None) -> None:
        """Args: took_s: None: by the times of launches and events."""
        if took_s is None:
            took_s = launches * COPY_LAUNCH_S + events * EVENT_S
        host = self.gpu.copier
        host.launches += launches
        host.events += events
        host.launch_s += took_s
        self.launched_s += took_s


class VirtualCopier(Copier):
    """The copier's thread in virtual time: it launches one copy after the other."""

    def __init__(self, io: VirtualIo, kv: Any) -> None:
        super().__init__(kv)
        self._io = io
        self._virtual: VirtualKV = kv
        self._jobs: deque[Callable[[], Any]] = deque()
        self._busy = False

    def wait_launched(self, launches: Sequence["Future[Copy]"]) -> list[Copy | None]:
        self._wait(lambda: all(launched.done() for launched in launches))
        return super().wait_launched(launches)

    def _wait(self, launched: Callable[[], bool]) -> None:
        """The scheduler thread waits."""
        if launched():
            return
        host, since_s = self._virtual.gpu.scheduler, self._io.now_s
        while not launched():
            self._io.until(max(self._io.now_s, self._virtual.launched_s))
        self._io.until(max(self._io.now_s, self._virtual.launched_s))
        host.waits += 1
        host.wait_s += self._io.now_s - since_s

    def _post(self, begin: Callable[[], Any]) -> None:
        self._jobs.append(begin)
        if not self._busy:
            self._busy = True
            self._io.loop.call_soon(self._next)

    def _next(self) -> None:
        self._busy = bool(self._jobs)
        if self._jobs:
            self._virtual.launched_s = self._io.now_s
            begun = self._jobs.popleft()()
            if begun is not None:
                self._io.loop.call_at(begun.copy.end_s, begun.end)
            self._io.loop.call_at(self._virtual.launched_s, self._next)


@dataclass(slots=True)
class VirtualTimer:
    """A `StepTimer` of a forward."""

    io: VirtualIo
    begin_s: float
    end_s: float

    def done(self) -> bool:
        return self.io.now_s >= self.end_s

    def seconds(self) -> float:
        return self.end_s - self.begin_s


class VirtualAllocator:
    """SGLang's slot allocator. With pages of several tokens, `free` waits for the device."""

    def __init__(self, gpu: VirtualGpu, slots: int, page_tokens: int) -> None:
        self._gpu = gpu
        self._page_tokens = page_tokens
        self._free = torch.arange(1, slots + 1)

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, tokens: int) -> torch.Tensor | None:
        self._gpu.launch(1, LAUNCH_S)
        if tokens > len(self._free):
            return None
        found = self._free[:tokens]
        self._free = self._free[tokens:]
        return found

    def free(self, slots: torch.Tensor) -> None:
        if self._page_tokens > 1:
            self._gpu.sync(self._gpu.schedule.tail_s)
        self._free = torch.cat([self._free, slots])

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        del start_pos
        self._gpu.launch(1, LAUNCH_S)
        self._free = torch.cat([self._free, slots])

    def take_back(self, rows: Sequence[torch.Tensor]) -> None:
        """Free the slots of a prompt that has ended, which SGLang's tree does at another time."""
        self._free = torch.cat([self._free, *rows])


# ---- the store ----


class VirtualStore(Store):
    """Blocks behind a link of `link_bytes_per_s` in each direction, one after the other.

    Args:
        lends: it is pinned host memory, which copies to the device read themselves.

    Attributes:
        keys: the stored blocks.
        read_s: when each read ended.
        late_s: number of a read -> how long the link stops before it.
    """

    def __init__(
        self,
        io: VirtualIo,
        block_bytes: int,
        link_bytes_per_s: float,
        latency_s: float,
        *,
        lends: bool = False,
    ) -> None:
        self._io = io
        self._lends = lends
        self._block_s = block_bytes / link_bytes_per_s
        self._latency_s = latency_s
        self._free_s = [0.0, 0.0]  # of reads, of writes
        self.keys: set[BlockKey] = set()
        self.read_s: list[float] = []
        self.late_s: dict[int, float] = {}
        self._reads = 0

    @property
    def cost(self) -> LoadCost:
        """The true cost of reads."""
        return LoadCost(self._latency_s, self._block_s, error=0.02)

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        await self._until(self._io.now_s + self._latency_s)
        return [key in self.keys for key in keys]

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        if key not in self.keys:
            raise BlockMissing(key.hex())
        self._free_s[0] = max(self._free_s[0], self._io.now_s)
        self._free_s[0] += self.late_s.get(self._reads, 0.0)
        self._reads += 1
        await self._cross(0, progress, len(out))
        self.read_s.append(self._io.now_s)
        return len(out)

    def lend(self, key: BlockKey) -> LentBlock | None:
        if not self._lends or key not in self.keys:
            return None
        self.read_s.append(self._io.now_s)
        return LentBlock(Buffer(memoryview(bytearray(8))), lambda: None)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        if key in self.keys:
            return False
        await self._cross(1, None, len(data))
        self.keys.add(key)
        return True

    async def delete(self, key: BlockKey) -> None:
        self.keys.discard(key)

    async def list_blocks(self) -> AsyncIterator[BlockInfo]:
        for key in self.keys:
            yield BlockInfo(key, 0)

    async def stats(self) -> StoreStats:
        return StoreStats(len(self.keys))

    async def close(self) -> None: ...

    def _reserve(self, way: int) -> float:
        """When a block that is asked for now has crossed the link."""
        begin_s = max(self._io.now_s + self._latency_s, self._free_s[way])
        self._free_s[way] = begin_s + self._block_s
        return self._free_s[way]

    async def _cross(self, way: int, progress: TellBytes | None, size: int) -> None:
        end_s = self._reserve(way)
        if progress is not None:
            await self._until(end_s - self._block_s)
            progress(0)
        await self._until(end_s)
        if progress is not None:
            progress(size)

    async def _until(self, when_s: float) -> None:
        future: Any = self._io.loop.create_future()
        # A read may be cancelled meanwhile.
        self._io.loop.call_at(when_s, lambda: future.done() or future.set_result(None))
        await future


# ---- SGLang's part ----


class VirtualScheduler(SchedulerLoop):
    """SGLang's loop on a virtual GPU.

    Args:
        link_bytes_per_s: of the store, in each direction.
        dma_bytes_per_s: of the bus between host and device, in each direction.
        lends: as for `VirtualStore`.
        by_layer: blocks are copied layer by layer, and a forward waits for each layer of its own
            copies. The server does not do so.
        overlap, decodes, evict, consensus: as `SchedulerLoop`.
        allocator: of the slots of a real pool; None: a virtual one.
        kv, store: classes of them.

    Attributes:
        poll_launches: launches of the scheduler thread in each iteration of its loop.
    """

    def __init__(
        self,
        io: VirtualIo,
        model: GpuModel,
        *,
        link_bytes_per_s: float,
        dma_bytes_per_s: float = DMA_BYTES_PER_S,
        lends: bool = False,
        mode: Mode = "auto",
        overlap: bool = True,
        latency_s: float = STORE_LATENCY_S,
        page_tokens: int = 1,
        config: CakeConfig | None = None,
        pool_tokens: int = 400_000,
        decodes: int = 0,
        by_layer: bool = False,
        allocator: Any = None,
        evict: Callable[[int], object] = lambda tokens: None,
        kv: type[VirtualKV] = VirtualKV,
        store: type[VirtualStore] = VirtualStore,
        consensus: RankConsensus | None = None,
    ) -> None:
        config = replace(config or CakeConfig(), mode=mode)
        layout = model.layout
        counts = buffer_counts(
            load_bytes=layout.block_bytes,
            write_bytes=layout.block_bytes,
            reads=config.queue_depth or USUAL_DEPTH,
            chunk_blocks=-(-model.chunk_tokens // BLOCK_TOKENS),
            pool_blocks=pool_tokens // BLOCK_TOKENS,
            staging_bytes=config.staging_bytes,
            write_queue_bytes=config.write_queue_bytes,
            available_bytes=2**37,
        )
        self.model = model
        self.poll_launches: list[int] = []
        self.gpu = VirtualGpu(io, model.layers if by_layer else 0)
        own_kv = kv(self.gpu, layout, dma_bytes_per_s)
        super().__init__(
            io,
            own_kv,
            allocator or VirtualAllocator(self.gpu, pool_tokens, page_tokens),
            store(io, layout.block_bytes, link_bytes_per_s, latency_s, lends=lends),
            copier=partial(VirtualCopier, io, own_kv),
            staging=virtual_pool(counts.loads),
            write_queue=virtual_pool(counts.writes),
            prior=PrefillCost.prior(
                hidden=4096,
                on_gpu=True,
                prefix_flops=model.prefix_flops,
                graph_tokens=model.prefill.graph_tokens,
            ),
            chunk_tokens=model.chunk_tokens,
            config=config,
            evict=evict,
            page_tokens=page_tokens,
            overlap=overlap,
            decodes=decodes,
            consensus=consensus,
        )

    def knows_costs(self) -> None:
        """The server has run for long: it knows the costs of steps and loads."""
        self.step_costs.recall(replace(self.model.prefill, error=0.02), [self.store.cost])
        self.io.until(self.io.now_s)

    def restore(self, tokens: int, *, prompts_before: int = 3) -> PromptRun:
        """Serve a wholly stored prompt, after others of its length from which costs were
        learned."""
        for number in range(prompts_before + 1):
            req = prompt(number, tokens)
            self.store.keys |= set(self.keys(req.origin_input_ids))
            (run,) = self.serve([(0.0, req)])
        return run

    def launch(self, work: StepWork, batch: Sequence[PromptRun]) -> VirtualTimer:
        work_s = self.model.prefill.work_s(work)
        for run in batch:
            run.predictions.append((self.step_costs.agreed.work_s(work), work_s))
        self.io.until(self.io.now_s + PLAN_S)
        self.gpu.forward(work_s)
        step = VirtualTimer(self.io, *self.gpu.forwards[-1])
        self.gpu.schedule.wait(step.end_s)  # `_apply_war_barrier` of fa3
        return step

    def loaded_bytes_per_s(self, since: int) -> float:
        """Between the first and the last read of a block. Args: since: reads before that."""
        reads = self.store.read_s[since:]
        read_s: float = reads[-1] - reads[0]
        return (len(reads) - 1) * self.model.layout.block_bytes / read_s

    def _iterate(self) -> bool:
        before = self.gpu.scheduler.launches
        launched = super()._iterate()
        self.poll_launches.append(self.gpu.scheduler.launches - before)
        return launched

    def wait(self, step: VirtualTimer) -> None:
        self.io.until(max(step.end_s, self.io.now_s))

    def release(self, run: PromptRun) -> None:
        self.allocator.take_back(run.req.row)


@contextmanager
def virtual_scheduler(model: GpuModel, **kwargs: Any) -> Iterator[VirtualScheduler]:
    """A scheduler that lives in virtual time inside the context. Args: as `VirtualScheduler`."""
    with virtual_time() as io:
        yield VirtualScheduler(io, model, **kwargs)
