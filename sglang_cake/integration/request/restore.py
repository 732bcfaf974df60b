"""One request on its way through the cache: who owns which block, where landed bytes are."""

import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from sglang_cake.core.keys import KeyChain
from sglang_cake.core.spans import Span
from sglang_cake.loading.cost_model import Costs, LoadCost, StepWork
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import Mode, Progress, Step, device_work, next_step
from sglang_cake.loading.priority import QueueEntry
from sglang_cake.loading.reading import Reading
from sglang_cake.loading.staging import StagedBlock
from sglang_cake.stores.request_info import RequestFacts

# How long a new request may wait for its lookup before it is scheduled without. Lookups take about
# a millisecond; this only bounds what a store that hangs can cost.
LOOKUP_PATIENCE_S = 0.05


@dataclass(slots=True, eq=False)
class Overlap:
    """A last step that begins before the last blocks are there."""

    span: Span  # stored tokens that it finds, or that come while it runs
    readings: dict[int, Reading]  # the blocks that come, all of them in `span`
    patience_s: float  # how long the step may take, before what has not come is computed
    slots: torch.Tensor | None = None  # int64 `[span.tokens]`, once the step is scheduled


@dataclass(slots=True, eq=False)
class Restore:
    """A live request's record. The scheduler thread owns it.

    A block that landed here is in `arrived` until it has landed on every rank, then in `staged`
    (host memory) until slots are found for it, then in `slots` (device) until it joins the tree.
    From then on `DeviceSlots` has its host memory, until the copy to the device is complete.
    """

    rid: str
    ticket: str  # what the loader calls it: unique, while a retracted request's id comes again
    tokens: "array[int]"
    chain: KeyChain
    facts: RequestFacts  # what the store is told
    meet: Meet
    load: LoadCost  # agreed, but for the moment before: what the loads ahead of it cost
    early: bool = True  # whether its last step may begin before the last loads are over
    lossy: bool = False  # whether what the store gives may differ from what was computed
    known: bool = False  # the lookup has answered
    stored: tuple[bool, ...] = ()
    # What this rank has, whether or not the other ranks have it too:
    arrived: dict[int, StagedBlock] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    answer: tuple[bool, ...] | None = None  # of the lookup: what is stored
    # What the ranks have agreed on:
    staged: dict[int, StagedBlock] = field(default_factory=dict)
    slots: dict[int, torch.Tensor] = field(default_factory=dict)  # int64 [block_tokens] each
    overlap: Overlap | None = None  # from before the step is scheduled until it has run
    next_write: int = 0  # blocks before this one were offered to the store, or skipped for good
    # Story, for the log and for meta_info:
    arrived_s: float = field(default_factory=time.monotonic)
    served_since_s: float = field(default_factory=time.monotonic)  # the link works for it first
    landed_s: float = 0.0  # when the last block landed here
    elapsed_s: float = (
        0.0  # agreed: since arrival while unknown, else since the link was last heard
    )
    since_s: float | None = None  # agreed: of the first poll after it came
    begun: bool = False  # agreed: a block has landed
    yielded: bool = False  # it left the device to others, and has not had it since
    times_requeued: int = 0  # went back to the queue between two chunks
    keep: int | None = None  # loads of blocks below this one are not worth starting; None: none is
    planned: bool = False  # its turn came since the last poll
    remaining_s: float = 0.0  # predicted at the last news, or step
    predicted_s: float | None = None  # TTFT, when it was first planned
    matched_tokens: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    overlapped_tokens: int = 0  # of these: came while the last step ran
    wasted_bytes: int = 0
    meet_token: int | None = None
    prefill_s: float | None = None
    shared: dict[str, Any] = field(default_factory=dict)  # what other members computed, if they did

    @property
    def contending(self) -> bool:
        """Whether decisions about this request still depend on what the loader does."""
        return self.prefill_s is None and (not self.known or self.meet.racing)

    @property
    def on_link(self) -> bool:
        """Whether the link has, or may have, something to do for it."""
        return self.contending and (not self.known or self.racing)

    @property
    def racing(self) -> bool:
        """Whether some of its KV has landed and waits for the front, or is being loaded."""
        states = self.meet.view().states
        loads = self.keep is not None and BlockState.WANTED in states
        return loads or BlockState.LANDED in states

    @property
    def to_compute(self) -> StepWork:
        """What the device has still to do for it."""
        return device_work(self.meet.view(), self.keep)

    def held(self, mode: Mode) -> bool:
        """Whether it is not scheduled yet, while its lookup is under way."""
        return not self.known and (mode == "load" or self.elapsed_s < LOOKUP_PATIENCE_S)

    def next_step(self, mode: Mode, chunk_tokens: int, costs: Costs) -> Step:
        """What to do now; its front touches no island."""
        return next_step(
            self.meet.view(),
            mode=mode,
            chunk_tokens=chunk_tokens,
            costs=costs,
            progress=self.progress,
        )

    def idle(self, mode: Mode, chunk_tokens: int, costs: Costs) -> bool:
        """Whether it would leave the device alone, were it its turn."""
        if not self.known or not self.racing:
            return self.held(mode)
        if self.meet.island() is not None:
            return False  # it joins the tree when it is its turn
        return self.next_step(mode, chunk_tokens, costs).wait

    def keep_from(self, block: int | None) -> None:
        """From now on blocks from `block` on are worth loading; None: none is."""
        view = self.meet.view()
        last = view.first + view.states.rfind(BlockState.WANTED)
        if self.keep is None or last < self.keep:
            # Nothing was asked of the link lately: it does not owe a block for that time.
            self.served_since_s, self.elapsed_s = time.monotonic(), 0.0
        self.keep = block

    def served_now(self) -> None:
        """From now on the link works for it first: it owes nothing for the time before."""
        self.served_since_s = time.monotonic()
        self.not_served()

    def not_served(self) -> None:
        """The link works for others first: it does not owe a block for the time of theirs."""
        if self.known:
            self.elapsed_s = 0.0

    def queue_entry(self, chunk_tokens: int, now_s: float) -> QueueEntry:
        """What `priority.order` must know of it, but for whose it is and its priority.

        Args: now_s: as agreed.
        """
        waited_s = 0.0 if self.since_s is None else now_s - self.since_s
        if not self.known:
            return QueueEntry(self.rid, None, waited_s)
        queue_entry = QueueEntry.of(
            self.rid,
            self.meet.view(),
            loads=self.keep is not None,
            remaining_s=lambda: self.remaining_s,
            waited_s=waited_s,
            begun=self.begun,
            chunk_tokens=chunk_tokens,
        )
        return replace(queue_entry, yielded=self.yielded)

    @property
    def to_land_s(self) -> float:
        """Predicted time until all that is to come has landed."""
        wanted = self.meet.view().states.count(BlockState.WANTED)
        return self.load.load_s(wanted, since_s=self.elapsed_s, begun=self.begun)

    @property
    def side(self) -> Literal["compute", "load"] | None:
        """Which side alone got what was stored and not in the tree; None: both, or nothing was."""
        size = self.meet.block_tokens
        usable = self.stored[-(-self.matched_tokens // size) : self.meet.limit // size]
        if not any(usable):
            return None
        if not self.loaded_tokens:
            return "compute"
        return "load" if self.loaded_tokens >= sum(usable) * size else None

    @property
    def progress(self) -> Progress:
        """How its loads come on, as agreed."""
        return Progress(self.elapsed_s, self.begun, self.keep)

    def local_elapsed_s(self) -> float:
        """How long the request has been waiting for the lookup, or for a block, by this clock."""
        heard_s = max(self.served_since_s, self.landed_s) if self.known else self.arrived_s
        return max(0.0, time.monotonic() - heard_s)

    def local_waited_s(self) -> float:
        """Since arrival, by this clock."""
        return time.monotonic() - self.arrived_s

    def story(self) -> dict[str, Any]:
        """How the prompt was got; `meta_info["cake"]` of the response.

        With a lossy codec, what was matched in memory, here or on another member of the group,
        counts as lossy too: it may have been loaded for an earlier prompt, or computed after
        something that was.
        """
        held_tokens = self.matched_tokens + int(self.shared.get("helped_tokens", 0))
        lossy_tokens = self.loaded_tokens + held_tokens if self.lossy else 0
        return {
            "computed_tokens": self.computed_tokens,
            "loaded_tokens": self.loaded_tokens,
            "overlapped_tokens": self.overlapped_tokens,
            "matched_tokens": self.matched_tokens,
            "meet_token": self.meet_token,
            "lossy_tokens": lossy_tokens,
            **self.shared,
        }
