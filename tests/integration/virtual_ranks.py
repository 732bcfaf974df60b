"""Two tensor-parallel ranks in lockstep on virtual GPUs, each with its own link."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from sglang_cake.integration.memory.copier import SlotCopy
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.testing.scheduler_loop import LoopRequest, PromptRun
from sglang_cake.testing.virtual_gpu import LAUNCH_S, GpuModel, VirtualScheduler
from sglang_cake.testing.virtual_time import virtual_time

PATIENCE_S = 60.0


class Reductions:
    """MIN-reductions of two ranks, of which one runs at a time: they share the virtual clock."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor | None] = [None, None]
        self._go = [threading.Semaphore(0), threading.Semaphore(0)]
        self._threads = ThreadPoolExecutor(1)

    def consensus(self, rank: int) -> RankConsensus:
        return RankConsensus(lambda tensor: self._reduce(rank, tensor))

    def _reduce(self, rank: int, tensor: torch.Tensor) -> None:
        self._tensors[rank] = tensor
        self._go[1 - rank].release()
        assert self._go[rank].acquire(timeout=PATIENCE_S)
        if rank == 0:
            other = self._tensors[1]
            assert other is not None
            assert tensor.shape == other.shape, "ranks reduce different lists"
            torch.minimum(tensor, other, out=tensor)
            other.copy_(tensor)

    def both(self, one: Any, other: Any) -> None:
        """Call both, which reduce at the same points."""

        def second() -> None:
            assert self._go[1].acquire(timeout=PATIENCE_S)
            try:
                other()
            finally:
                self._go[0].release()

        done = self._threads.submit(second)
        one()
        self._go[1].release()
        done.result(PATIENCE_S)
        assert self._go[0].acquire(timeout=PATIENCE_S)


class Lockstep:
    """Two coordinators that decide alike. What one returns, the other one returns too."""

    def __init__(self, one: Any, other: Any, reductions: Reductions) -> None:
        self._one = one
        self._other = other
        self._reductions = reductions
        self._others: dict[str, LoopRequest] = {}  # the other rank's requests

    def __getattr__(self, name: str) -> Any:
        one, other = getattr(self._one, name), getattr(self._other, name)
        if not callable(one):
            return one

        def call(*args: Any, **kwargs: Any) -> Any:
            result = one(*args, **kwargs)
            assert other(*map(self._of_other, args), **kwargs) == result, name
            return result

        return call

    def timed(self) -> Any:
        return self._one.timed()

    def record(self, req: LoopRequest) -> Any:
        return self._one.record(req)

    def arrive(self, req: LoopRequest, matched: Any) -> None:
        twin = replace(req, row=[])
        self._others[req.rid] = twin
        self._one.arrive(req, matched)
        self._other.arrive(twin, lambda tokens, limit: twin.prefix_len)

    def claimed(self, req: LoopRequest, stop: int) -> None:
        self._one.claimed(req, stop)
        self._other.claimed(self._others[req.rid], stop)
        self._others[req.rid].prefix_len = stop

    def poll(self, serving: Sequence[str]) -> None:
        self._reductions.both(lambda: self._one.poll(serving), lambda: self._other.poll(serving))

    def _of_other(self, arg: Any) -> Any:
        return self._others[arg.rid] if isinstance(arg, LoopRequest) else arg


class BothCosts:
    """The `StepCosts` of both ranks: their devices run the same steps."""

    def __init__(self, one: Any, other: Any) -> None:
        self._both = (one, other)

    def __getattr__(self, name: str) -> Any:
        one, other = (getattr(each, name) for each in self._both)
        if not callable(one):
            return one

        def call(*args: Any, **kwargs: Any) -> Any:
            other(*args, **kwargs)
            return one(*args, **kwargs)

        return call


class VirtualRanks(VirtualScheduler):
    """The loop of one rank, which also calls the other one.

    Attributes:
        other: has the other rank's parts.
    """

    def __init__(self, io: Any, model: GpuModel, links: tuple[float, float], **kwargs: Any) -> None:
        reductions = Reductions()
        one, two = links
        super().__init__(
            io, model, link_bytes_per_s=one, consensus=reductions.consensus(0), **kwargs
        )
        self.other = VirtualScheduler(
            io, model, link_bytes_per_s=two, consensus=reductions.consensus(1), **kwargs
        )
        self.coordinator: Any = Lockstep(self.coordinator, self.other.coordinator, reductions)
        self.step_costs: Any = BothCosts(self.step_costs, self.other.step_costs)

    def knows_costs(self) -> None:
        one, other = self.step_costs._both
        costs = replace(self.model.prefill, error=0.02)
        one.recall(costs, [self.store.cost])
        other.recall(costs, [self.other.store.cost])
        self.io.until(self.io.now_s)

    def store_on_both(self, req: LoopRequest) -> None:
        for rank in (self, self.other):
            rank.store.keys |= set(self.keys(req.origin_input_ids))

    def release(self, run: PromptRun) -> None:
        super().release(run)
        self.coordinator._others.pop(run.req.rid)


@contextmanager
def virtual_ranks(
    model: GpuModel, links: tuple[float, float], **kwargs: Any
) -> Iterator[VirtualRanks]:
    """Args: links: bytes per second of each rank's store. kwargs: as `VirtualScheduler`."""
    with virtual_time() as io:

        def wait_settled(copy: SlotCopy) -> None:
            while not copy.launched.done():
                io.until(io.now_s + LAUNCH_S)

        with mock.patch.object(SlotCopy, "wait_settled", wait_settled):
            yield VirtualRanks(io, model, links, **kwargs)
