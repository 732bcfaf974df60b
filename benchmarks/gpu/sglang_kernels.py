"""SGLang's kernels that copy KV, beside Cake's copies of the same blocks.

HiCache copies with them. One launch copies rows of all layers between a KV pool and memory that the
device reaches. If that is pinned host memory, a few multiprocessors read or write it over the bus,
where Cake has a DMA and the row kernel.

There are two: one in the libraries of `sgl_kernel`, and one that SGLang compiles on the machine.
The machines of these checks usually have neither.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks.gpu.measuring import (
    GB,
    Finding,
    Load,
    Size,
    bytes_of,
    host_s,
    not_run,
    pinned,
    random_bytes,
)
from benchmarks.gpu.stand_ins import PoolForm, make_pool
from sglang_cake.integration.memory.kv_pool import Copy, CudaKV

MLA = PoolForm(layers=61, heads=1, dim=576, v_dim=0)
PAGE_TOKENS = 64
STAGED = 8  # blocks under way
NAP_S = 20e-6
CAKE = "Cake"
HOST, DEVICE = "host memory", "device memory"
WAYS = ("into the pool", "out of the pool")


class Rows(NamedTuple):
    """Rows of all layers, as SGLang's kernels take them. All tensors are on the device.

    Attributes:
        k, v: uint64 `[layers]`: the address of the first row of each layer. MLA has no `v`.
        index: int64: which rows.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    index: torch.Tensor


Kernel = Callable[[Rows, Rows], object]  # copies rows from the first to the second
# (bytes of a row, tokens of a page, multiprocessors; None: as many as HiCache uses). Raises:
# RuntimeError if the kernel cannot be compiled.
MakeKernel = Callable[[int, int, int | None], Kernel]


def of_libraries() -> MakeKernel:
    """The kernel of `sgl_kernel`. Raises: whatever its import raises."""
    from sgl_kernel import kvcacheio

    if not hasattr(torch.ops.sgl_kernel, "transfer_kv_all_layer"):
        raise ImportError("its libraries are not loaded")

    def make(row_bytes: int, page_tokens: int, quota: int | None) -> Kernel:
        del page_tokens
        options = {} if quota is None else {"block_quota": quota}

        def copy(source: Rows, target: Rows) -> None:
            if source.v is None:
                kvcacheio.transfer_kv_all_layer_mla(
                    src_layers=source.k,
                    dst_layers=target.k,
                    src_indices=source.index,
                    dst_indices=target.index,
                    item_size=row_bytes,
                    num_layers=len(source.k),
                    **options,
                )
            else:
                kvcacheio.transfer_kv_all_layer(
                    src_k_layers=source.k,
                    dst_k_layers=target.k,
                    src_v_layers=source.v,
                    dst_v_layers=target.v,
                    src_indices=source.index,
                    dst_indices=target.index,
                    item_size=row_bytes,
                    num_layers=len(source.k),
                    **options,
                )

        return copy

    return make


def compiled() -> MakeKernel:
    """The kernel that SGLang compiles. Raises: whatever its import raises."""
    from sglang.kernels.ops.kvcache import hicache

    def make(row_bytes: int, page_tokens: int, quota: int | None) -> Kernel:
        can_use = hicache.can_use_hicache_jit_kernel
        if not can_use(element_size=row_bytes, block_quota=quota, page_size=page_tokens):
            raise RuntimeError("SGLang cannot compile its kernel: see what the step has printed")
        options = {"element_size": row_bytes, "block_quota": quota, "page_size": page_tokens}

        def copy(source: Rows, target: Rows) -> None:
            if source.v is None:
                hicache.transfer_hicache_all_layer_mla(
                    ptr_dst=target.k,
                    indices_dst=target.index,
                    ptr_src=source.k,
                    indices_src=source.index,
                    cache_src_stride_bytes=row_bytes,
                    cache_dst_stride_bytes=row_bytes,
                    **options,
                )
            else:
                hicache.transfer_hicache_all_layer(
                    k_ptr_dst=target.k,
                    v_ptr_dst=target.v,
                    indices_dst=target.index,
                    k_ptr_src=source.k,
                    v_ptr_src=source.v,
                    indices_src=source.index,
                    kv_cache_src_stride_bytes=row_bytes,
                    kv_cache_dst_stride_bytes=row_bytes,
                    **options,
                )

        return copy

    return make


KERNELS = {"sgl_kernel": of_libraries, "SGLang's compiled kernel": compiled}


class Bed:
    """A KV pool, and blocks in host memory and on the device, which any kernel copies.

    Rows of a block are those of its planes: each plane has a row for each token, and all rows have
    one width. Blocks take turns, each with slots of its own.
    """

    def __init__(
        self, form: PoolForm, block_tokens: int, page_tokens: int, device: torch.device
    ) -> None:
        from sglang_cake.integration.memory.row_kernel import RowKernel  # imports Triton

        pages = STAGED * block_tokens // page_tokens
        pool = make_pool(form, pages * page_tokens, page_tokens=page_tokens, device=device)
        self.kv = CudaKV(pool, block_tokens=block_tokens, forward_stream=None)
        self.block_bytes = self.kv.layout.block_bytes
        (self.row_bytes,) = {plane.row_bytes for plane in self.kv.layout.planes}
        self.page_tokens = page_tokens
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1
        slots = order[:, None] * page_tokens + torch.arange(page_tokens)
        self.slots = slots.flatten().to(device).split(block_tokens)
        self.buffers = pinned([self.block_bytes] * STAGED, device)
        self.ring = random_bytes(STAGED, self.block_bytes, seed=2, device=device)
        for buffer, block in zip(self.buffers, self.ring, strict=True):
            bytes_of(buffer).copy_(block)
        self._kernel = RowKernel(self.kv.rows, self.kv.layout)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._in_pool = [rows.data_ptr() for rows in self.kv.rows]
        self._device = device

    def rows(self, block: int, place: str) -> tuple[Rows, Rows]:
        """Of a block, and of its slots."""
        memory = bytes_of(self.buffers[block]) if place == HOST else self.ring[block]
        in_block = [memory.data_ptr() + plane.start for plane in self.kv.layout.planes]
        tokens = torch.arange(self.kv.layout.block_tokens, device=self._device)
        return self._rows(in_block, tokens), self._rows(self._in_pool, self.slots[block])

    def _rows(self, addresses: Sequence[int], index: torch.Tensor) -> Rows:
        """Args: addresses: of the first row of each plane, in block order."""
        parts = len(self.kv.layout.groups[0].parts)
        k, *v = (
            torch.tensor(addresses[part::parts], dtype=torch.uint64, device=self._device)
            for part in range(parts)
        )
        return Rows(k, v[0] if v else None, index)

    def copies(self, kernel: Kernel | None, place: str, way: str) -> Callable[[int], Copy]:
        """What launches the copy of a block by number. Args: kernel: None: Cake's."""
        into = way == WAYS[0]
        if kernel is not None:
            pairs = [self.rows(block, place) for block in range(STAGED)]
            if not into:
                pairs = [(target, source) for source, target in pairs]
            return lambda number: self._launched(kernel, *pairs[number % STAGED])

        def from_host(number: int) -> Copy:
            buffer, slots = self.buffers[number % STAGED], self.slots[number % STAGED]
            return self.kv.load(buffer, slots, ()) if into else self.kv.save(slots, [buffer], ())

        blocks, rows = self.ring.split(1), self._kernel

        def on_device(number: int) -> Copy:
            block, slots = blocks[number % STAGED], self.slots[number % STAGED]
            if into:
                return self._launched(rows.scatter, block, slots)
            return self._launched(rows.gather, slots, block)

        return from_host if place == HOST else on_device

    def _launched(self, launch: Callable[..., object], *args: object) -> Copy:
        with torch.cuda.stream(self._stream):
            launch(*args)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(event)

    def wrong(self, kernel: Kernel, place: str) -> str:
        """What a kernel copies otherwise than Cake; nothing if all is right."""
        blocks = [bytes_of(buffer) for buffer in self.buffers] if place == HOST else [*self.ring]
        wanted = [block.clone() for block in blocks]
        for way in WAYS:  # the kernel copies this way, and Cake the other
            load, save = (
                self.copies(kernel if each == way else None, place, each) for each in WAYS
            )
            self._zero(self.kv.rows)
            self._copy_all(load)
            self._zero(blocks)
            self._copy_all(save)
            if not all(map(torch.equal, blocks, wanted)):
                return f"{way}: differs"
        return ""

    def _copy_all(self, launch: Callable[[int], Copy]) -> None:
        with self.kv.here():
            for number in range(STAGED):
                launch(number)
            torch.cuda.synchronize()

    def _zero(self, memory: Sequence[torch.Tensor]) -> None:
        for each in memory:
            each.zero_()
        torch.cuda.synchronize()

    def bytes_per_s(self, launch: Callable[[int], Copy], enough: Callable[[int], bool]) -> float:
        """Of copies until `enough(blocks so far)`, and of one at least."""
        under_way: deque[Copy] = deque()
        blocks = 0
        begun_s = time.perf_counter()
        with self.kv.here():
            while not blocks or not enough(blocks):
                if len(under_way) == STAGED:
                    if not under_way[0].done():
                        time.sleep(NAP_S)
                        continue
                    under_way.popleft()
                under_way.append(launch(blocks))
                blocks += 1
            for copy in under_way:
                copy.wait()
        return blocks * self.block_bytes / (time.perf_counter() - begun_s)


def sglang_kernels(size: Size, device: torch.device) -> Iterator[Finding]:
    """Cake's copies, and those of each kernel of SGLang that this machine has."""
    makers: dict[str, MakeKernel] = {}
    for name, find in KERNELS.items():
        try:
            makers[name] = find()
        except ModuleNotFoundError as error:
            yield not_run(f"{error.name or error} is not installed")
        except Exception as error:  # a library that does not load raises anything
            yield not_run(f"{name} cannot be imported: {_line(error)}")
    if not makers:
        return
    load = Load(size, torch.cuda.Stream(device), device)
    load.launch()
    alone_s = load.seconds()
    page_tokens = min(PAGE_TOKENS, size.block_tokens)
    for form_name, form in (("8B", size.form), ("MLA", MLA)):
        for tokens in (1, page_tokens):
            bed = Bed(form, size.block_tokens, tokens, device)
            for place in (HOST, DEVICE):
                name = f"{form_name}, page {tokens}, {place}"
                yield from beside(bed, name, place, makers, load, alone_s)


def beside(
    bed: Bed,
    name: str,
    place: str,
    makers: Mapping[str, MakeKernel],
    load: Load,
    alone_s: float,
) -> Iterator[Finding]:
    """All kernels with the same blocks. Args: alone_s: of the products of `load`."""
    # HiCache leaves the multiprocessors to forwards. Within the device its kernel may have all of
    # them, as the row kernel has.
    quota = None if place == HOST else multiprocessors(load.device)
    kernels: dict[str, Kernel | None] = {CAKE: None}
    for kernel_name, make in makers.items():
        try:
            kernel = make(bed.row_bytes, bed.page_tokens, quota)
        except RuntimeError as error:
            yield not_run(f"{name}: {kernel_name}: {_line(error)}")
            continue
        wrong = bed.wrong(kernel, place)
        yield Finding(f"{name}: {kernel_name}", wrong or "equal", ok=not wrong)
        kernels[kernel_name] = kernel
    for way in WAYS:
        rates: dict[str, float] = {}
        for kernel_name, of_sglang in kernels.items():
            launch = bed.copies(of_sglang, place, way)
            what = f"{name}, {way}: {kernel_name}"
            bed.bytes_per_s(launch, lambda blocks: blocks >= STAGED)
            rate = bed.bytes_per_s(launch, lambda blocks: blocks >= 4 * STAGED)
            rates[kernel_name] = rate
            yield Finding(f"{what}, device idle", rate / GB, "GB/s")
            if of_sglang is not None:
                yield Finding(f"{what} to Cake", rate / rates[CAKE], "x the rate")
            load.launch()
            rate = bed.bytes_per_s(launch, lambda blocks: load.is_over())
            yield Finding(f"{what}, beside products", rate / GB, "GB/s")
            yield Finding(f"products beside {what}", load.seconds() / alone_s, "x the time alone")
            with bed.kv.here():
                took_s = host_s(launch, repeats=2 * STAGED)
            yield Finding(f"{what}, host time of a block", took_s * 1e6, "us")


def multiprocessors(device: torch.device) -> int:
    """How many the device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _line(error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"
