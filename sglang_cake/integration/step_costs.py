"""Measures the steps of this process, and keeps the costs that all ranks decide on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.request.restore import Restore
from sglang_cake.integration.scheduler.rank_consensus import Facts, RankConsensus
from sglang_cake.loading.cost_model import (
    Costs,
    LoadCost,
    PrefillCost,
    PrefillFit,
    StepWork,
    work_of,
)
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.planner import Mode, Progress, is_late, look_ahead, worth_loading


class StepCosts:
    """What steps and loads cost here. The scheduler thread owns it.

    Args:
        chunk_tokens: what SGLang computes in one step at most.
        pipelined: steps are launched while the one before runs, so only in a run of steps does the
            time from one to the next say how long a step takes.
    """

    def __init__(
        self, loader: Loader, prior: PrefillCost, *, chunk_tokens: int, pipelined: bool
    ) -> None:
        self._loader = loader
        self.chunk_tokens = chunk_tokens
        self._fit = PrefillFit(prior)
        self._pipelined = pipelined
        self._steady = False  # the step before the one under way was a prefill step as well
        self._began_s = 0.0
        self._work = StepWork()  # of the step being scheduled or under way
        self._launched = StepWork()  # of the one before the last poll
        self._decodes = 0  # requests that decode in steps that prefill
        self.agreed = self._fit.cost
        self.overlap = 0.0  # share of a last step that may run before the loads are over

    @property
    def own(self) -> Costs:
        """As measured by this rank."""
        return Costs(self._fit.cost, self._loader.cost)

    @property
    def measured(self) -> bool:
        """Whether steps were measured here, and not only guessed or remembered."""
        return self._fit.measured

    @property
    def learned(self) -> tuple[PrefillCost, list[LoadCost | None]]:
        """What `recall` takes."""
        return self._fit.cost, self._loader.costs

    def recall(self, prefill: PrefillCost, loads: Sequence[LoadCost | None]) -> None:
        """Start from what an earlier process measured."""
        self._fit.recall(prefill)
        self._loader.recall(loads)
        self.agreed = self._fit.cost

    def hear(self, restores: Sequence[Restore]) -> None:
        """What the loads of `restores` cost on this rank, before the ranks agree."""
        for restore in restores:
            restore.load = self._loader.cost_of(restore.ticket)

    def agree(self, restores: Sequence[Restore], consensus: RankConsensus) -> list[Facts]:
        """The ranks' common facts of `restores`, and from now on their common costs."""
        facts, self.agreed = consensus.reach(restores, self._fit.cost)
        return facts

    def costs(self, restore: Restore) -> Costs:
        """The agreed costs of a request's next part in the step being scheduled."""
        costs = Costs(
            self.agreed,
            restore.load,
            pipelined=self._pipelined,
            overlap=self._overlap_of(restore),
        )
        return costs.beside(self._work)

    def scheduling(self, *, decodes: int) -> None:
        """A step is being scheduled, in which `decodes` requests decode."""
        self._work, self._decodes = StepWork(decodes=decodes), decodes

    def claimed(self, start: int, stop: int) -> None:
        """The step being scheduled prefills `[start, stop)` of a request."""
        if not self._work.tokens:
            self._began_s = time.monotonic()
        self._work += work_of(start, stop)

    def waited(self, took_s: float) -> None:
        """The step under way waited so long for KV that was on its way: others do not."""
        self._began_s += took_s

    def helped(self) -> None:
        """The step under way is computed with others: its time says nothing of ours."""
        self._work = StepWork()

    def polled(self) -> None:
        """The step under way at the last poll took until now."""
        work, self._work = self._work, StepWork()
        self._launched = work
        steady, self._steady = self._steady, work.tokens > 0
        if not work.tokens or (self._pipelined and not steady):
            return
        self._fit.observe(work, time.monotonic() - self._began_s)

    def worth_now(
        self, restore: Restore, config: CakeConfig, ahead: StepWork
    ) -> Callable[[Sequence[bool], LoadCost], bool]:
        """Whether to load at once, decided by the I/O thread when it knows which blocks are stored.

        Args:
            ahead: what the device does before it is the request's turn.
        """
        view, waiting = restore.meet.view(), self._waiting(restore, ahead)

        def worth(stored: Sequence[bool], load: LoadCost) -> bool:
            return config.may_load(stored[view.first :]) and worth_loading(
                view.found(stored),
                mode=config.mode,
                chunk_tokens=self._waiting_chunk_tokens,
                costs=replace(waiting, load=load),
                progress=Progress(),
            )

        return worth

    def worth(self, restore: Restore, mode: Mode, ahead: StepWork) -> bool:
        """The same of a request whose lookup has answered, on what all ranks know."""
        return worth_loading(
            restore.meet.view(),
            mode=mode,
            chunk_tokens=self._waiting_chunk_tokens,
            costs=self._waiting(restore, ahead),
            progress=restore.progress,
        )

    def late(self, restore: Restore) -> bool:
        """Whether the link owes the request a block that should have come by now."""
        return is_late(restore.meet.view(), self.costs(restore), restore.progress)

    def _waiting(self, restore: Restore, ahead: StepWork) -> Costs:
        """The agreed costs of a request that waits for its turn: `ahead` goes before it, and who
        decodes now goes on."""
        costs = Costs(
            self.agreed,
            restore.load,
            pipelined=self._pipelined,
            overlap=self._overlap_of(restore),
        ).beside(StepWork(decodes=self._decodes))
        backlog_s = costs.prefill.queue_s(ahead, self._waiting_chunk_tokens)
        if self._pipelined:  # the step that was launched last has just begun
            launched = self._work if self._work.tokens else self._launched
            backlog_s += self.agreed.queue_s(launched, self.chunk_tokens)
        return replace(costs, backlog_s=backlog_s)

    @property
    def _waiting_chunk_tokens(self) -> int:
        return max(1, self.chunk_tokens - self._decodes)

    def remaining_s(self, restore: Restore) -> float:
        """Predicted rest of its T*."""
        return look_ahead(
            restore.meet.view(),
            chunk_tokens=self.chunk_tokens,
            costs=Costs(self.agreed, restore.load, overlap=self._overlap_of(restore)),
            progress=restore.progress,
        ).best_s

    def _overlap_of(self, restore: Restore) -> float:
        return self.overlap if restore.early else 0.0
