"""Blocks reach the KV pool and come back bit for bit, beside forwards, in slots that are reused."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.measuring import (
    Finding,
    Load,
    Size,
    bytes_of,
    no_waiting,
    pinned,
    random_bytes,
)
from benchmarks.gpu.stand_ins import PoolForm, make_pool
from sglang_cake.core.buffers import Buffer
from sglang_cake.integration.memory.copier import CopyThread
from sglang_cake.integration.memory.kv_pool import Copy, CopyMemory, CopyStreams, CudaKV, DeviceKV

CPU = torch.device("cpu")
MHA = PoolForm(layers=4, heads=8, dim=128, v_dim=128)
FORMS = {
    "bf16": MHA,
    "float32": replace(MHA, dtype=torch.float32, heads=2),
    "fp8_e4m3": replace(MHA, dtype=torch.float8_e4m3fn),
    "fp8_e5m2": replace(MHA, dtype=torch.float8_e5m2),
    "bf16, V narrower than K": PoolForm(layers=3, heads=1, dim=192, v_dim=128),
    "float16, rows of 6 and 10 bytes": PoolForm(3, 1, 3, 5, torch.float16),
    "MLA bf16": PoolForm(layers=4, heads=1, dim=576, v_dim=0),
    "MLA fp8": PoolForm(layers=4, heads=1, dim=576, v_dim=0, dtype=torch.float8_e4m3fn),
    "DSA bf16": PoolForm(layers=4, heads=1, dim=576, v_dim=0, index_page_bytes=64 * 132),
    "MiniMax bf16": PoolForm(layers=4, heads=2, dim=128, v_dim=128, index_dim=128),
    "fp8 with scales in pages": replace(MHA, dtype=torch.float8_e4m3fn, scale_bytes=32),
    "bf16, pages of heads": replace(MHA, is_hnd=True),
    "bf16 in a memory of all pools, and a draft model": replace(MHA, is_shared=True),
}
# With pages of which sizes a form is tried. An index has pages of 64 tokens.
CASES = tuple(
    (name, page)
    for name, form in FORMS.items()
    for page in (1, 64)
    if page == 64 or not form.has_pages
)
SLOTS, BLOCK_TOKENS, BLOCKS = 1024, 64, 6
COPY_LIMIT_S = 10.0  # for copies of a few blocks


def copies(size: Size, device: torch.device) -> Iterator[Finding]:
    """`CudaKV` beside plain indexing on the CPU."""
    forward = torch.cuda.Stream(device)
    load = Load(size, forward, device)
    for name, page in CASES:
        wrong = copies_of(FORMS[name], page, load, device)
        yield Finding(f"{name}, page {page}", wrong or "equal", ok=not wrong)
    wrong = copies_of(MHA, 64, load, device, place_bytes=2**19)
    yield Finding("bf16, in two pieces", wrong or "equal", ok=not wrong)


def copies_of(
    form: PoolForm,
    page: int,
    load: Load | None,
    device: torch.device,
    *,
    place_bytes: int | None = None,
) -> str:
    """What differs between a pool on `device` and one on the CPU after the same copies; nothing if
    all is right.

    Args: place_bytes: of a place for copies; None: as much as a block takes.
    """
    ours, plain = (
        make_pool(form, SLOTS, page_tokens=page, device=where) for where in (device, CPU)
    )
    forward = None if load is None else load.stream
    streams = None
    if place_bytes is not None:
        memory = CopyMemory(place_bytes, in_places=2, out_places=1)
        streams = CopyStreams(device, memory, forward)
    draft = replace(form, layers=1, is_shared=False)
    drafts = [
        [make_pool(draft, SLOTS, page_tokens=page, device=where)] if form.is_shared else []
        for where in (device, CPU)
    ]
    kv = CudaKV(
        ours,
        block_tokens=BLOCK_TOKENS,
        forward_stream=forward,
        streams=streams,
        drafts=drafts[0],
    )
    reference = DeviceKV(plain, block_tokens=BLOCK_TOKENS, drafts=drafts[1])
    _fill(kv, reference)
    buffers = pinned([kv.layout.block_bytes] * 2 * BLOCKS, device)
    into, out = buffers[:BLOCKS], buffers[BLOCKS:]
    for number, buffer in enumerate(into):
        bytes_of(buffer).copy_(random_bytes(kv.layout.block_bytes, seed=1000 + number, device=CPU))
    here, there = (slots.split(BLOCK_TOKENS) for slots in _slots(page, device, seed=1))
    torch.cuda.synchronize()

    with no_waiting(), kv.here():
        if load is not None:
            load.launch(2)
        after = kv.fence()
        loads = [kv.load(b, s, after) for b, s in zip(into, here, strict=True)]
        kv.order_forwards_after(loads)
        if load is not None:
            load.launch(2)
    for buffer, part in zip(into, there, strict=True):
        reference.load(buffer, part, ())
    torch.cuda.synchronize()
    if not all(copy.done() for copy in loads):
        return "a copy is not over after the device has done all"
    if wrong := _unequal_planes(kv, reference):
        return f"after loads, planes {wrong} differ"

    here, there = _slots(page, device, seed=2)
    with no_waiting(), kv.here():
        save = kv.save(here, out, kv.fence())
        kv.order_forwards_after([save])
        if load is not None:
            load.launch(2)
    save.wait()
    expected = [Buffer(memoryview(bytearray(kv.layout.block_bytes))) for _ in out]
    reference.save(there, expected, ())
    torch.cuda.synchronize()
    for number, (one, other) in enumerate(zip(out, expected, strict=True)):
        if bytes(one.view) != bytes(other.view):
            return f"saved block {number} differs"
    wrong = _unequal_planes(kv, reference)
    return f"after saves, planes {wrong} differ" if wrong else ""


def captures(size: Size, device: torch.device) -> Iterator[Finding]:
    """SGLang captures some CUDA graphs while it serves, and copies go on meanwhile."""
    kv = CudaKV(
        make_pool(MHA, SLOTS, device=device), block_tokens=BLOCK_TOKENS, forward_stream=None
    )
    buffers = pinned([kv.layout.block_bytes] * 2 * BLOCKS, device)
    into, out = buffers[:BLOCKS], buffers[BLOCKS:]
    slots = _slots(1, device, seed=1)[0]
    parts = slots.split(BLOCK_TOKENS)
    captured = torch.zeros(1, device=device)
    copier = CopyThread(kv)
    wrong = 0
    for turn in range(size.turns):
        for number, buffer in enumerate(into):
            seed = turn * BLOCKS + number
            bytes_of(buffer).copy_(random_bytes(kv.layout.block_bytes, seed=seed, device=CPU))
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            captured += 1
            loads = [
                copier.save(partial(kv.load, buffer, part, ()))
                for buffer, part in zip(into, parts, strict=True)
            ]
            for load in loads:
                load.ended.result(COPY_LIMIT_S)
            copier.save(partial(kv.save, slots, out, ())).ended.result(COPY_LIMIT_S)
        wrong += sum(bytes(a.view) != bytes(b.view) for a, b in zip(into, out, strict=True))
    copier.check()
    copier.close()
    yield Finding(
        f"loads and saves during {size.turns} captures",
        f"{wrong} blocks differ" if wrong else "equal",
        ok=wrong == 0,
    )


def reused_slots(size: Size, device: torch.device) -> Iterator[Finding]:
    """Few slots that change hands at every turn, while forwards read and write them."""
    forward = torch.cuda.Stream(device)
    for name, stream in (("a forward stream", forward), ("the scheduler's stream", None)):
        load = Load(replace(size, gemm=min(size.gemm, 2048)), forward, device)
        for seed in range(3):
            kv = CudaKV(
                make_pool(MHA, SLOTS, device=device),
                block_tokens=BLOCK_TOKENS,
                forward_stream=stream,
            )
            wrong, checked = reuse(kv, size.turns, load if stream else None, seed=seed)
            yield Finding(
                f"{name}, {size.turns} turns, seed {seed}",
                f"{wrong} of {checked} blocks differ" if wrong else f"{checked} blocks equal",
                ok=wrong == 0 and checked > 0,
            )


def reuse(
    kv: DeviceKV, turns: int, load: Load | None, *, seed: int, ordered: bool = True
) -> tuple[int, int]:
    """Random loads, saves and forwards over four blocks' slots. Each read is compared with what
    was written last.

    Args:
        ordered: forwards wait for copies, as they must.

    Returns: (blocks that differ, blocks that were read).
    """
    choose = random.Random(seed)
    layout, device = kv.layout, kv.device
    parts = (torch.randperm(SLOTS, generator=_generator(seed))[: 4 * BLOCK_TOKENS] + 1).to(device)
    groups = parts.split(BLOCK_TOKENS)
    stream = torch.cuda.current_stream(device) if load is None else load.stream
    new = random_bytes(turns, layout.block_bytes, seed=seed, device=CPU)
    on_device = new.to(device)
    seen = torch.zeros_like(on_device)
    buffers = pinned([layout.block_bytes] * 2 * turns, device)
    for row, buffer in zip(new, buffers, strict=False):
        bytes_of(buffer).copy_(row)
    holds: dict[int, int] = {}  # group: the row of `new` that was written last
    reads: list[tuple[int, int]] = []  # (row of `seen`, row of `new`)
    saves: list[tuple[int, int, Copy]] = []
    torch.cuda.synchronize()

    with no_waiting(), kv.here():
        for turn in range(turns):
            group = choose.randrange(len(groups))
            slots = groups[group]
            what = choose.choice(("load", "compute", "read", "save"))
            if load is not None and choose.random() < 0.5:
                load.launch(4)
            if what == "load":
                copy = kv.load(buffers[turn], slots, kv.fence())
                if ordered:
                    kv.order_forwards_after([copy])
                holds[group] = turn
            elif what == "compute":
                with torch.cuda.stream(stream):
                    for rows, plane in zip(kv.rows, planes_of(on_device[turn], kv), strict=True):
                        rows.index_copy_(0, slots, plane)
                holds[group] = turn
            elif group in holds and what == "read":
                with torch.cuda.stream(stream):
                    for rows, plane in zip(kv.rows, planes_of(seen[turn], kv), strict=True):
                        torch.index_select(rows, 0, slots, out=plane)
                reads.append((turn, holds[group]))
            elif group in holds:
                copy = kv.save(slots, [buffers[turns + turn]], kv.fence())
                if ordered:
                    kv.order_forwards_after([copy])
                saves.append((turn, holds[group], copy))
    for _, _, copy in saves:
        copy.wait()
    torch.cuda.synchronize()
    found = seen.cpu()
    wrong = sum(not torch.equal(found[at], new[row]) for at, row in reads)
    wrong += sum(not torch.equal(bytes_of(buffers[turns + at]), new[row]) for at, row, _ in saves)
    return wrong, len(reads) + len(saves)


def planes_of(block: torch.Tensor, kv: DeviceKV) -> list[torch.Tensor]:
    """The planes of a block (uint8 `[block_bytes]`), in the words of the pool's rows."""
    return [
        block[plane.start : plane.start + plane.rows * plane.row_bytes]
        .view(rows.dtype)
        .view(-1, rows.shape[1])
        for rows, plane in zip(kv.rows, kv.layout.planes, strict=True)
    ]


def _fill(*kvs: DeviceKV) -> None:
    """The same random bytes in all pools."""
    for number, planes in enumerate(zip(*(kv.rows for kv in kvs), strict=True)):
        raw = planes[-1].view(torch.uint8)
        made = random_bytes(*raw.shape, seed=number, device=CPU)
        for plane in planes:
            plane.view(torch.uint8).copy_(made)


def _slots(page: int, device: torch.device, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of BLOCKS blocks in random pages, on the device and on the CPU."""
    pages = torch.randperm(SLOTS // page, generator=_generator(seed)) + 1
    slots = (pages[:, None] * page + torch.arange(page)).flatten()[: BLOCKS * BLOCK_TOKENS]
    return slots.to(device), slots


def _unequal_planes(kv: DeviceKV, reference: DeviceKV) -> list[int]:
    return [
        number
        for number, (one, other) in enumerate(zip(kv.rows, reference.rows, strict=True))
        if not torch.equal(one.cpu(), other)
    ]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
