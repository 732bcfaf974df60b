"""The loader's news, and what of it all ranks agree on, in the records of the live requests."""

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.request.restore import Restore
from sglang_cake.integration.scheduler.rank_consensus import Facts
from sglang_cake.loading.load_events import Found, Landed, LoaderEvent
from sglang_cake.loading.loader import Loader
from sglang_cake.loading.meet import BlockState
from sglang_cake.loading.staging import StagedBlock


class LoaderInbox:
    """What was asked of the loader, for each request, and what came of it. Scheduler thread."""

    def __init__(
        self,
        loader: Loader,
        device_slots: DeviceSlots,
        config: CakeConfig,
        reporter: RequestReporter,
    ) -> None:
        self._loader, self._device_slots, self._reporter = loader, device_slots, reporter
        self._config = config
        # By what the loader calls them: one that comes back under its id is another load.
        self._tickets: dict[str, Restore] = {}
        self.now_s = 0.0  # as agreed in the last step that needed it

    def expect(self, restore: Restore) -> None:
        """From now on its news is taken."""
        self._tickets[restore.ticket] = restore

    def forget(self, restore: Restore) -> None:
        """The request is over: give back what it has of the loader's."""
        self._tickets.pop(restore.ticket, None)  # it may have failed before it was expected
        self.stop_loading(restore, "ended")

    def take(self) -> None:
        """Take the loader's news."""
        for event in self._loader.drain():
            self._receive(event)

    def apply(self, restore: Restore, facts: Facts) -> None:
        """All ranks know this of the request."""
        self.now_s, restore.elapsed_s, restore.load = facts.now_s, facts.elapsed_s, facts.cost
        restore.since_s = restore.since_s or facts.now_s
        restore.begun |= bool(facts.landed)
        if facts.stored is not None:
            restore.known, restore.stored = True, facts.stored
            if self._config.may_load(facts.stored[restore.meet.view().first :]):
                restore.meet.found(facts.stored)
            else:  # too little is stored, on one rank at least
                self.stop_loading(restore, "peer")
        for block in facts.landed:
            staged = restore.arrived.pop(block)
            if restore.meet.landed(block):
                restore.staged[block] = staged
            else:
                self._refuse(restore, staged, "overtaken")
        for block in facts.lost:
            if restore.meet.state(block) is BlockState.WANTED:
                restore.meet.lost(block)
            if block in restore.arrived:  # another rank could not get its part
                self._refuse(restore, restore.arrived.pop(block), "peer")

    def load(self, restore: Restore, keep: int | None, *, late: bool = False) -> None:
        """From now on blocks from `keep` on are worth loading; None: none is, and if the link is
        `late`, none will be."""
        restore.keep_from(keep)
        if late and keep is None:
            self._loader.fence(restore.ticket, restore.meet.blocks)
            restore.meet.give_up()
        else:
            self._loader.keep(restore.ticket, keep)

    def fence(self, restore: Restore, fence: int) -> None:
        """Compute has the blocks below `fence`."""
        self._loader.fence(restore.ticket, fence)
        for block in [b for b in restore.arrived if b < fence]:
            self._refuse(restore, restore.arrived.pop(block), "overtaken")

    def stop_loading(self, restore: Restore, reason: str) -> None:
        """Nothing more is needed; what landed and did not join the tree is given up."""
        self._loader.end(restore.ticket)
        for block in list(restore.arrived):
            self._refuse(restore, restore.arrived.pop(block), reason)
        self._device_slots.discard(restore, {*restore.staged, *restore.slots}, reason)

    def _receive(self, event: LoaderEvent) -> None:
        restore = self._tickets.get(event.rid)
        if restore is None or restore.prefill_s is not None:
            if isinstance(event, Landed):
                event.staged.release(used=False, reason="ended")
        elif isinstance(event, Found):
            restore.answer = event.stored
            self._reporter.tell(restore, "found", stored_blocks=sum(event.stored))
        elif isinstance(event, Landed):
            restore.arrived[event.block] = event.staged
            restore.landed_s = max(restore.landed_s, event.at_s)
            self._reporter.tell(restore, "land", at_s=event.at_s, block=event.block)
        else:
            restore.failed.add(event.block)
            self._reporter.tell(restore, "lost", block=event.block, reason=event.reason)

    def _refuse(self, restore: Restore, staged: StagedBlock, reason: str) -> None:
        """Bytes that landed and are of no use to this request."""
        restore.wasted_bytes += self._device_slots.link_bytes
        staged.release(used=False, reason=reason)
