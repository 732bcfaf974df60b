"""Measures the steps of this process, and holds the costs that all ranks decide on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.request.prompt_record import LoadUpdate, PromptRecord
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.loading.cost_model import (
    LoadCost,
    PrefillCost,
    PrefillFit,
    PromptCosts,
    StepWork,
    work_of,
)
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.planner import LoadProgress, Mode, is_overdue, look_ahead, should_load


class StepCosts:
    """Costs of steps and loads. The scheduler thread owns it.

    Args:
        chunk_tokens: the most that SGLang computes in one step.
        pipelined: steps are launched while the one before runs. Then the time from one step to the
            next is the time of a step only if both prefill.

    Attributes:
        agreed: the ranks' common cost of steps.
        overlap_share: share of a last step that may run before the loads are over.
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
        self._launched = StepWork()  # of the step before the last poll
        self._decodes = 0  # requests that decode in steps that prefill
        self.agreed = self._fit.cost
        self.overlap_share = 0.0

    # ---- measuring ----

    @property
    def own(self) -> PromptCosts:
        """As measured by this rank."""
        return PromptCosts(self._fit.cost, self._loader.cost)

    @property
    def measured(self) -> bool:
        """Whether a step was measured here; otherwise costs are guessed or remembered."""
        return self._fit.measured

    @property
    def learned(self) -> tuple[PrefillCost, list[LoadCost | None]]:
        """The arguments of `recall`."""
        return self._fit.cost, self._loader.costs

    def recall(self, prefill: PrefillCost, loads: Sequence[LoadCost | None]) -> None:
        """Start from what an earlier process measured."""
        self._fit.recall(prefill)
        self._loader.recall(loads)
        self.agreed = self._fit.cost

    def agree(self, records: Sequence[PromptRecord], consensus: RankConsensus) -> list[LoadUpdate]:
        """The ranks' common updates of `records`. Sets `agreed` as well."""
        updates, self.agreed = consensus.agree(records, self._fit.cost)
        return updates

    def scheduling(self, *, decodes: int) -> None:
        """A step is being scheduled, in which `decodes` requests decode."""
        self._work = StepWork(decodes=decodes)
        self._decodes = decodes

    def claimed(self, start: int, stop: int) -> None:
        """The step being scheduled prefills `[start, stop)` of a request."""
        if not self._work.tokens:
            self._began_s = time.monotonic()
        self._work += work_of(start, stop)

    def waited(self, took_s: float) -> None:
        """The step under way waited that long for KV, which other steps do not."""
        self._began_s += took_s

    def do_not_measure(self) -> None:
        """The time of the step under way is not that of an ordinary step."""
        self._work = StepWork()

    def polled(self) -> None:
        """The step under way at the last poll took until now."""
        work = self._work
        self._work = StepWork()
        self._launched = work
        steady = self._steady
        self._steady = work.tokens > 0
        if not work.tokens or (self._pipelined and not steady):
            return
        self._fit.observe(work, time.monotonic() - self._began_s)

    # ---- deciding ----

    def costs(self, record: PromptRecord) -> PromptCosts:
        """The agreed costs of a request's next part in the step being scheduled."""
        costs = PromptCosts(
            self.agreed,
            record.agreed.cost,
            pipelined=self._pipelined,
            overlap_share=self._overlap_share_of(record),
        )
        return costs.beside(self._work)

    def should_load_at_arrival(
        self, record: PromptRecord, config: CakeConfig, ahead: StepWork
    ) -> Callable[[Sequence[bool], LoadCost], bool]:
        """A function that decides whether a new request's blocks are loaded at once. The I/O thread
        calls it with the stored blocks and what loading them costs.

        Args:
            ahead: what the device computes before this request.
        """
        view = record.meet.view()
        waiting = self._waiting(record, ahead)
        chunk_tokens = self._waiting_chunk_tokens

        def decide(stored: Sequence[bool], cost: LoadCost) -> bool:
            return config.allows_loading(stored[view.first :]) and should_load(
                view.found(stored),
                mode=config.mode,
                chunk_tokens=chunk_tokens,
                costs=replace(waiting, load=cost),
                progress=LoadProgress(),
            )

        return decide

    def should_load(self, record: PromptRecord, mode: Mode, ahead: StepWork) -> bool:
        """The same decision for a request whose lookup is done, on what all ranks know."""
        return should_load(
            record.meet.view(),
            mode=mode,
            chunk_tokens=self._waiting_chunk_tokens,
            costs=self._waiting(record, ahead),
            progress=record.progress,
        )

    def is_overdue(self, record: PromptRecord) -> bool:
        """Whether a block of the request should have landed by now."""
        return is_overdue(record.meet.view(), self.costs(record), record.progress)

    def remaining_s(self, record: PromptRecord) -> float:
        """Predicted time to the end of the request's prefill."""
        return look_ahead(
            record.meet.view(),
            chunk_tokens=self.chunk_tokens,
            costs=PromptCosts(
                self.agreed, record.agreed.cost, overlap_share=self._overlap_share_of(record)
            ),
            progress=record.progress,
        ).best_s

    def _waiting(self, record: PromptRecord, ahead: StepWork) -> PromptCosts:
        """The agreed costs of a request in the queue: the device computes `ahead` before it, and
        requests that decode now go on."""
        costs = PromptCosts(
            self.agreed,
            record.agreed.cost,
            pipelined=self._pipelined,
            overlap_share=self._overlap_share_of(record),
        ).beside(StepWork(decodes=self._decodes))
        backlog_s = costs.prefill.queue_s(ahead, self._waiting_chunk_tokens)
        if self._pipelined:  # the step that was launched last has just begun
            launched = self._work if self._work.tokens else self._launched
            backlog_s += self.agreed.queue_s(launched, self.chunk_tokens)
        return replace(costs, backlog_s=backlog_s)

    @property
    def _waiting_chunk_tokens(self) -> int:
        return max(1, self.chunk_tokens - self._decodes)

    def _overlap_share_of(self, record: PromptRecord) -> float:
        return self.overlap_share if record.may_overlap else 0.0
