"""SGLang's overlap loop with real streams: prompts of which all blocks but the end are stored.

The forwards do what those of a Llama do, with one set of random weights for all layers: the matrix
products of a layer, attention over as many random keys as the prompt has tokens before, and KV that
is written into the pool. That KV tells the token and the plane to which it belongs. So each forward
checks on the device what it finds in the slots of all earlier tokens, and in the end all bytes of
the prompt's slots are compared.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.gpu.measuring import GB, Finding, Size, no_waiting
from benchmarks.gpu.stand_ins import SlotAllocator, make_pool
from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import BufferPool, TellBytes, available_bytes
from sglang_cake.core.errors import BlockMissing
from sglang_cake.core.keys import BlockKey
from sglang_cake.core.threads import DaemonPool, IoThread, run_stoppable
from sglang_cake.integration.memory.copier import CopyThread
from sglang_cake.integration.memory.host_pools import host_pools
from sglang_cake.integration.memory.kv_pool import CudaKV
from sglang_cake.integration.step_costs import CudaTimer
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, StepWork
from sglang_cake.loading.planner import Mode
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.simulator.ideal_ttft import Ideal, ideal_meet
from sglang_cake.testing.scheduler_loop import LoopRequest, PromptRun, SchedulerLoop, prompt
from sglang_cake.testing.virtual_gpu import VirtualStore

Copied = TypeVar("Copied")
MODES: tuple[Mode, ...] = ("compute", "load", "auto")
QUEUE_DEPTH = 8
LATENCY_S = 0.0005
STORING_GB_PER_S = 25.0
COPY_THREADS = 8
CLOSE_S = 10.0
MANY = 1 << 20  # more than the words of a token
MOST_OVER_IDEAL = 1.05  # T/T*, at the median of all cells
MOST_OVER_SINGLE = 1.02  # of the time of the better single way, in each cell
LEAST_OF_LINK = 0.9  # of what the link carries, while blocks are loaded
MOST_ERROR = 0.5  # of predicted steps; from there on a server takes its costs for guesses


class LiveIo(IoThread):
    """The I/O thread, with the clock that a `SchedulerLoop` needs."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def until(self, when_s: float) -> None:
        time.sleep(max(0.0, when_s - time.monotonic()))


class LinkedMemory(VirtualStore):
    """Blocks in host memory, behind a link of one bandwidth in each direction."""

    def __init__(
        self,
        io: Any,
        block_bytes: int,
        link_bytes_per_s: float,
        blocks: dict[BlockKey, "np.ndarray[Any, Any]"],
    ) -> None:
        super().__init__(io, block_bytes, link_bytes_per_s, LATENCY_S)
        self.blocks = blocks
        self.keys = set(blocks)
        self._threads = DaemonPool(COPY_THREADS, "link")

    async def get_into(
        self, key: BlockKey, out: memoryview, progress: TellBytes | None = None
    ) -> int:
        block = self.blocks.get(key)
        if block is None:
            raise BlockMissing(key.hex())
        target = np.frombuffer(out, np.uint8)[: len(block)]
        await self._cross_in_thread(0, partial(np.copyto, target, block))
        self.read_s.append(time.monotonic())
        return len(block)

    async def put(self, key: BlockKey, data: memoryview) -> bool:
        if key in self.blocks:
            return False
        source = np.frombuffer(data, np.uint8)
        self.blocks[key] = await self._cross_in_thread(1, source.copy)
        self.keys.add(key)
        return True

    async def close(self) -> None:
        self._threads.shutdown()

    async def _cross_in_thread(self, way: int, copy: Callable[[], Copied]) -> Copied:
        """Copy a block, and wait in the same thread until it has crossed the link, as a thread of a
        file store waits for the disk."""
        end_s = self._reserve(way)

        def cross(stop: threading.Event) -> Copied:
            copied = copy()
            stop.wait(end_s - time.monotonic())
            return copied

        return await run_stoppable(self._threads, cross)


@dataclass(eq=False)
class Forward(CudaTimer):
    """One forward. Attributes: predicted_s: what it was predicted to take."""

    predicted_s: float

    def __post_init__(self) -> None:
        super().__init__()

    def wait(self) -> None:
        self._end.synchronize()

    def follow_on(self, stream: torch.cuda.Stream) -> None:
        """`stream` goes on when the forward is over."""
        stream.wait_event(self._end)

    def gap_s(self, before: "Forward") -> float:
        """Time of the device between the end of `before` and the start of this one."""
        return float(before._end.elapsed_time(self._begin)) / 1e3


class Model:
    """Launches the work of a Llama's forward, and KV that can be checked.

    Attributes:
        wrong: on the device: how many words of KV were not those of their token.
    """

    def __init__(self, size: Size, kv: CudaKV) -> None:
        form, device = size.form, kv.device
        self._kv = kv
        self._form = form
        self._heads = 4 * form.heads
        hidden = self._heads * form.dim
        wide = hidden * 7 // 2
        longest = max(size.prompts) + size.question_tokens
        made = partial(torch.randn, device=device, dtype=form.dtype)
        self._x = made(size.chunk_tokens, hidden)
        self._qkv = made(hidden, hidden + 2 * form.heads * form.dim) / hidden**0.5
        self._out = made(hidden, hidden) / hidden**0.5
        self._up = made(hidden, 2 * wide) / hidden**0.5
        self._down = made(wide, hidden) / wide**0.5
        self._keys, self._values = (
            made(1, self._heads, longest + size.chunk_tokens, form.dim) for _ in range(2)
        )
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        # Few launches beside those of a Llama: they need the interpreter too.
        self._first_of_plane = [
            torch.tensor(plane * rows.shape[1], device=device).to(rows.dtype)
            for plane, rows in enumerate(kv.rows)
        ]
        self._ends = [rows[:, :: rows.shape[1] - 1] for rows in kv.rows]  # first and last word

    def launch(self, first: int, tokens: int, row: Sequence[torch.Tensor]) -> None:
        """Compute the last part of a row on the current stream.

        Args:
            first: id of the prompt's first token; the others follow it.
            tokens: of the row.
            row: slots of the prompt's tokens.
        """
        new, before = row[-1], row[:-1]
        start = tokens - len(new)
        old = torch.cat(list(before)) if before else new[:0]
        rows = self._kv.rows[0]
        ids = torch.arange(first, first + tokens, device=new.device)
        words = _words_of(ids[start:], rows)
        ends = _words_of(ids[:start], rows, every=rows.shape[1] - 1)
        for layer in range(self._form.layers):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                self._layer(len(new), start)
            for plane in (2 * layer, 2 * layer + 1):
                number = self._first_of_plane[plane]
                found = self._ends[plane].index_select(0, old)
                self.wrong += (found != ends + number).sum()
                self._kv.rows[plane].index_copy_(0, new, words + number)

    def check(self, first: int, row: Sequence[torch.Tensor]) -> None:
        """Compare all KV of a row."""
        slots = torch.cat(list(row))
        ids = torch.arange(first, first + len(slots), device=slots.device)
        for plane, rows in enumerate(self._kv.rows):
            words = _words_of(ids, rows) + self._first_of_plane[plane]
            self.wrong += (rows.index_select(0, slots) != words).sum()

    def _layer(self, count: int, start: int) -> None:
        x = self._x[:count]  # the same for all layers: its values stay those of a normal input
        q = (x @ self._qkv)[:, : self._heads * self._form.dim]
        q = q.reshape(1, count, self._heads, self._form.dim).transpose(1, 2)
        keys = start + -(-count // 2)  # as many as a causal mask leaves, on average
        mixed = scaled_dot_product_attention(q, self._keys[:, :, :keys], self._values[:, :, :keys])
        mixed.transpose(1, 2).reshape(count, -1) @ self._out
        gate, up = (x @ self._up).chunk(2, dim=1)
        (silu(gate) * up) @ self._down


def _words_of(ids: torch.Tensor, rows: torch.Tensor, every: int = 1) -> torch.Tensor:
    """What the rows of these tokens hold in the first plane, `[tokens, words]`: all different. In
    another plane it is more by the number of its first word."""
    columns = torch.arange(0, rows.shape[1], every, device=ids.device)
    return (ids.unsqueeze(1) * MANY + columns).to(rows.dtype)


@dataclass
class Gpu:
    """What all loops of a step share: the pool, its copies, and host memory."""

    size: Size
    device: torch.device
    forward: torch.cuda.Stream = field(init=False)
    kv: CudaKV = field(init=False)
    model: Model = field(init=False)
    allocator: SlotAllocator = field(init=False)
    staging: BufferPool = field(init=False)
    write_queue: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        size = self.size
        slots = max(size.pool_bytes // size.form.token_bytes, 2 * max(size.prompts))
        pool = make_pool(size.form, slots, device=self.device)
        self.forward = torch.cuda.Stream(self.device)
        self.kv = CudaKV(pool, block_tokens=size.block_tokens, forward_stream=self.forward)
        self.model = Model(size, self.kv)
        self.allocator = SlotAllocator(slots, self.device)
        self.staging, self.write_queue = host_pools(
            self.kv,
            self.config("auto"),
            chunk_tokens=size.chunk_tokens,
            free_bytes=available_bytes(),
            reads=QUEUE_DEPTH,
        )

    def config(self, mode: Mode) -> CakeConfig:
        """Of a server."""
        block_tokens = self.size.block_tokens
        return CakeConfig(
            mode=mode,
            block_tokens=block_tokens,
            min_load_tokens=block_tokens,
            queue_depth=QUEUE_DEPTH,
        )


class LiveScheduler(SchedulerLoop):
    """SGLang's loop on a GPU.

    Attributes:
        forwards: launched so far.
        plan_s: of each of them, the time of the scheduler thread before its launch.
        cpu_s: what the last prompt took of a CPU, by thread.
    """

    def __init__(
        self, io: LiveIo, gpu: Gpu, store: LinkedMemory, mode: Mode, prior: PrefillCost
    ) -> None:
        super().__init__(
            io,
            gpu.kv,
            gpu.allocator,
            store,
            copier=partial(CopyThread, gpu.kv),
            staging=gpu.staging,
            write_queue=gpu.write_queue,
            prior=prior,
            chunk_tokens=gpu.size.chunk_tokens,
            config=gpu.config(mode),
        )
        self._gpu = gpu
        self._began_s = 0.0
        self.forwards: list[Forward] = []
        self.plan_s: list[float] = []
        self.cpu_s: Counter[str] = Counter()

    def one(self, req: LoopRequest) -> PromptRun:
        """Serve one prompt alone, and check its KV. Nothing may wait for the device meanwhile."""
        self.forwards.clear()
        self.plan_s.clear()
        self.store.read_s.clear()
        before_s = _cpu_s()
        with no_waiting(), torch.inference_mode():
            (run,) = self.serve([(0.0, req)])
        self.cpu_s = _cpu_s()
        self.cpu_s.subtract(before_s)
        run.predictions = [(step.predicted_s, step.seconds()) for step in self.forwards]
        return run

    def close(self) -> None:
        self.settle()
        self.loader.close()
        self.copier.close()
        self.io.run(self.store.close(), CLOSE_S)

    def launch(self, work: StepWork, batch: Sequence[PromptRun]) -> Forward:
        now_s = time.monotonic()
        self.plan_s.append(now_s - self._began_s)
        while time.monotonic() < now_s + PLAN_S:
            pass  # SGLang's own work, which holds the GIL
        stream, schedule = self._gpu.forward, torch.cuda.current_stream(self.kv.device)
        stream.wait_stream(schedule)
        with torch.cuda.stream(stream):
            step = Forward(self.step_costs.agreed.work_s(work))
            for run in batch:
                req = run.req
                self._gpu.model.launch(req.origin_input_ids[0], req.prefix_len, req.row)
            step.stop()
        step.follow_on(schedule)  # `_apply_war_barrier` of fa3
        self.forwards.append(step)
        return step

    def wait(self, step: Forward) -> None:
        step.wait()

    def release(self, run: PromptRun) -> None:
        self._gpu.model.check(run.req.origin_input_ids[0], run.req.row)
        self.saving.before_slots_are_freed(lambda record: False)
        self.allocator.free_segment(torch.cat(run.req.row), 0)

    def _iterate(self) -> bool:
        self._began_s = time.monotonic()
        return super()._iterate()


@dataclass(slots=True)
class Arm:
    """Runs of one mode, in one cell."""

    ttft_s: list[float] = field(default_factory=list)
    steps_s: list[list[float]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # of predicted steps, relative
    steps: list[list[tuple[float, float]]] = field(default_factory=list)  # predicted and true, s
    bytes_per_s: list[float] = field(default_factory=list)  # between the first read and the last
    cpu_s: Counter[str] = field(default_factory=Counter)  # of all blocks that were read, by thread
    blocks: int = 0  # that were read

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    def add(self, scheduler: LiveScheduler, run: PromptRun) -> None:
        self.ttft_s.append(run.ttft_s)
        self.steps_s.append([true_s for _, true_s in run.predictions])
        self.steps.append(run.predictions)
        pairs = zip(scheduler.forwards, scheduler.forwards[1:], strict=False)
        self.gaps_s.extend(after.gap_s(before) for before, after in pairs)
        self.plan_s.extend(scheduler.plan_s)
        self.errors.extend(abs(p / max(t, 1e-9) - 1) for p, t in run.predictions)
        reads = scheduler.store.read_s
        self.blocks += len(reads)
        self.cpu_s.update(scheduler.cpu_s)
        if len(reads) > 1:
            block_bytes = scheduler.kv.layout.block_bytes
            self.bytes_per_s.append((len(reads) - 1) * block_bytes / (reads[-1] - reads[0]))


def overlap(size: Size, device: torch.device) -> Iterator[Finding]:
    """Time to first token of computing, loading and both; what the copies cost the forwards."""
    gpu = Gpu(size, device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated(device)
    io = LiveIo()
    blocks: dict[BlockKey, np.ndarray[Any, Any]] = {}
    try:
        prefill = yield from _fill(gpu, io, blocks)
        torch.cuda.reset_peak_memory_stats(device)
        over: list[float] = []
        for link in size.links_gb_per_s:
            over += yield from _cells(gpu, io, blocks, link, prefill)
        yield size.at_most(MOST_OVER_IDEAL, "auto to T*, median", statistics.median(over), "x")
        torch.cuda.synchronize()
        wrong = int(gpu.model.wrong)
        yield Finding("words of KV that are not their token's", wrong, ok=wrong == 0)
        found = _control(gpu, io, blocks, prefill)
        yield Finding("the same with one wrong byte in the store", found, ok=found > 0)
        after_bytes = torch.cuda.memory_allocated(device)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        yield Finding("device memory, all prompts served", _mib(after_bytes - before_bytes), "MiB")
        yield Finding("device memory, peak", _mib(peak_bytes - before_bytes), "MiB")
        yield Finding("free slots", gpu.allocator.available_size(), ok=_all_free(gpu))
    finally:
        io.close()


def _fill(
    gpu: Gpu, io: LiveIo, blocks: dict[BlockKey, "np.ndarray[Any, Any]"]
) -> Generator[Finding, None, PrefillCost]:
    """Compute and store every prompt. The value is the cost of steps that was learned."""
    size = gpu.size
    rate = STORING_GB_PER_S * GB
    store = LinkedMemory(io, gpu.kv.layout.block_bytes, rate, blocks)
    prior = PrefillCost.prior(hidden=4096, on_gpu=True)
    scheduler = LiveScheduler(io, gpu, store, "compute", prior)
    warm = LinkedMemory(io, gpu.kv.layout.block_bytes, rate, {})
    first = LiveScheduler(io, gpu, warm, "compute", prior)
    first.one(prompt(0, max(size.prompts) + size.question_tokens))  # compiles and allocates
    first.close()
    for number, tokens in _prompts(size):
        req = prompt(number, tokens)
        run = scheduler.one(req)
        scheduler.settle()
        keys = scheduler.keys(req.origin_input_ids)
        stored = sum(key in blocks for key in keys)
        yield Finding(
            f"{tokens:,} tokens, nothing stored before", run.ttft_s, "s to the first token"
        )
        yield Finding(f"{tokens:,} tokens, blocks stored", stored, "", stored == len(keys))
    scheduler.close()
    prefill, _ = scheduler.step_costs.learned
    return prefill


def _cells(
    gpu: Gpu,
    io: LiveIo,
    blocks: dict[BlockKey, "np.ndarray[Any, Any]"],
    link: float,
    prefill: PrefillCost,
) -> Generator[Finding, None, list[float]]:
    """All prompts over one link: the modes take turns. The value is T/T* of each."""
    size, layout = gpu.size, gpu.kv.layout
    load = LoadCost(LATENCY_S, layout.block_bytes / (link * GB), depth=QUEUE_DEPTH, error=0.1)
    loops = {}
    for mode in MODES:
        store = LinkedMemory(io, layout.block_bytes, link * GB, dict(blocks))
        loops[mode] = LiveScheduler(io, gpu, store, mode, prefill)
        loops[mode].step_costs.recall(prefill, [load])
    over = []
    for number, tokens in _prompts(size):
        arms = {mode: Arm() for mode in MODES}
        for turn in range(size.repeats + 1):  # the first one is not counted
            for mode, loop in loops.items():
                run = loop.one(prompt(number, tokens))
                loop.settle()
                if turn:
                    arms[mode].add(loop, run)
        over.append((yield from cell(size, link, tokens, arms)))
    for loop in loops.values():
        loop.close()
    return over


def _control(
    gpu: Gpu, io: LiveIo, blocks: dict[BlockKey, "np.ndarray[Any, Any]"], prefill: PrefillCost
) -> int:
    """How many wrong words the check finds if one block is wrong."""
    number, tokens = _prompts(gpu.size)[0]
    store = LinkedMemory(io, gpu.kv.layout.block_bytes, STORING_GB_PER_S * GB, blocks)
    loop = LiveScheduler(io, gpu, store, "load", prefill)
    req = prompt(number, tokens)
    blocks[loop.keys(req.origin_input_ids)[0]][-1] ^= 1
    before = int(gpu.model.wrong)
    loop.one(req)
    loop.close()
    torch.cuda.synchronize()
    return int(gpu.model.wrong) - before


def cell(
    size: Size, link: float, tokens: int, arms: dict[Mode, Arm]
) -> Generator[Finding, None, float]:
    """What the arms of one link (GB/s) and one length come to. The value is T/T*."""
    name = f"{link:g} GB/s, {tokens:,} tokens"
    best = _ideal(size, link, tokens, arms)
    single_s = min(arms["compute"].median_s, arms["load"].median_s)
    for mode in MODES:
        yield Finding(f"{name}: {mode}", arms[mode].median_s, "s")
    auto = arms["auto"]
    yield Finding(f"{name}: T*", best.ttft_s, "s")
    over = auto.median_s / best.ttft_s
    yield Finding(f"{name}: auto to T*", over, "x")
    yield size.at_most(
        MOST_OVER_SINGLE, f"{name}: auto to the better single way", auto.median_s / single_s, "x"
    )
    for mode in ("load", "auto"):
        rate = statistics.median(arms[mode].bytes_per_s or [0.0]) / GB
        yield size.at_least(LEAST_OF_LINK * link, f"{name}: loaded by {mode}", rate, "GB/s")
    for mode in ("compute", "auto"):
        gaps = arms[mode].gaps_s or [0.0]
        yield Finding(f"{name}: gaps of {mode}, median", statistics.median(gaps) * 1e3, "ms")
        yield Finding(f"{name}: gaps of {mode}, longest", max(gaps) * 1e3, "ms")
    # Of threads that all need the interpreter. The main thread's is that of the whole loop.
    loading = arms["load"]
    for thread, cpu_s in loading.cpu_s.most_common():
        a_block_us = cpu_s / max(1, loading.blocks) * 1e6
        if a_block_us >= 1:
            yield Finding(f"{name}: CPU time a block, {thread}", a_block_us, "us")
    plan_ms = max(auto.plan_s) * 1e3
    yield Finding(f"{name}: scheduler thread before a launch", plan_ms, "ms, longest")
    steps = ", ".join(f"{p * 1e3:.1f} {t * 1e3:.1f}" for p, t in auto.steps[-1])
    yield Finding(f"{name}: last steps of auto", steps, "ms, predicted and true")
    error = statistics.median(auto.errors)
    yield size.at_most(MOST_ERROR, f"{name}: error of predicted steps", error, "median")
    return over


def _ideal(size: Size, link: float, tokens: int, arms: dict[Mode, Arm]) -> Ideal:
    """The best split of what the steps of `compute` took and of what the link carries."""
    steps_s = [statistics.median(times) for times in zip(*arms["compute"].steps_s, strict=True)]
    stored = tokens - size.question_tokens
    chunks = [size.chunk_tokens] * (len(steps_s) - 1)
    chunks.append(tokens - sum(chunks))
    computed = list(zip(chunks, steps_s, strict=True))
    last_s = min(times[-1] for times in arms["load"].steps_s)
    return ideal_meet(computed, stored, size.form.token_bytes / (link * GB), last_s, LATENCY_S)


def _prompts(size: Size) -> list[tuple[int, int]]:
    """Number and tokens of each."""
    return [(n + 1, stored + size.question_tokens) for n, stored in enumerate(size.prompts)]


def _cpu_s() -> Counter[str]:
    """CPU time that the threads of each name have taken."""
    taken_s: Counter[str] = Counter()
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            taken_s[thread.name.rpartition("_")[0] or thread.name] += time.clock_gettime(clock)
    return taken_s


def _all_free(gpu: Gpu) -> bool:
    return gpu.allocator.available_size() == gpu.allocator.slots


def _mib(size_bytes: int) -> float:
    return size_bytes / 2**20
