"""Measures the steps of this process, and keeps the costs that all ranks decide on."""

import time
from collections.abc import Callable, Sequence

from sglang_cake.adapter.agree import Agreement, Facts
from sglang_cake.adapter.restore import Restore
from sglang_cake.config import CakeConfig
from sglang_cake.read.cost import Costs, LoadCost, PrefillCost, PrefillFit, StepWork, work_of
from sglang_cake.read.loader import Loader
from sglang_cake.read.plan import look_ahead, worth_loading


class Pace:
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

    def agree(self, restores: Sequence[Restore], agreement: Agreement) -> list[Facts]:
        """The ranks' common facts of `restores`, and from now on their common costs."""
        facts, self.agreed = agreement.reach(restores, self._fit.cost)
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
        self._work = StepWork(decodes=decodes)

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
        steady, self._steady = self._steady, work.tokens > 0
        if not work.tokens or (self._pipelined and not steady):
            return
        self._fit.observe(work, time.monotonic() - self._began_s)

    def worth(
        self, restore: Restore, config: CakeConfig
    ) -> Callable[[Sequence[bool], LoadCost], bool]:
        """Whether to load, decided by the I/O thread once it knows which blocks are stored."""
        view, prefill, overlap = restore.meet.view(), self.agreed, self._overlap_of(restore)
        least = max(1, config.min_load_tokens // config.block_tokens)

        def worth(stored: Sequence[bool], load: LoadCost) -> bool:
            costs = Costs(prefill, load, overlap=overlap)
            if config.mode == "compute" or sum(stored[view.first :]) < least:
                return False
            return config.mode != "auto" or worth_loading(view, stored, self.chunk_tokens, costs)

        return worth

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
