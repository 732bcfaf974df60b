"""Between the live prompts and the loader: its events, and what it is asked to do."""

from collections.abc import Sequence

from sglang_cake.core.config import CakeConfig
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.prompt_load import LoadUpdate, PromptLoad
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.loading.loader import Fetched, Found, Loader, LoaderEvent
from sglang_cake.loading.meet import BlockState


class LoaderInbox:
    """The only writer of `PromptLoad.local` and `PromptLoad.agreed`. The scheduler thread owns it.

    Attributes:
        now_s: the ranks' shared clock, as of the last update.
    """

    def __init__(
        self,
        loader: Loader,
        device_slots: DeviceSlots,
        config: CakeConfig,
        reporter: RequestReporter,
    ) -> None:
        self._loader = loader
        self._device_slots = device_slots
        self._config = config
        self._reporter = reporter
        self._loads: dict[str, PromptLoad] = {}  # by load id
        self._served: PromptLoad | None = None  # the link works for it before all others
        self.now_s = 0.0

    # ---- events ----

    def expect(self, load: PromptLoad) -> None:
        """Events of this load are taken from now on."""
        self._loads[load.load_id] = load

    def forget(self, load: PromptLoad) -> None:
        """The request is over: return what it has of the loader's."""
        self._loads.pop(load.load_id, None)  # absent if the arrival failed before `expect`
        self.stop_loading(load, "ended")

    def take(self) -> None:
        """Take the loader's events since the last call."""
        for event in self._loader.drain():
            self._receive(event)

    def measure(self, loads: Sequence[PromptLoad]) -> None:
        """Take this rank's costs of the blocks that `loads` have ahead of them."""
        for load in loads:
            load.local.cost = self._loader.cost_of(load.load_id)

    def apply(self, load: PromptLoad, update: LoadUpdate) -> None:
        """All ranks agree on `update` for this request."""
        self.now_s = update.now_s
        load.agreed.apply(update)
        if update.stored is not None:
            if self._config.allows_loading(update.stored[load.meet.view().first :]):
                load.meet.found(update.stored)
            else:  # too little is stored, on one rank at least
                self.stop_loading(load, "peer")
        for block in update.landed:
            staged = load.local.fetched.pop(block)
            if load.meet.landed(block):
                self._device_slots.stage(load, block, staged)
            else:
                self._device_slots.unreserve(load, [block])
                self._device_slots.refuse(load, staged, "overtaken")
        self._device_slots.unreserve(load, update.lost)
        for block in update.lost:
            if load.meet.state(block) is BlockState.WANTED:
                load.meet.lost(block)
            if block in load.local.fetched:  # another rank could not fetch its part
                self._device_slots.refuse(load, load.local.fetched.pop(block), "peer")

    def used_while_read(self, load: PromptLoad, block: int) -> None:
        """An overlapped last step used this block, which has been fetched since."""
        load.local.fetched.pop(block).release(used=True)

    # ---- requests to the loader ----

    def load_from(self, load: PromptLoad, block: int | None, *, overdue: bool = False) -> None:
        """From now on blocks from `block` on are worth loading; None: no block is. If a block is
        overdue as well, none will be asked for again."""
        load.load_from(block)
        least = load.meet.blocks if block is None else block
        self._device_slots.unreserve(load, [b for b in load.landed.reserved if b < least])
        if overdue and block is None:
            self._loader.fence(load.load_id, load.meet.blocks)
            load.meet.give_up()
        else:
            self._loader.load_from(load.load_id, block)

    def fence(self, load: PromptLoad, fence: int) -> None:
        """Blocks below `fence` are computed: none of them is read any more."""
        self._loader.fence(load.load_id, fence)
        self._device_slots.unreserve(load, [b for b in load.landed.reserved if b < fence])
        for block in [b for b in load.local.fetched if b < fence]:
            self._device_slots.refuse(load, load.local.fetched.pop(block), "overtaken")

    def stop_loading(self, load: PromptLoad, reason: str) -> None:
        """No further block is needed; blocks that did not join the tree are given up."""
        self._loader.end(load.load_id)
        for block in list(load.local.fetched):
            self._device_slots.refuse(load, load.local.fetched.pop(block), reason)
        self._device_slots.discard_all(load, reason)

    def serve(self, loads: Sequence[PromptLoad]) -> None:
        """The link works for `loads` in this order."""
        self._loader.order([load.load_id for load in loads])
        for load in loads[1:]:
            load.link_serves_others_first()
        first = loads[0] if loads else None
        if first is not None and first is not self._served:
            first.link_serves_first()
        self._served = first

    # ---- inside ----

    def _receive(self, event: LoaderEvent) -> None:
        load = self._loads.get(event.load_id)
        if load is None or load.stats.prefill_s is not None:
            if isinstance(event, Fetched):
                event.staged.release(used=False, reason="ended")
        elif isinstance(event, Found):
            load.local.stored = event.stored
            self._reporter.trace(load, "found", stored_blocks=sum(event.stored))
        elif isinstance(event, Fetched):
            load.local.fetched[event.block] = event.staged
            load.local.last_fetched_s = max(load.local.last_fetched_s, event.at_s)
            self._reporter.trace(load, "land", at_s=event.at_s, block=event.block)
        else:
            load.local.failed.add(event.block)
            self._reporter.trace(load, "lost", block=event.block, reason=event.reason)
