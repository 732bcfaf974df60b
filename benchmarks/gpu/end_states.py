"""End states reach the device's pools and come back bit for bit, beside forwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

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
from sglang_cake.integration.memory.end_states import (
    EndPart,
    EndSlots,
    EndStates,
    compressed_window,
    recurrent_states,
    window_rows,
)
from sglang_cake.integration.memory.kv_pool import CopyMemory, CopyStreams, CudaKV, Fence

BLOCK_BYTES = 2**14
PAGES, PAGE, RING = 6, 256, 8  # of a compressed window: pages, their tokens, and sums in each


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of end state.

    Attributes:
        rows: all of its memory on the device, uint8 `[rows, bytes]` each.
        taken, given: where an end state is saved from, and another place that it is loaded to.
        taken_rows, given_rows: their rows, int64.
    """

    part: EndPart
    rows: Sequence[torch.Tensor]
    taken: EndSlots
    given: EndSlots
    taken_rows: torch.Tensor
    given_rows: torch.Tensor


def _maker(streams: CopyStreams) -> Callable[..., CudaKV]:
    return partial(CudaKV, forward_stream=streams.forward, streams=streams)


def recurrent(streams: CopyStreams, device: torch.device) -> Case:
    """A state that is larger than a ring, and one of a few bytes."""
    conv = torch.zeros((2, 5, 3, 7), dtype=torch.bfloat16, device=device)
    temporal = torch.zeros((3, 5, 4, 80, 80), device=device)
    buffers = SimpleNamespace(conv=[conv], temporal=temporal, extra_checkpoint_buffers=[])
    inventory = (SimpleNamespace(buffer_info=buffers),)
    pool = SimpleNamespace(get_device_pool_infos=lambda: inventory)
    part = recurrent_states(_maker(streams), pool, BLOCK_BYTES)
    taken, given = (torch.tensor([slot], device=device) for slot in (1, 3))
    slots = EndSlots(state=taken), EndSlots(state=given)
    return Case(part, [_bytes(p) for p in (*conv, *temporal)], *slots, taken, given)


def windows(streams: CopyStreams, device: torch.device) -> Case:
    """A window that does not fill its last block, in rows in any order."""
    form = PoolForm(layers=2, heads=2, dim=24, v_dim=16)
    pool: Any = make_pool(form, 512, device=device)
    part = window_rows(_maker(streams), pool, BLOCK_BYTES, page_tokens=1, window_tokens=96)
    assert EndStates([part]).count * (BLOCK_BYTES // form.token_bytes) > 96
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)).to(device) + 1
    taken, given = order[:96], order[96:192]
    rows = [_bytes(each) for each in (*pool.k_buffer, *pool.v_buffer)]
    return Case(part, rows, EndSlots(taken), EndSlots(given), taken, given)


def compressed(streams: CopyStreams, device: torch.device) -> Case:
    """A page of a window, and the sums in its rings."""
    pages = [torch.zeros((PAGES, PAGE * 584), dtype=torch.uint8, device=device) for _ in range(2)]
    sums = [torch.zeros((PAGES * RING + 4, width), device=device) for width in (2048, 512)]
    rings = [
        SimpleNamespace(
            request_scoped=False, ring_size=RING, kv_score_buffer=SimpleNamespace(kv_score=each)
        )
        for each in sums
    ]
    pool = SimpleNamespace(
        compress_state_pools=[None, rings[0]],
        indexer_compress_state_pools=[rings[1], None],
        swa_kv_pool=SimpleNamespace(kv_buffer=pages),
        swa_page_size=PAGE,
        pd_kv_layout=lambda: "v4",
    )
    part = compressed_window(_maker(streams), pool, BLOCK_BYTES)
    taken, given = (torch.tensor([page], device=device) for page in (2, 5))
    window = [page * PAGE + torch.arange(PAGE, device=device) for page in (taken, given)]
    rows = [*pages, *(_bytes(each[: PAGES * RING].view(PAGES, -1)) for each in sums)]
    return Case(part, rows, EndSlots(window[0]), EndSlots(window[1]), taken, given)


KINDS: dict[str, Callable[[CopyStreams, torch.device], Case]] = {
    "recurrent states": recurrent,
    "windows": windows,
    "compressed windows": compressed,
}


def end_states(size: Size, device: torch.device) -> Iterator[Finding]:
    """Each kind, beside forwards on a stream of their own."""
    load = Load(size, torch.cuda.Stream(device), device)
    for kind in KINDS:
        wrong = moved(kind, load, device)
        yield Finding(kind, wrong or "equal", ok=not wrong)


def moved(
    kind: str,
    load: Load,
    device: torch.device,
    *,
    fenced: bool = True,
    ordered: bool = True,
) -> str:
    """What differs after an end state was saved and loaded into another place, while forwards
    write to both places before and after; nothing if all is right.

    Args: fenced, ordered: False: without the waits of copies for forwards, or of forwards for
        copies.
    """
    forward = load.stream
    streams = CopyStreams(device, CopyMemory.of_blocks(BLOCK_BYTES), forward)
    case = KINDS[kind](streams, device)
    ends, (kv, _) = EndStates([case.part]), case.part.copies[0]
    kv.also_scheduler = True
    number = len(case.taken_rows)
    wanted, old, new = (
        [random_bytes(number, rows.shape[1], seed=n, device=device) for rows in case.rows]
        for n in (1, 2, 3)
    )
    seen = [torch.zeros_like(each) for each in wanted]
    others = torch.ones(len(case.rows[0]), dtype=torch.bool, device=device)
    others[case.taken_rows] = others[case.given_rows] = False
    before = [rows[others].clone() for rows in case.rows]
    buffers = pinned([BLOCK_BYTES] * ends.count, device)
    taken, given = ends.prepare(case.taken), ends.prepare(case.given)
    torch.cuda.synchronize()

    with torch.inference_mode(), no_waiting():
        with torch.cuda.stream(forward):
            _write(case.rows, case.taken_rows, wanted)
        save = ends.save(taken, buffers, _fence(forward, device) if fenced else ())
        if ordered:
            kv.order_forwards_after([save])
        with torch.cuda.stream(forward):
            _write(case.rows, case.taken_rows, new)
    save.wait()
    with torch.inference_mode(), no_waiting():
        load.launch(1)
        with torch.cuda.stream(forward):
            _write(case.rows, case.given_rows, old)
        after = _fence(forward, device) if fenced else ()
        blocks = zip(ends.blocks_of(given), buffers, strict=True)
        loads = [its_kv.load(each, slots, after) for (its_kv, slots), each in blocks]
        if ordered:
            kv.order_forwards_after(loads)
        with torch.cuda.stream(forward):
            for rows, into in zip(case.rows, seen, strict=True):
                torch.index_select(rows, 0, case.given_rows, out=into)
    torch.cuda.synchronize()
    if not all(copy.done() for copy in loads):
        return "a copy is not over after the device has done all"
    for index, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        if not torch.equal(one, other):
            return f"plane {index} differs"
    for index, (rows, kept) in enumerate(zip(case.rows, before, strict=True)):
        if not torch.equal(rows[others], kept):
            return f"plane {index} differs elsewhere"
    return _wrong_tail(kind, case, buffers)


def _wrong_tail(kind: str, case: Case, buffers: Sequence[Buffer]) -> str:
    """What is wrong behind the bytes of an end state, where a buffer has another block's."""
    used = sum(rows.shape[1] for rows in case.rows) * len(case.taken_rows)
    if kind == "windows":  # whole rows in each block, and the last one repeated
        token_bytes = used // len(case.taken_rows)
        start = BLOCK_BYTES // token_bytes * token_bytes
        tails = [bytes_of(each)[start:] for each in buffers]
    else:
        tails = [bytes_of(buffers[-1])[used - (len(buffers) - 1) * BLOCK_BYTES :]]
    return "the end of a block is not zeros" if any(tail.any() for tail in tails) else ""


def _write(
    planes: Sequence[torch.Tensor], index: torch.Tensor, data: Sequence[torch.Tensor]
) -> None:
    for rows, each in zip(planes, data, strict=True):
        rows.index_copy_(0, index, each)


def _fence(forward: torch.cuda.Stream, device: torch.device) -> Fence:
    found = []
    for stream in (torch.cuda.current_stream(device), forward):
        found.append(torch.cuda.Event())
        found[-1].record(stream)
    return tuple(found)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(len(rows), -1).view(torch.uint8)
