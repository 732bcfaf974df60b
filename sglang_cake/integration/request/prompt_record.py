"""The record of one live prompt, in parts. Each part but `meet` has one writer.

| part | holds | writer |
|---|---|---|
| `PromptRecord` | what the request brought with it | the coordinator, at arrival |
| `PromptRecord.meet` | the state of each block | the coordinator, `PromptLoads`, the device slots |
| `LocalLoads` | what this rank's loader delivered | `PromptLoads` |
| `AgreedLoads` | what all ranks know | `PromptLoads` |
| `LoadMemory` | host buffers and device slots of its blocks | `DeviceSlots` |
| `QueueState` | how the request is scheduled | `Coordinator` |
| `PromptStats` | numbers that are reported | `Coordinator` |
| `PromptRecord.helped` | what KV-Runahead reports | `Runahead` |

A block on its way from the store to the tree is in these places, one after another. Blocks of an
overlapped last step go from place 1 directly to place 4. Terms: docs/glossary.md.

1. `LocalLoads.fetched`: this rank has its checked bytes in host memory.
2. `LoadMemory.staged`: every rank has its part of the block. The block is `LANDED`.
3. `LoadMemory.slots`: the block has device slots, and is copied there.
4. SGLang's tree.

Blocks of the prompt that is served first have slots reserved before they come. They go from 1 to 3,
and are copied as soon as this rank has their bytes.
"""

import itertools
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sglang_cake.core.keys import KeyChain, Span
from sglang_cake.loading.cost_model import PromptCosts, StepWork
from sglang_cake.loading.loader import HostBlock
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import (
    LoadProgress,
    Mode,
    Outlook,
    StepPlan,
    device_work,
    is_asked,
)
from sglang_cake.stores.base import RequestFacts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.integration.memory.copier import SlotCopy

# How long a new request may wait for its lookup before it is scheduled without it. A lookup takes
# about a millisecond; this bounds the cost of a store that hangs.
LOOKUP_PATIENCE_S = 0.05


class LoadUpdate(NamedTuple):
    """The facts about one prompt that all ranks agreed on in one poll.

    Attributes:
        stored: which full blocks are stored; None: known before, or a rank's lookup is under way.
        ends: after which of them an end state is stored; empty for a model without end states.
        tiers: the number of the slowest tier that each of them will be read from, on any rank.
        fetched: blocks that every rank has fetched, ascending.
        lost: blocks that a rank could not fetch, ascending.
        elapsed_s: the longest wait of the ranks that lack a block and whose link is not idle, see
            `PromptRecord.local_elapsed_s`; 0: there is no such rank.
        link_idle: the links of the ranks that lack a block are idle for the prompt, one at least.
    """

    stored: tuple[bool, ...] | None
    fetched: tuple[int, ...]
    lost: tuple[int, ...]
    elapsed_s: float
    ends: tuple[bool, ...] = ()
    tiers: bytes = b""
    link_idle: bool = False


@dataclass(slots=True, eq=False)
class LocalLoads:
    """The results of this rank's loader, whether or not the other ranks have them. Writer:
    `PromptLoads`. Times are of this rank's `time.monotonic()`.

    Attributes:
        served_since_s: the start of the wait for the lookup, and after its answer of the time in
            which the link serves this prompt first; inf: it serves another one first. Each poll
            sets it anew while the link is idle.
        link_idle: the link reads nothing for this prompt, since it has read all, or there is no
            buffer for a block.
        fetched: blocks that this rank has, and that have not landed on every rank yet: the bytes;
            None: they are in the reserved slots, or on their way there.
        lost: blocks that this rank could not fetch.
        given_up: a read was late, or the loads ended for good since a block was overdue. The log
            says so once.
        stored: the answer of the lookup; None: under way.
        ends: after which full blocks an end state is stored, as far as the lookup says.
        tiers: the tier of each full block, as in `LookedUp`.
        last_fetched_s: when the last block was fetched; -inf: none was.
    """

    served_since_s: float
    link_idle: bool = False
    fetched: dict[int, HostBlock | None] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    given_up: bool = False
    stored: tuple[bool, ...] | None = None
    ends: tuple[bool, ...] = ()
    tiers: bytes = b""
    last_fetched_s: float = -math.inf


@dataclass(slots=True, eq=False)
class AgreedLoads:
    """The facts that all ranks know. They are equal on every rank, so decisions on them are equal.
    Writer: `PromptLoads`, with the updates that the ranks agreed on and the decisions that follow
    from them.

    Attributes:
        lookup_done: the lookups of all ranks have answered.
        stored: which full blocks are stored, once the lookup is done.
        ends: after which of them an end state is stored, as far as the lookup says.
        tier: the tier that all stored blocks are read from; None: they are in several tiers.
        tiers: the tier of each full block, once the lookup is done.
        lost_ends: blocks after which a part of the end state could not be loaded.
        any_landed: a block has landed.
        elapsed_s: time without progress. Before the lookup has answered, it counts from the start
            of the lookup. After that, it counts from the last fetched block, or from the moment
            when the link began to serve this prompt first, whichever is later. 0 while the link
            serves other prompts first, or no buffer is free.
        first_poll_s: the shared clock at the first poll.
        now_s: the shared clock (`Vote`) at the last update.
        load_from: blocks from this one on are worth loading; None: no block is.
        ever_asked: whether any block was ever worth loading, or has landed.
        link_idle: the last update said so (`LoadUpdate`), and nothing was fetched in it.
    """

    lookup_done: bool = False
    stored: tuple[bool, ...] = ()
    ends: tuple[bool, ...] = ()
    tier: int | None = 0
    tiers: bytes = b""
    lost_ends: set[int] = field(default_factory=set)
    any_landed: bool = False
    elapsed_s: float = 0.0
    first_poll_s: float | None = None
    now_s: float = 0.0
    load_from: int | None = None
    ever_asked: bool = False
    link_idle: bool = False

    def apply(self, update: LoadUpdate, now_s: float) -> None:
        """Take in what the ranks agreed on."""
        self.elapsed_s = update.elapsed_s
        self.link_idle = update.link_idle and not update.fetched
        self.now_s = now_s
        self.any_landed |= bool(update.fetched)
        self.ever_asked |= self.any_landed
        if update.stored is not None:
            self.lookup_done = True
            self.stored = update.stored
            self.ends = update.ends
            self.tiers = update.tiers
            distinct = set(itertools.compress(update.tiers, update.stored))
            self.tier = None if len(distinct) > 1 else max(distinct, default=0)


@dataclass(slots=True, eq=False)
class LoadMemory:
    """Host buffers and device slots of a prompt's blocks, until they join the tree. Writer:
    `DeviceSlots`.

    Attributes:
        staged: landed blocks in host memory.
        slots: device slots of blocks that are there, or on their way there, and slots that are
            reserved for blocks that have not landed (`PromptRecord.reserved`).
        wasted_bytes: bytes that were loaded for this prompt and not used.
    """

    staged: dict[int, HostBlock] = field(default_factory=dict)
    slots: "dict[int, SlotCopy]" = field(default_factory=dict)
    wasted_bytes: int = 0


@dataclass(slots=True, eq=False)
class QueueState:
    """How the request is scheduled. Writer: `Coordinator`.

    Attributes:
        yielded: the request left the device to others, and has not computed since.
        prefill_due: as in `QueueEntry`.
        planned: a step of the request was planned since the last poll.
        waits: its last plan was to wait. Set back when it is decided anew whether to load it, and
            when one of its blocks has landed or is lost.
        has_memory: whether it could be admitted, with its prefix locked, in the last step that
            asked; None: none has.
        times_requeued: how often it went back to the queue between two chunks.
        outlook: the predicted rest of its prefill alone; None: to be predicted anew.
        relied_from: as in `LoadProgress`.
        relied_since_s: the shared clock when that step could begin.
    """

    yielded: bool = False
    prefill_due: bool = False
    planned: bool = False
    waits: bool = False
    has_memory: bool | None = None
    times_requeued: int = 0
    outlook: Outlook | None = None
    relied_from: int | None = None
    relied_since_s: float = 0.0


@dataclass(slots=True, eq=False)
class PromptStats:
    """Numbers that are reported. Some decide something: `prefill_s` says whether prefill is over,
    blocks that `matched_tokens` covers are not saved, and a request without computed and loaded
    tokens is before its first step. Writer: `Coordinator`.

    Attributes:
        predicted_s: time to first token, as predicted when the first step was planned.
        prefill_s: from arrival to the last prefill step; None: prefill is not over.
        matched_tokens: tokens that the tree held at the first step.
        rematched_tokens: tokens that it got from other prompts between two steps.
        overlapped_tokens: loaded tokens that arrived while the last step ran.
        meet_token: where the front met the first island.
    """

    predicted_s: float | None = None
    prefill_s: float | None = None
    matched_tokens: int = 0
    rematched_tokens: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    overlapped_tokens: int = 0
    meet_token: int | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PromptRecord:
    """A live request's record. The scheduler thread owns it.

    Attributes:
        req: the request; the same again after a retraction.
        load_id: names this request in the loader, never another one.
        tokens: token ids of the prompt, 'q'.
        facts: about the request, for the store.
        matched_tokens: gives the number of leading tokens that the tree holds now.
        arrival: a number that is larger for a request that arrives later, on each rank.
        arrived_s: `time.monotonic()` of this rank.
        may_overlap: the last step may begin before the last loads are over.
        lossy: KV from the store may differ from computed KV.
        helped: what other members of a KV-Runahead group computed, as fields of the report.
    """

    req: "Req"
    load_id: str
    tokens: "array[int]"
    key_chain: KeyChain
    facts: RequestFacts
    meet: Meet
    local: LocalLoads
    agreed: AgreedLoads
    matched_tokens: Callable[[], int]
    arrival: int
    arrived_s: float
    may_overlap: bool = True
    lossy: bool = False
    memory: LoadMemory = field(default_factory=LoadMemory)
    queue: QueueState = field(default_factory=QueueState)
    stats: PromptStats = field(default_factory=PromptStats)
    helped: dict[str, Any] = field(default_factory=dict)

    # ---- its state ----

    @property
    def rid(self) -> str:
        """SGLang's id of the request, which another one may have as well."""
        return str(self.req.rid)

    @property
    def reserved(self) -> list[int]:
        """Blocks that have slots and have not landed, ascending."""
        landed = BlockState.LANDED
        return sorted(b for b in self.memory.slots if self.meet.state(b) is not landed)

    @property
    def awaits_loader(self) -> bool:
        """Whether decisions about this request still depend on the loader."""
        return self.stats.prefill_s is None and (not self.agreed.lookup_done or self.meet.pending)

    @property
    def uses_link(self) -> bool:
        """Whether the link has, or may have, blocks to bring for this request."""
        return self.awaits_loader and (not self.agreed.lookup_done or self.loading)

    @property
    def loading(self) -> bool:
        """Whether a block has landed and waits for the front, or is being loaded."""
        view = self.meet.view()
        asked = self.agreed.load_from is not None and view.wanted > 0
        return asked or BlockState.LANDED in view.states

    @property
    def rest(self) -> Span:
        """The tokens of the prompt after the front."""
        return Span(self.meet.front, len(self.tokens))

    @property
    def device_work(self) -> StepWork:
        """The work that the device has still to do for this request."""
        return device_work(self.meet.view(), self.agreed.load_from)

    @property
    def progress(self) -> LoadProgress:
        """How its loads come on, as agreed."""
        agreed, queue = self.agreed, self.queue
        relied = queue.relied_from is not None
        return LoadProgress(
            agreed.elapsed_s,
            agreed.any_landed,
            agreed.load_from,
            relied_from=queue.relied_from,
            relied_s=max(0.0, agreed.now_s - queue.relied_since_s) if relied else 0.0,
        )

    def local_elapsed_s(self) -> float:
        """How long the request has waited for its lookup, or for a block, by this rank's clock."""
        since_s = max(self.local.served_since_s, self.local.last_fetched_s)
        return max(0.0, time.monotonic() - since_s)

    def local_waited_s(self) -> float:
        """Time since arrival, by this rank's clock."""
        return time.monotonic() - self.arrived_s

    def looked_up_anew(self, load_id: str, front: int) -> "PromptRecord":
        """The record for another lookup, when the tree has no more than `front` tokens. What had
        landed is not in it.

        Args: load_id: of the new lookup.
        """
        return replace(
            self,
            load_id=load_id,
            meet=self.meet.anew(front),
            local=LocalLoads(served_since_s=time.monotonic()),
            agreed=AgreedLoads(
                first_poll_s=self.agreed.first_poll_s,
                now_s=self.agreed.now_s,
                ever_asked=self.agreed.ever_asked,
            ),
            memory=LoadMemory(wasted_bytes=self.memory.wasted_bytes),
            queue=replace(self.queue, relied_from=None, waits=False),
        )

    # ---- decisions ----

    def awaits_lookup(self, mode: Mode) -> bool:
        """Whether the request is not scheduled yet because its lookup is under way."""
        if self.agreed.lookup_done:
            return False
        return mode == "load" or self.agreed.elapsed_s < LOOKUP_PATIENCE_S

    def planned(self, step: StepPlan, chunk_tokens: int, costs: PromptCosts) -> None:
        """`step` is planned for the request, where it could compute `chunk_tokens`."""
        queue, view = self.queue, self.meet.view()
        edge = min(view.front + chunk_tokens, view.prompt_tokens)
        queue.planned = True
        queue.waits = step.wait
        queue.yielded |= step.wait
        if queue.relied_from is None and step.stop < edge:
            queue.relied_from = view.front
            queue.relied_since_s = self.agreed.now_s + costs.backlog_s

    # ---- what is asked of the link; called by `PromptLoads` ----

    def set_load_from(self, block: int | None) -> None:
        """From now on blocks from `block` on are worth loading; None: no block is."""
        if not is_asked(self.meet.view(), self.agreed.load_from):
            # No block was asked for lately, so none was due in that time.
            self.local.served_since_s = time.monotonic()
            self.agreed.elapsed_s = 0.0
        self.agreed.load_from = block
        self.agreed.ever_asked |= block is not None

    def served_first(self, first: bool) -> None:
        """From now on the link serves this prompt first, or another one: then no block of this one
        is due, however long the step under way takes."""
        if self.agreed.lookup_done:
            self.local.served_since_s = time.monotonic() if first else math.inf
            self.agreed.elapsed_s = 0.0

    # ---- what is reported ----

    @property
    def fallback(self) -> Literal["compute", "load"] | None:
        """The side that alone provided the stored tokens that the tree lacked. None: both did, or
        the tree lacked none."""
        size = self.meet.block_tokens
        first = -(-self.stats.matched_tokens // size)
        usable = self.meet.usable(self.agreed.stored, self.agreed.ends)
        usable = usable[first : self.meet.limit // size]
        if not any(usable):
            return None
        if not self.stats.loaded_tokens:
            return "compute"
        return "load" if self.stats.loaded_tokens >= sum(usable) * size else None

    def report(self) -> dict[str, Any]:
        """Where the prompt's KV came from: `meta_info["cake"]` of the response.

        With a lossy codec, tokens that were matched in memory, here or on another member of the
        group, count as lossy: they may have been loaded for an earlier prompt, or computed after
        loaded ones.
        """
        stats = self.stats
        matched_tokens = stats.matched_tokens + stats.rematched_tokens
        helped_tokens = int(self.helped.get("helped_tokens", 0))
        lossy_tokens = stats.loaded_tokens + matched_tokens + helped_tokens
        return {
            "computed_tokens": stats.computed_tokens,
            "loaded_tokens": stats.loaded_tokens,
            "overlapped_tokens": stats.overlapped_tokens,
            "matched_tokens": matched_tokens,
            "meet_token": stats.meet_token,
            "lossy_tokens": lossy_tokens if self.lossy else 0,
            **self.helped,
        }
