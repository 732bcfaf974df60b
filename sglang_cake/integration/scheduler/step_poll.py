"""Once a step: the loader's news, what all ranks agree on, memory for what has landed."""

from collections.abc import Callable, Mapping, Sequence

from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.request.restore import Restore
from sglang_cake.integration.scheduler.loader_inbox import LoaderInbox
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import StepWork
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.planner import Mode

# Of the requests that wait for their turn, so many are judged anew in a poll: each costs a
# prediction.
JUDGED = 8


class StepPoll:
    """The scheduler thread owns it.

    With several ranks, every rank takes part in the same reductions in the same order, whatever
    fails on one of them in between.

    Args:
        restores: the live requests, in order of arrival.
        end: `(rid)` ends one of them on this rank.
    """

    def __init__(
        self,
        restores: Mapping[str, Restore],
        end: Callable[[str], None],
        loader: Loader,
        device_slots: DeviceSlots,
        inbox: LoaderInbox,
        mode: Mode,
        step_costs: StepCosts,
        consensus: RankConsensus,
        reporter: RequestReporter,
    ) -> None:
        self._restores, self._end = restores, end
        self._loader, self._device_slots, self._loader_inbox = loader, device_slots, inbox
        self._step_costs, self._consensus, self._reporter = step_costs, consensus, reporter
        self._mode: Mode = mode
        self._judged = 0  # how many of those that waited were judged anew so far
        self._served: Restore | None = None  # the link works for it before all others
        self.leaving = False  # cake is off on this rank
        self.left = False  # and every other rank knows

    def run(self, serving: Sequence[str], step_s: float) -> None:
        """Args: as of `Coordinator.poll`; step_s: time that cake took of the last step.

        What fails on this rank is raised at the end. Then this rank has no requests any more, and
        those that it had have ended on every rank.
        """
        failures: list[Exception] = []
        self._attempt(failures, lambda: self._hear(step_s))
        contending = self._agree(serving)
        if contending:  # the reduction comes first in it, and takes place whatever fails
            self._attempt(failures, lambda: self._judge(self._learn(contending), serving))
        self._attempt(failures, lambda: self._serve(serving))
        if contending:
            self._agree(serving)  # nobody schedules what has failed on another rank meanwhile
        if failures:
            raise failures[0]

    def leave(self) -> bool:
        """Cake is off on this rank. Returns whether every rank knows."""
        self.leaving, self.left = True, self._consensus.alone
        return self.left

    def together(self) -> bool:
        """Whether cake is on, on every rank. If it is not, all requests have ended on all."""
        if not self.left and not self._consensus.on(not self.leaving):
            self.leaving = self.left = True
            self._end_all()
        return not self.left

    def _attempt(self, failures: list[Exception], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)
            self._end_all()

    def _hear(self, step_s: float) -> None:
        self._step_costs.polled()
        self._reporter.stepped(
            overhead_s=step_s if self._restores else None,  # an idle poll is no step
            costs=self._step_costs.own,
        )
        self._loader_inbox.take()
        self._device_slots.release_copied()
        self._step_costs.hear([r for r in self._restores.values() if r.contending])

    def _agree(self, serving: Sequence[str]) -> list[Restore]:
        """The contending requests, in the same order on every rank. Requests that are not in the
        same state on every rank end on all."""
        if self._consensus.alone:
            return [r for r in self._restores.values() if r.contending]
        names = sorted(serving)
        views = [self._restores.get(rid) for rid in names]
        for rid, same in zip(names, self._consensus.vote(views), strict=True):
            if not same:
                self._end(rid)
        return [r for r in map(self._restores.get, names) if r is not None and r.contending]

    def _learn(self, contending: Sequence[Restore]) -> list[Restore]:
        """Take the facts. Returns those whose lookup has just answered."""
        facts = self._step_costs.agree(contending, self._consensus)
        for restore, fact in zip(contending, facts, strict=True):
            self._loader_inbox.apply(restore, fact)
            if (fact.stored or fact.landed or fact.lost) and restore.racing:
                restore.remaining_s = self._step_costs.remaining_s(restore)
        return [r for r, fact in zip(contending, facts, strict=True) if fact.stored is not None]

    def _judge(self, found: Sequence[Restore], serving: Sequence[str]) -> None:
        """Whether to load what waits for its turn, given what goes before it: who has just been
        looked up, and some of the others, one after another. Who had a turn was judged then."""
        live = [r for r in map(self._restores.get, serving) if r is not None]
        live = [r for r in live if r.prefill_s is None]
        waiting = [r for r in live if r.known and r.meet.racing and not r.planned]
        start = self._judged % max(1, len(waiting))
        some = {r.rid for r in [*found, *(waiting[start:] + waiting[:start])[:JUDGED]]}
        self._judged += JUDGED
        ahead = StepWork()
        for restore in live:
            if restore.rid in some and restore.meet.racing:
                loads = self._step_costs.worth(restore, self._mode, ahead)
                if restore in found or loads != (restore.keep is not None):
                    late = self._step_costs.late(restore)
                    self._loader_inbox.load(restore, 0 if loads else None, late=late)
                    restore.remaining_s = self._step_costs.remaining_s(restore)
            restore.planned = False
            ahead += restore.to_compute

    def _serve(self, serving: Sequence[str]) -> None:
        served = [r for r in map(self._restores.get, serving) if r is not None and r.on_link]
        self._loader.order([restore.ticket for restore in served])
        for restore in served[1:]:
            restore.not_served()
        if served:
            if served[0] is not self._served:
                served[0].served_now()
            self._device_slots.place(served[0], list(served[0].staged))
        self._served = served[0] if served else None

    def _end_all(self) -> None:
        for rid in list(self._restores):
            self._end(rid)
