"""Writes the loader's events into the prompts' records, and tells the loader which blocks are
wanted."""

import math
import time
from collections.abc import Iterable, Sequence

from sglang_cake.config import CakeConfig
from sglang_cake.core.counters import LATE
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.prompt_record import LoadUpdate, PromptRecord
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.loading.loader import Fetched, Loader, LoaderEvent, LookedUp
from sglang_cake.loading.meet import BlockState

# How long the prompt that may fill staging waits for buffers, on the ranks' shared clock. A buffer
# whose block is being copied comes back in milliseconds.
MOST_IDLE_S = 0.1
# For so long after a late lookup, no prompt waits for its own lookup. Then a prompt waits again,
# which costs at most 1 % of the time. Without that, prompts of one step would never be loaded
# again: they are over before their lookups are answered.
LOOKUP_PAUSE_S = 5.0


class PromptLoads:
    """The only writer of `PromptRecord.local` and `PromptRecord.agreed`. The scheduler thread owns
    it.

    Attributes:
        now_s: the ranks' shared clock at the last vote. The coordinator sets it.
        late_lookup_s: when a lookup was last late for a prompt that waited for it, by that clock;
            -inf: none was, or a lookup has been answered since.
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
        self._records: dict[str, PromptRecord] = {}  # by load id
        self._served: PromptRecord | None = None  # the link works for it before all others
        self._may_use_all_buffers: PromptRecord | None = None  # as in `serve`
        self._went_on_s = 0.0  # when the link was last not idle for that prompt
        self.now_s = 0.0
        self.late_lookup_s = -math.inf

    @property
    def lookups_late(self) -> bool:
        """Whether no prompt waits for its lookup now."""
        return self.now_s - self.late_lookup_s < LOOKUP_PAUSE_S

    # ---- events ----

    def expect(self, record: PromptRecord) -> None:
        """Events of this request are taken from now on."""
        self._records[record.load_id] = record

    def take_events(self) -> None:
        """Take the loader's events since the last call."""
        for event in self._loader.drain():
            self._receive(event)

    def measure(self, records: Sequence[PromptRecord]) -> None:
        """See whether this rank's link is idle for `records`."""
        for record in records:
            local = record.local
            local.link_idle = record.agreed.lookup_done and self._loader.link_idle(record.load_id)
            if local.link_idle:
                local.served_since_s = time.monotonic()

    def polled(self, records: Iterable[PromptRecord]) -> None:
        """Note since when each of these requests, near or far, has been polled."""
        for record in records:
            if record.agreed.first_poll_s is None:
                record.agreed.first_poll_s = self.now_s

    def apply(self, record: PromptRecord, update: LoadUpdate) -> None:
        """Bring the record up to date with what all ranks agreed on."""
        waited = record.awaits_lookup(self._config.mode)
        record.agreed.apply(update, self.now_s)
        if update.stored is not None:
            self.late_lookup_s = -math.inf
            usable = record.meet.usable(update.stored, update.ends)
            view = record.meet.view()
            if self._config.allows_loading(usable[view.first :], view.block_tokens):
                record.meet.found(update.stored, update.ends)
            else:  # too little is stored, on one rank at least, or right of the front
                peer_lacks = update.stored != record.local.stored
                self.stop_loading(record, "peer" if peer_lacks else "overtaken")
                return
        elif waited and not record.awaits_lookup(self._config.mode):
            self.late_lookup_s = self.now_s
        for block in update.fetched:
            host_block = record.local.fetched.pop(block)
            if record.meet.landed(block):
                self._device_slots.stage(record, block, host_block)
            else:
                self._device_slots.discard(record, [block], "overtaken")
                self._device_slots.refuse(record, host_block, "overtaken")
        # This rank has bytes of a lost block only if another rank could not read its part.
        self._device_slots.discard(record, update.lost, "peer")
        for block in update.lost:
            if record.meet.state(block) is BlockState.WANTED:
                if block in record.meet.end_indices:
                    record.agreed.lost_ends.add(record.meet.run.stop - 1)
                self._device_slots.discard(record, record.meet.lost(block), "overtaken")
            if block in record.local.fetched:  # another rank could not fetch its part
                self._device_slots.refuse(record, record.local.fetched.pop(block), "peer")
        self._set_run(record)

    def nothing_stored(self, record: PromptRecord) -> None:
        """Without a store there is no lookup, and no block to load."""
        record.agreed.lookup_done = True
        record.agreed.stored = (False,) * record.key_chain.block_count(len(record.tokens))

    def used_while_read(self, record: PromptRecord, block: int) -> None:
        """An overlapped last step used this block, which has been fetched since."""
        host_block = record.local.fetched.pop(block)
        assert host_block is not None  # no slots were reserved for it
        host_block.release(used=True)

    # ---- requests to the loader ----

    def set_load_from(self, record: PromptRecord, block: int | None) -> None:
        """From now on blocks from `block` on are worth loading; None: no block is."""
        record.set_load_from(block)
        self._loader.set_load_from(record.load_id, block)

    def give_up(self, record: PromptRecord) -> None:
        """A block is overdue, and computing is quicker: the loads end for good. What has landed
        stays."""
        self._report_given_up(record)
        record.set_load_from(None)
        self._loader.set_first_loadable(record.load_id, record.meet.block_count)
        self._device_slots.discard(record, record.meet.give_up(), "overtaken")
        self._device_slots.discard(record, record.reserved, "overtaken")
        self._set_run(record)

    def set_first_loadable(self, record: PromptRecord, block: int) -> None:
        """Blocks below `block` are computed: none of them is read any more."""
        self._loader.set_first_loadable(record.load_id, block)
        computed = [b for b in record.memory.slots if b < block]  # none of them has landed
        self._device_slots.discard(record, computed, "overtaken")
        for each in [b for b in record.local.fetched if b < block]:
            self._device_slots.refuse(record, record.local.fetched.pop(each), "overtaken")
        self._set_run(record)

    def stop_loading(self, record: PromptRecord, reason: str) -> None:
        """No further block is needed. Events are not taken any more, and blocks that did not join
        the tree are given up."""
        self._records.pop(record.load_id, None)
        self._loader.cancel(record.load_id)
        for block in list(record.local.fetched):
            self._device_slots.refuse(record, record.local.fetched.pop(block), reason)
        self._device_slots.discard_all(record, reason)

    def serve(
        self, records: Sequence[PromptRecord], may_use_all_buffers: PromptRecord | None
    ) -> None:
        """The link works for `records` in this order. Args: may_use_all_buffers: the record whose
        blocks may fill the host memory."""
        load_id = None if may_use_all_buffers is None else may_use_all_buffers.load_id
        self._loader.order([record.load_id for record in records], may_use_all_buffers=load_id)
        first = records[0] if records else None
        for record in records:
            if record is not first or record is not self._served:
                record.served_first(record is first)
        self._served = first
        waits = (
            may_use_all_buffers is not None
            and may_use_all_buffers.agreed.link_idle
            and may_use_all_buffers.meet.view().wanted > 0
        )
        if may_use_all_buffers is not self._may_use_all_buffers or not waits:
            self._went_on_s = self.now_s
        self._may_use_all_buffers = may_use_all_buffers

    @property
    def lacks_buffers(self) -> bool:
        """Whether the prompt that may fill the host memory has got no buffer for MOST_IDLE_S."""
        return self.now_s - self._went_on_s > MOST_IDLE_S

    # ---- inside ----

    def _set_run(self, record: PromptRecord) -> None:
        """With end states: tell the loader of another target, and of holes before it."""
        meet = record.meet
        if not meet.end_blocks or not record.agreed.lookup_done:
            return
        self._loader.set_run(record.load_id, meet.run)
        former = [b for b in record.reserved if b not in meet.run]
        self._device_slots.discard(record, former, "overtaken")
        for block in [b for b in record.local.fetched if meet.state(b) is BlockState.GONE]:
            self._device_slots.refuse(record, record.local.fetched.pop(block), "overtaken")

    def _report_given_up(self, record: PromptRecord) -> None:
        if not record.local.given_up:
            record.local.given_up = True
            # The link may serve another prompt first, whose blocks do not come either.
            silence_s = self._loader.tier_silence_s
            silent_s = [silence_s[tier] for tier in set(record.local.tiers)]
            self._reporter.gave_up(record, max([record.local_elapsed_s(), *silent_s]))

    def _receive(self, event: LoaderEvent) -> None:
        record = self._records.get(event.load_id)
        if record is None:
            if isinstance(event, Fetched) and event.host_block is not None:
                event.host_block.release(used=False, reason="ended")
        elif isinstance(event, LookedUp):
            record.local.stored = event.stored
            record.local.ends = event.ends
            record.local.tiers = event.tiers
            self._reporter.write_event(record, "found", stored_blocks=sum(event.stored))
        elif isinstance(event, Fetched):
            record.local.fetched[event.block] = event.host_block
            record.local.last_fetched_s = max(record.local.last_fetched_s, event.at_s)
            self._reporter.write_event(record, "fetch", at_s=event.at_s, block=event.block)
        else:
            if event.reason == LATE:
                self._report_given_up(record)
            record.local.lost.add(event.block)
            self._reporter.write_event(record, "lost", block=event.block, reason=event.reason)
