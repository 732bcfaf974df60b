"""The coordinator holds all live prompts of a scheduler process. It takes the loader's events, asks
`planner` and `meet` for decisions, and carries them out.

SGLang drives it in this order in each scheduling step:

1. `poll`: the loader's events are taken, all ranks agree on them, and landed blocks get slots.
2. SGLang's checkpoint of the chunk computed before (`BlockSaving.checkpointed`).
3. For each request of the step: `attach_islands` attaches the islands that the front touches,
   `plan` says how far to compute, and `claimed` records what the step computes.
"""

import contextlib
import itertools
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from sglang_cake.config import CakeConfig
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest, KeyChain, Span
from sglang_cake.integration import response_stats
from sglang_cake.integration.compat import longest_prefix_tokens
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.end_states import EndSlots
from sglang_cake.integration.request.prompt_record import AgreedLoads, LocalLoads, PromptRecord
from sglang_cake.integration.request.request_keys import RequestKeys
from sglang_cake.integration.request.request_metadata import (
    facts_of,
    may_overlap_last_step,
    most_slots,
    reads_prompt,
    tenant_of,
)
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.prompt_loads import PromptLoads
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import PromptCosts, StepWork, TierLoads, total_work, work_of
from sglang_cake.loading.loader import Loader, LoadRequest
from sglang_cake.loading.meet import Meet, View
from sglang_cake.loading.planner import Outlook, StepPlan, island_start, next_step
from sglang_cake.loading.priority import FcfsSchedule, QueueEntry, TenantTokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey

logger = logging.getLogger("sglang_cake")


# A poll looks only at requests that are near, the first so many, and only these are sorted. Each of
# them costs tens of microseconds a step. SGLang does not match prefixes for its order in a queue of
# more than 128.
NEAR = 128
# Polls decide again whether to load waiting requests: one for each RECONSIDER_S since the poll
# before, at most RECONSIDERED. Each costs one prediction or two, and many steps are short.
RECONSIDERED = 8
RECONSIDER_S = 0.005
# Only the first so many prompts that the link serves shorten steps of others.
PASSED = 8
# Bytes of the digest of the weights that a prefill server sends: SGLang leaves 56 bytes unused.
SENT_WEIGHTS = 24
LOG_EVERY_S = 60.0  # between two lines about prompts that differ
# After an eviction, only the first so many waiting requests are looked for in the tree: each costs
# a comparison of its tokens.
MATCHED = 8
# So many waiting requests, at most, are matched again in a poll once the tree has more of them.
FOLLOWED = 32


@dataclass(slots=True)
class _Step:
    """The step being scheduled.

    Attributes:
        passed: prompts that others may pass in it, with the time until their loads are over.
        last_steps: prompts that have their last step in it, with the time until its end.
        waits: prompts that wait in it for their lookup, or for their loads, with the time for which
            others may have the device: until these are over, or as long as the slack, whichever is
            longer.
        prefills: a prompt computes in it.
        requeued: the prompt that went back to the queue in it.
        waiting_tokens: tokens that are left to compute of the prompts that wait for their loads.
            Without loads, prompts after them would get only the rest of the chunk.
    """

    passed: list[tuple[PromptRecord, float]] = field(default_factory=list)
    last_steps: list[tuple[PromptRecord, float]] = field(default_factory=list)
    waits: list[tuple[PromptRecord, float]] = field(default_factory=list)
    prefills: bool = False
    requeued: PromptRecord | None = None
    waiting_tokens: int = 0


class _WithoutKeys(NamedTuple):
    """A prompt without keys: its number in the order of arrival, the number of its tenant, the
    tokens that are left to compute, and the shared clock when it was first polled."""

    arrival: int
    tenant: int
    rest: Span
    since_s: float | None = None


def _never(usable: Sequence[bool], tiers: TierLoads) -> bool:
    return False


class EndMemory(Protocol):
    """Allocates slots for end states: `CakeRadixCache`."""

    def allocate_end(self, req: "Req", span: Span) -> EndSlots | None: ...
    def free_end(self, req: "Req", end: EndSlots) -> None: ...


class Coordinator:
    """Owned by the scheduler thread.

    With several ranks, every rank takes part in the same reductions in the same order, whatever
    fails on one of them in between.

    Args:
        page_tokens: page size of the tree.
        lossy: KV from the store may differ from computed KV.
        end_blocks: blocks of one end state; 0: the model has none.
        tail_tokens: as in `EndStates`.

    Attributes:
        priority_sign: 1: requests of low priority go first; -1: requests of high priority go
            first; 0: priorities do not count.
        by_prefix: SGLang puts prompts that share a prefix after each other.
        block_tokens: tokens of a whole block.
        keys: the keys of requests. `rebase` and `emptied` change what they name.
        store_detached: no store is in use, so no request is loaded.
        waiting: a request was held back in this step.
        loads_over_in_s: the shortest predicted time until the loads of a waiting request are over.
        tree_evicts: the tree may have evicted KV since the last poll.
        failed: cake failed on this rank since the ranks were last alike.
        spare_slots: slots that are free or can be evicted, without the slots that admitted
            requests may still need, as SGLang counts them.
        new_adapters: with LoRA, the adapter of the request that may be admitted next, unless the
            step has it already.
        held_adapters: the adapter of a request that SGLang has counted and cake then held back.
        overhead_s: time that cake has taken of the step under way, see `timed`.
        off_here: cake is off on this rank.
        off_everywhere: cake is off, and every rank knows.
    """

    def __init__(
        self,
        loader: Loader,
        device_slots: DeviceSlots,
        *,
        config: CakeConfig,
        page_tokens: int,
        step_costs: StepCosts,
        keys: RequestKeys,
        consensus: RankConsensus,
        counters: Counters,
        reporter: RequestReporter,
        end_blocks: int = 0,
        tail_tokens: int = 0,
        lossy: bool = False,
        priority_sign: int = 0,
        by_prefix: bool = False,
    ) -> None:
        self.priority_sign = priority_sign
        self.by_prefix = by_prefix
        self._end_blocks = end_blocks
        self._tail_tokens = tail_tokens
        self._loader = loader
        self._device_slots = device_slots
        self._config = config
        self._lossy = lossy
        self.block_tokens = config.block_tokens_in(page_tokens)
        self._page_tokens = page_tokens
        self.keys = keys
        self._consensus = consensus
        self._counters = counters
        self._reporter = reporter
        self._records: dict[str, PromptRecord] = {}  # in order of arrival, the same on every rank
        # Prompts without keys that wait for prefill or are in it. Their tokens count as work of the
        # device before other prompts.
        self._without_keys: dict[str, _WithoutKeys] = {}
        self._numbers = itertools.count()
        self._tenants = TenantTokens()
        # The shared clock when a request that has lost its record was first looked at.
        self._unrecorded_since_s: WeakKeyDictionary[Req, float] = WeakKeyDictionary()
        # Ids of the last poll. Those of `_kept` may have blocks in host memory.
        self._near: frozenset[str] = frozenset()
        self._far: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()
        # Ids of prompts whose loads may have begun before the ranks decided whether to load.
        self._undecided: dict[str, None] = {}
        # Requests whose KV a prefill server has sent since the last poll, and whether it computed
        # the same prompt, as far as this rank knows.
        self._received: list[tuple[Req, bool]] = []
        # The last keys that joined the tree since the last poll.
        self._inserted: deque[RadixKey] = deque(maxlen=NEAR)
        # Ids of waiting requests that are to be matched again, and were too many in the last poll.
        self._not_followed: set[str] = set()
        self._differing_prompts = 0
        self._logged_s = -math.inf  # when a line about them was logged
        self._fcfs = FcfsSchedule(lambda tokens: step_costs.queue_s(work_of(*tokens)))
        # How many prompts were in prefill, or waited for it, at the last poll; and since then.
        self._prompt_count = 0
        self._arrived_count = 0
        # Before a prompt that arrives now; None: not known yet. Prompts that have left since the
        # last poll still count.
        self._ahead: StepWork | None = None
        self._step = _Step()
        self._reconsidered = 0  # how many waiting requests were decided on again so far
        self._reconsidered_s = -math.inf  # when, on the ranks' shared clock
        self.step_costs = step_costs
        self.prompt_loads = PromptLoads(loader, device_slots, config, reporter)
        self.store_detached = False
        self.off_here = False
        self.off_everywhere = False
        self.waiting = False
        self.loads_over_in_s = math.inf
        self.tree_evicts = False
        self.failed = False
        self.spare_slots = math.inf
        self.new_adapters: set[str | None] = set()  # None: requests without an adapter take a place
        self.held_adapters: set[str | None] = set()
        self.overhead_s = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside counts as time that cake takes of the step under way."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.overhead_s += time.perf_counter() - started_s

    # ---- a request's life ----

    def arrive(self, req: "Req", matched: Callable[[Any, int], int]) -> None:
        """A request joined the queue: look it up and start loading, if keys cover all that its KV
        depends on.

        Args: matched: `(tokens, limit)` gives the number of leading tokens that the tree holds.
        """
        if self.off_everywhere:
            return
        if self.store_detached:
            self._arrive_without_keys(req, 0)
            return
        # Not a copy: SGLang changes this array in sessions only, and those have no keys.
        tokens = req.origin_input_ids
        if req.output_ids:
            tokens = tokens + req.output_ids
        limit = self._limit(req, len(tokens))
        # This match must run on every rank, since it changes the order of eviction in the tree.
        front = matched(tokens, limit)
        if self.off_here:
            return
        if self._is_taken(req):
            self._counters.add("unkeyed_requests", label="id")
            self._arrive_without_keys(req, front)
            return
        self.release(req.rid)  # a retracted request comes back under the same id
        if (key_chain := self.keys.chain(req)) is None:
            self._arrive_without_keys(req, front)
            return
        record = self._new_record(
            req,
            key_chain,
            tokens,
            limit=limit,
            front=front,
            matched=partial(matched, tokens, limit),
            may_overlap=may_overlap_last_step(req) and not key_chain.media,
        )
        self._arrived_count += 1
        ahead = None
        if self._prompt_count + self._arrived_count <= NEAR:
            ahead = self._work_before() if self._ahead is None else self._ahead
            self._ahead = ahead + record.device_work
            self._undecided[record.rid] = None
        self._look_up(record, ahead)
        self._reporter.write_event(
            record, "arrive", tokens=len(tokens), block_tokens=self.block_tokens
        )

    def _arrive_without_keys(self, req: "Req", front: int) -> None:
        """A request without keys joined the queue. The tree has its first `front` tokens, as far as
        known."""
        self._leave_without_keys(req.rid)
        tenant = tenant_of(req)
        self._tenants.arrives(tenant)
        rest = Span(front, len(req.origin_input_ids) + len(req.output_ids))
        self._without_keys[req.rid] = _WithoutKeys(next(self._numbers), tenant, rest)
        self._arrived_count += 1
        if self._ahead is not None:
            self._ahead += work_of(*rest)

    def _leave_without_keys(self, rid: str) -> None:
        if (prompt := self._without_keys.pop(rid, None)) is not None:
            self._tenants.leaves(prompt.tenant)

    def _limit(self, req: "Req", tokens: int) -> int:
        """How many of a request's first `tokens` tokens may be loaded."""
        if self._tail_tokens and reads_prompt(req):
            return 0  # the last layers compute all of its tokens, and need a whole window
        limit = min(longest_prefix_tokens(req, tokens), tokens - self._tail_tokens)
        # A block's key may cover tokens after it, and so may those of SGLang's tree.
        return max(0, limit - self.keys.next_tokens)

    def prompt_digest(self, req: "Req") -> bytes:
        """What a prefill server sends with the KV of a prompt: SENT_WEIGHTS bytes of
        `RequestKeys.weights_digest`, and the 32 of `RequestKeys.prompt_digest`. Zeros stand for
        what is not known, and for KV in the tree that keys do not name."""
        weights = prompt = None
        if not self.off_here and not self.keys.suspended:
            weights = self.keys.weights_digest(req)
        if weights is not None and not self.keys.has_foreign_kv(req):
            record = self.record(req)  # none: the store was detached when it came, or cake failed
            key_chain = record.key_chain if record else self.keys.chain(req, counted=False)
            prompt = self.keys.prompt_digest(req, req.origin_input_ids, key_chain)
        return (weights or bytes(32))[:SENT_WEIGHTS] + (prompt or bytes(32))

    def save_answer(self, req: "Req", prompt_digest: bytes) -> None:
        """A decode server has the KV of a prompt, and is about to generate: have the blocks after
        the prompt stored. The prefill server stores the blocks of the prompt.

        If the weights are the same and the prompt is another one, the KV joins no tree
        (`on_everywhere`). If this server knows other weights, or none yet, the tree has KV from now
        on that no key may name.

        Args: prompt_digest: as the prefill server found it.
        """
        if self.off_here:
            return
        tokens = (req.origin_input_ids + req.output_ids)[:-1]  # the last one has no KV yet
        key_chain = self.keys.chain(req)
        weights = self.keys.weights_digest(req)
        same_prompt = True  # as far as it counts
        if self.keys.has_foreign_kv(req):
            pass  # until the tree is emptied
        elif weights is None or weights[:SENT_WEIGHTS] != prompt_digest[:SENT_WEIGHTS]:
            if key_chain is not None:
                self._counters.add("unnamed_requests")
            self._received_other_kv(req)
        else:
            own = self.keys.prompt_digest(req, tokens, key_chain)
            same_prompt = own == prompt_digest[SENT_WEIGHTS:]
            stores = same_prompt and not self.store_detached and not self._is_taken(req)
            if key_chain is not None and stores:
                self.release(req.rid)
                stored = (True,) * key_chain.block_count(len(tokens))
                record = self._new_record(req, key_chain, tokens, limit=0, stored=stored)
                self._keep(record)
        self._received.append((req, same_prompt))

    def _keep_out(self, req: "Req") -> None:
        """The KV of a request may not be that of its tokens and media: SGLang's tree does not get
        it, so no other request goes on from it, and nothing of it is stored."""
        req.skip_radix_cache_insert = True
        if self.record(req) is not None:
            self.release(req.rid)
        self._counters.add("differing_prompts")
        self._differing_prompts += 1
        if (now_s := time.monotonic()) - self._logged_s >= LOG_EVERY_S:  # clients can cause it
            self._logged_s = now_s
            logger.warning(
                "cake: the prompt of request %s has other tokens or media on the prefill server, "
                "so nothing of it is stored; %d such requests so far",
                req.rid,
                self._differing_prompts,
            )

    def _received_other_kv(self, req: "Req") -> None:
        """Until the tree is emptied, nothing is stored of prompts that could go on from the KV of
        this one: prompts with the same LoRA adapter, since SGLang's tree keeps adapters apart;
        without an adapter, all prompts."""
        if req.lora_id is None:
            self.rebase(self.keys.namespace, suspended=True)
            logger.warning(
                "cake: the KV of a prompt is of another namespace than this server's: prefill "
                "and decode servers must have the same weights and settings, both cake, and must "
                "have logged their namespaces; nothing is stored until /flush_cache"
            )
        elif self.keys.adapter_is_foreign(req.lora_id):
            for record in self.live.values():
                if record.req.lora_id == req.lora_id:
                    self.release(record.rid)
            logger.warning(
                "cake: the KV of a prompt with LoRA adapter %s is not known to be of this server's "
                "weights and files: nothing of this adapter is stored until /flush_cache",
                req.lora_id,
            )

    def release(self, rid: str) -> None:
        """The request is over, aborted or retracted: return all that it holds. Unknown ids are
        fine."""
        self._leave_without_keys(rid)
        if (record := self._records.pop(rid, None)) is not None:
            with contextlib.ExitStack() as steps:  # each of them runs, even if another one raises
                steps.callback(self._reporter.ended, record)
                steps.callback(self._tenants.leaves, record.facts.tenant)
                steps.callback(self.prompt_loads.stop_loading, record, "ended")
                steps.callback(self._device_slots.discard_all, record, "ended")

    def release_all(self) -> None:
        """End every request: the tree is being emptied, or the weights change."""
        for rid in list(self._records):
            self.release(rid)

    def emptied(self) -> None:
        """The tree is being emptied."""
        self.release_all()
        self.keys.emptied()

    def rebase(self, namespace: Digest | None, *, suspended: bool) -> None:
        """From now on KV means something else. Live requests end, and are never stored.

        Args:
            namespace: digest that seeds every key; None: not known yet, so no request is loaded.
            suspended: the tree still holds KV of before. What is computed on top of it belongs to
                no namespace, so nothing is loaded or stored until the tree is emptied.
        """
        self.release_all()
        self.keys.rebase(namespace, suspended=suspended)

    def record(self, req: "Req") -> PromptRecord | None:
        """The record of a live request, if it has one. Clients choose ids, so another live request
        may have the same one: SGLang refuses that only within each of its tokenizer processes."""
        record = self._records.get(req.rid)
        return record if record is not None and record.req is req else None

    @property
    def alone(self) -> bool:
        """Whether no other rank has the same requests."""
        return self._consensus.alone

    @property
    def live(self) -> dict[str, PromptRecord]:
        """All records by the ids of their requests, in order of arrival."""
        return self._records.copy()

    # ---- on and off ----

    def switch_off(self) -> bool:
        """Cake is off on this rank: no request is looked up any more. Returns whether all ranks
        know; if not, `on_everywhere` tells them."""
        self.off_here = True
        self.off_everywhere = self._consensus.alone
        return self.off_everywhere

    def on_everywhere(self) -> bool:
        """Whether cake is on, on every rank. If it is not, all requests have ended on all ranks.

        A prompt that differs from the prefill server's on one rank is kept out of the trees of all:
        ranks must have the same tree.

        Each rank calls it at the start of each poll with prompts to prefill, and of the first poll
        after an unsafe hook.
        """
        if self.off_everywhere:
            return False
        received, self._received = self._received, []
        same = [same_prompt for _, same_prompt in received]
        on, all_same = self._consensus.all_of([not self.off_here, all(same)])
        if not on:
            self.off_here = True
            self.off_everywhere = True
            self.release_all()
        elif not all_same:  # no rank has failed, so the ranks have received the same requests
            for (req, _), is_same in zip(received, self._consensus.all_of(same), strict=True):
                if not is_same:
                    self._keep_out(req)
        return on

    # ---- once a step ----

    def poll(
        self,
        serving: Sequence[str],
        chunked: str | None = None,
        *,
        handshaking: Collection[str] = (),
    ) -> None:
        """Take the loader's events, agree on them, and give slots to landed blocks of the first
        request that has memory.

        An exception on this rank is raised at the end. Then this rank has no requests any more. All
        ranks begin anew in the next vote: they end their requests, and forget what they counted.

        Args:
            serving: ids of the requests that are in prefill or wait for it, in order; every rank
                has the same ids.
            chunked: the id of the request in prefill; None: all wait.
            handshaking: ids of the requests of `serving` that no decode server is ready for.
        """
        went_on = self.waiting or self._step.prefills
        self.waiting = False
        self.loads_over_in_s = math.inf
        served = dict.fromkeys(serving)  # several requests may have one id
        for rid in [rid for rid in self._without_keys if rid not in served]:
            self._leave_without_keys(rid)  # in order of arrival, as on the other ranks
        self._prompt_count = len(served)
        self._arrived_count = 0
        self._ahead = None
        # Alike on all ranks, also if one has failed since the last poll. At most `NEAR` of the
        # requests that others pass stay near.
        passed = [rid for rid in itertools.islice(served, NEAR, None) if rid in self._kept]
        serving = [*itertools.islice(served, NEAR), *passed[:NEAR]]
        self._near = frozenset(serving)
        self._far = frozenset(served) - self._near
        undecided = [rid for rid in self._undecided if rid in self._far]
        left = dict.fromkeys([*passed[NEAR:], *undecided])
        overhead_s = self.overhead_s
        self.overhead_s = 0.0
        failures: list[Exception] = []
        self._attempt(failures, lambda: self._begin_far(left))
        self._attempt(failures, lambda: self._take_events(overhead_s))
        awaiting, changed = self._vote(serving)
        for rid, prompt in self._without_keys.items():
            if prompt.since_s is None:
                self._without_keys[rid] = prompt._replace(since_s=self.prompt_loads.now_s)
        self.prompt_loads.polled(self._records.values())
        # After the vote, whose records are alike: a match must run on all ranks.
        waiting = [rid for rid in serving if rid != chunked]
        longer = self._longer_in_tree(waiting)
        if longer or self.tree_evicts:
            evicted = self._may_be_evicted(waiting) if self.tree_evicts else []
            self.tree_evicts = False
            # All matches come first: what fails behind them fails on one rank, perhaps.
            fronts: dict[str, int] = {}
            matched = {record.rid: record for record in [*longer, *evicted]}.values()
            self._attempt(failures, lambda: fronts.update(self._match(matched)))
            self._attempt(failures, lambda: self._follow_tree(longer, fronts))
            self._attempt(failures, lambda: self._look_up_evicted(evicted, fronts))
            awaiting, changed = self._vote(serving)
        self._undecided = {r.rid: None for r in awaiting if not r.agreed.lookup_done}
        if awaiting:  # the reduction comes first, and takes place whatever fails
            self._attempt(
                failures, lambda: self._reconsider(self._agree(awaiting, changed), serving)
            )
        ready = [rid for rid in serving if rid not in handshaking]
        self._attempt(failures, lambda: self._schedule_fcfs(ready, went_on=went_on))
        self._attempt(failures, lambda: self._serve(serving, handshaking))
        if awaiting:
            if not self._consensus.alone:
                self._attempt(failures, self._end_failed_copies)
            # A request that has failed on another rank is not scheduled.
            awaiting, _ = self._vote(serving)
        self._kept = frozenset(record.rid for record in awaiting if record.agreed.ever_asked)
        if failures:
            raise failures[0]

    def inserted(self, key: "RadixKey") -> None:
        """These tokens are in the tree."""
        self._inserted.append(key)

    def reclaim(self, tokens: int) -> int:
        """SGLang needs memory that landed blocks occupy. Returns the tokens freed."""
        return self._device_slots.reclaim(list(self._records.values()), tokens)

    @property
    def reclaimable_tokens(self) -> int:
        """Slots that are reserved for blocks, or hold landed ones."""
        return self._device_slots.reclaimable_tokens

    @property
    def copying(self) -> bool:
        """Whether blocks that joined the tree are still being copied to the device."""
        return self._device_slots.copying

    # ---- one request of the step ----

    def is_far(self, req: "Req") -> bool:
        """Whether the last poll did not look at this request. Alike on all ranks."""
        return req.rid in self._far

    @property
    def keeps_far_waiting(self) -> bool:
        """Whether a request that is near waits for its loads or its lookup, and is passed by none
        that is far: how far these may go is not known."""
        return bool(self._step.passed or self._step.waits)

    def awaits_lookup(self, req: "Req") -> bool:
        """Whether a waiting request stays in the queue while its lookup is under way; with several
        ranks, also until they have agreed that all of them have its record."""
        record = self.record(req)
        waits = record is not None and self._awaits_lookup(record)
        if record is not None and waits:
            self._add_wait(record, 0.0, work_of(*record.rest))
        waits |= not self._consensus.alone and req.rid not in self._near
        self.waiting |= waits
        return waits

    def memory_checked(self, req: "Req", has_memory: bool) -> None:
        """SGLang has, or lacks, the memory to admit a waiting request whose prefix is locked."""
        self._live_record(req).queue.has_memory = has_memory

    def attach_islands(
        self, req: "Req", attach: Callable[..., None], memory: EndMemory | None = None
    ) -> None:
        """Bring the front up to `req.prefix_len` and attach the islands that it touches.

        Args:
            attach: `CakeRadixCache.attach_running` or `attach_waiting`.
            memory: allocates slots for end states, for a model that has them.
        """
        if (record := self.record(req)) is None:
            return
        response_stats.starts_at_prefix(req)  # before loaded blocks join it
        self._advance(record, req.prefix_len)
        while (span := record.meet.island()) is not None:
            blocks = record.meet.blocks_of(span)
            others = [other for other in self._records.values() if other is not record]
            self._device_slots.place(record, blocks, reclaim_from=others)
            if uncopied := self._device_slots.uncopied(record, blocks):
                # No memory for the whole island: these blocks are computed.
                for block in uncopied:
                    self._device_slots.drop(record, block, "memory")
                continue
            end = None
            with contextlib.ExitStack() as failed:
                if memory is not None and (end_blocks := record.meet.end_indices):
                    end = memory.allocate_end(req, span)
                    if end is not None:
                        failed.callback(memory.free_end, req, end)
                    if end is None or not self._device_slots.load_end(record, end_blocks, end):
                        self._device_slots.drop(record, end_blocks.start, "memory")
                        continue
                self._attached(record, span)
                slots = self._device_slots.take_slots(record, span)
                failed.callback(self._device_slots.free, slots)
                attach(req, slots, span.stop, end, failed.pop_all)
            response_stats.loaded(req, span)
            self._advance(record, req.prefix_len)  # the tree may have matched more by now
        self.prompt_loads.set_first_loadable(record, record.meet.first_loadable)

    def passing_tokens(self, req: "Req", chunk_tokens: int) -> int | None:
        """How many tokens a request computes in the step being scheduled, in whole pages, as
        `planner.passing_tokens` has it. None: there is no limit."""
        record = self.record(req)
        if record is None or self._config.mode != "auto":
            return None
        ends_s = [end_s for each, end_s in self._step.passed if self._passes(req, each)]
        last_ends_s = [
            end_s
            for each, end_s in self._step.last_steps
            # A request that was requeued in this step has lost its place to one of these.
            if record is self._step.requeued or self._passes(req, each)
        ]
        tokens = self.step_costs.passing_tokens(
            Span(req.prefix_len, len(req.origin_input_ids) + len(req.output_ids)),
            chunk_tokens,
            ends_s,
            last_ends_s,
            self._prompt_count - 1,
        )
        return None if tokens is None else tokens - tokens % self._page_tokens

    def keeps_device(self, req: "Req", chunk_tokens: int) -> bool:
        """Whether the prefill of a request takes several steps and would, if nothing interrupts it,
        delay an earlier request that waits in the step being scheduled. The earlier one would need
        the device before that prefill is over, and would end its own prefill later than without
        loads. In other modes than `auto` a wait has no end."""
        if not self._step.waits or self._config.mode != "auto":
            return False
        start, stop = req.prefix_len, len(req.origin_input_ids) + len(req.output_ids)
        if (record := self.record(req)) is not None:
            view = record.meet.view()  # what has landed joins the tree in the step
            start = max(start, view.front + view.attachable * view.block_tokens)
        if stop - start <= chunk_tokens:
            return False
        end_s = self.step_costs.step_end_s + self.step_costs.queue_s(work_of(start, stop))
        end_s += self.step_costs.pause_s * math.ceil((stop - start) / self.step_costs.chunk_tokens)
        return any(
            end_s > latest_s and self._passes(req, each) for each, latest_s in self._step.waits
        )

    def _add_wait(self, record: PromptRecord, over_s: float, work: StepWork) -> None:
        """A prompt, for which the device has still to do `work`, waits for `over_s`."""
        slack_s = self._fcfs.slack_s(record.rid, self.step_costs.queue_s(work))
        self._step.waits.append((record, max(over_s, slack_s)))

    def held_back(self) -> None:
        """A request has no part in the step being scheduled, since it would pass others. They may
        not be planned in this step, so nothing else says how long the scheduler may sleep."""
        self.waiting = True
        ends_s = [end_s for _, end_s in self._step.passed]
        self.loads_over_in_s = min([self.loads_over_in_s, *ends_s])

    def waits_still(self, req: "Req") -> bool:
        """Whether the last plan for a request was to wait for its loads, and only time has passed
        since. If so, the request is not planned again in this step, and counts in
        `waiting_tokens`."""
        record = self.record(req)
        if record is None or not record.queue.waits or not record.loading:
            return False
        if req.prefix_len > record.meet.front:
            return False
        self._step.waiting_tokens += record.rest.tokens
        return True

    def plan(self, req: "Req", chunk_tokens: int) -> StepPlan | None:
        """The next step of a request, after `attach_islands`; None: compute as usual, since no
        block is to come."""
        record = self.record(req)
        if record is None or not record.meet.pending:
            return None
        record.queue.outlook = None
        costs = self.step_costs.costs(record)
        if record.stats.predicted_s is None:
            when_free = self.step_costs.costs_when_free(record)
            best_s = self.step_costs.look_ahead(record, when_free).best_s
            record.stats.predicted_s = record.local_waited_s() + best_s
        step = self._next_step(record, record.meet.view(), chunk_tokens, costs)
        if step.wait:
            self.waiting = True
            over_s = self.step_costs.loads_s(record)
            self._add_wait(record, over_s, record.device_work)
            self.loads_over_in_s = min(self.loads_over_in_s, step.wait_s, over_s)
            record.queue.prefill_due |= self._step.waiting_tokens < chunk_tokens
            self._step.waiting_tokens += record.rest.tokens
        record.planned(step, chunk_tokens, costs)
        if step.ends_loads:
            self.prompt_loads.give_up(record)
        else:
            self.prompt_loads.set_load_from(record, step.load_from)
        return step if record.loading else None

    def claimed(self, req: "Req", stop: int, *, overlapped: bool = False) -> None:
        """The step being scheduled computes `[req.prefix_len, stop)`.

        Args:
            overlapped: it is an overlapped last step; `overlapped_step_ran` follows.
        """
        start = req.prefix_len
        self._step.prefills = True
        if stop >= len(req.origin_input_ids) + len(req.output_ids):
            self._fcfs.prefilled(req.rid)
        self.step_costs.claimed(start, stop)
        if (record := self.record(req)) is None:
            if (prompt := self._without_keys.get(req.rid)) is not None:
                self._tenants.charge(prompt.tenant, stop - start)
                rest = Span(stop, prompt.rest.stop)
                self._without_keys[req.rid] = prompt._replace(rest=rest)
            return
        record.queue.yielded = False
        if record.agreed.ever_asked and stop >= len(record.tokens):
            self._step.last_steps.append((record, self.step_costs.step_end_s))
        self._computed(record, Span(start, stop))
        if not overlapped:
            self._advance(record, req.prefix_len)
            self._claim(record, stop, self.step_costs.step_end_s)

    def overlapped_step_ran(
        self,
        req: "Req",
        stop: int,
        *,
        span: Span,
        used: Collection[int],
        missing: Collection[int],
        tokens: int,
    ) -> None:
        """An overlapped last step has run.

        Args:
            stop: end of what the step computed.
            span: stored tokens before it.
            used: blocks of `span` that arrived while the step ran, and were used.
            missing: blocks of `span` that did not arrive, and were computed.
            tokens: how many tokens of `span` are in `used` blocks.
        """
        record = self._live_record(req)
        record.stats.overlapped_tokens += tokens
        self._counters.add("overlapped_tokens", tokens)
        for block in used:
            record.meet.landed(block)
            self.prompt_loads.used_while_read(record, block)
        for block in missing:
            record.meet.lost(block)
        while (front := record.meet.front) < span.stop:
            if (island := record.meet.island()) is not None:
                self._attached(record, island)
                response_stats.loaded(req, island)
            else:
                computed = Span(front, min(island_start(record.meet.view()), span.stop))
                record.meet.claim(computed.stop)
                self._computed(record, computed)
                response_stats.computed(req, computed.tokens)
        self._claim(record, stop, 0.0)

    # ---- what the order of the queue depends on ----

    @property
    def adaptive(self) -> bool:
        """Whether prompts that are being loaded let others go first. Where SGLang orders prompts by
        their prefixes, that order is kept, except for tenants: another one could evict a prefix
        between two prompts that share it."""
        return self.fair or (self._config.priority == "adaptive" and not self.by_prefix)

    @property
    def fair(self) -> bool:
        """Whether tenants get equal shares (`TenantTokens`)."""
        return self._config.priority == "fair"

    def loading(self, req: "Req") -> bool:
        """Whether a block of this request is being loaded, or has landed and waits."""
        record = self.record(req)
        return record is not None and record.agreed.lookup_done and record.loading

    def ever_asked(self, req: "Req") -> bool:
        """Whether any block of this request was ever worth loading."""
        record = self.record(req)
        return record is not None and record.agreed.ever_asked

    def would_wait(self, req: "Req", chunk_tokens: int, *, whole: bool = False) -> bool:
        """Whether the request would compute nothing if a step were scheduled for it now.

        Args: whole: only a step to the end of the prompt counts.
        """
        if (record := self.record(req)) is None:
            return False
        if self.passing_tokens(req, chunk_tokens) == 0:
            return True
        if not record.agreed.lookup_done or not record.loading:
            return self._awaits_lookup(record)
        view = record.meet.view()
        if (island := record.meet.island()) is not None:  # it joins the tree before that step
            first = island.stop // view.block_tokens
            states = view.states[first - view.first :]
            view = replace(view, front=island.stop, first=first, states=states)
        step = self._next_step(record, view, chunk_tokens, self.step_costs.costs(record))
        return step.wait or (whole and step.stop < len(record.tokens))

    def requeued(self, req: "Req") -> None:
        """The request went back to the queue between two of its chunks."""
        record = self._live_record(req)
        self._step.requeued = record
        record.queue.times_requeued += 1
        record.queue.prefill_due = True
        self._reporter.write_event(record, "yield")

    def rough_place(self, req: "Req") -> tuple[bool, int, int]:
        """By this, lowest first, a long queue is sorted before its first NEAR requests are."""
        tenant_round = 0
        if self.fair:
            record = self.record(req)
            tenant = tenant_of(req) if record is None else record.facts.tenant
            tenant_round = self._tenants.round_of(tenant)
        return not self.prefill_due(req), self._level(req), tenant_round

    def prefill_due(self, req: "Req") -> bool:
        """Whether the prefill of the request is due (`QueueEntry`)."""
        record = self.record(req)
        return record is not None and record.queue.prefill_due

    def keeps_memory(self, req: "Req") -> bool:
        """Whether a request that waits for its loads would have its memory without them, and could
        have it still. In other modes than `auto` a wait has no end."""
        record = self.record(req)
        if record is None or not record.queue.prefill_due or self._config.mode != "auto":
            return False
        return record.loading and record.queue.has_memory is not False

    def lost_place(self, req: "Req") -> bool:
        """Whether the request went back to the queue in the step being scheduled."""
        requeued = self._step.requeued
        return requeued is not None and requeued is self.record(req)

    def queue_entry(self, req: "Req") -> QueueEntry:
        """The facts about a waiting request that `priority.order` needs."""
        record = self.record(req)
        now_s = self.prompt_loads.now_s
        prompt = self._without_keys.get(req.rid)
        if record is not None:
            since_s = now_s if record.agreed.first_poll_s is None else record.agreed.first_poll_s
        elif prompt is not None:
            since_s = now_s if prompt.since_s is None else prompt.since_s
        else:
            since_s = self._unrecorded_since_s.setdefault(req, now_s)
        if record is None or not record.agreed.lookup_done:
            entry = QueueEntry(req.rid, None, now_s - since_s)
        else:
            entry = QueueEntry.of(
                req.rid,
                record.meet.view(),
                loads=record.agreed.load_from is not None,
                stalled=self.step_costs.is_stalled(record),
                outlook=lambda: self._outlook(record),
                mode=self._config.mode,
                waited_s=now_s - since_s,
                ever_asked=record.agreed.ever_asked,
                chunk_tokens=self.step_costs.chunk_tokens,
            )
        compute_s, slack_s = entry.compute_s, math.inf
        if entry.remaining_s is None:
            work = self._work_without_keys(req.rid) if record is None else record.device_work
            compute_s = self.step_costs.queue_s(work) if work.tokens else math.inf
        if entry.waits_for_loads and self._config.mode == "auto":
            slack_s = self._fcfs.slack_s(req.rid, compute_s)
        tenant_round = 0
        if self.fair:
            tenant = record.facts.tenant if record else tenant_of(req)
            tenant_round = self._tenants.round_of(tenant)
        arrived = record or prompt
        return entry._replace(
            compute_s=compute_s,
            slack_s=slack_s,
            tenant_round=tenant_round,
            level=self._level(req),
            yielded=record is not None and record.queue.yielded,
            prefill_due=record is not None and record.queue.prefill_due,
            arrival=0 if arrived is None else arrived.arrival,
        )

    # ---- parts of `poll` ----

    def _rest(self, rid: str) -> Span:
        """The tokens of a prompt that are not in the tree yet."""
        if (record := self._records.get(rid)) is not None:
            return record.rest
        prompt = self._without_keys.get(rid)
        return Span(0, 0) if prompt is None else prompt.rest

    def _attempt(self, failures: list[Exception], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)
            self.failed = True
            self.release_all()

    def _take_events(self, overhead_s: float) -> None:
        self.step_costs.polled()
        self._reporter.stepped(
            overhead_s=overhead_s if self._records else None,  # an idle poll is no step
            costs=self.step_costs.own,
        )
        # In this order: an idle link has read no block that is not among the events.
        self.prompt_loads.measure(self._awaiting())
        self.prompt_loads.take_events()
        self._device_slots.check_copies()

    def _begin_far(self, rids: Iterable[str]) -> None:
        """These requests are far now, and may have blocks in host memory. They give all back, as if
        they had just arrived; without a store they are computed. A rank may do so alone, since
        ranks agree on nothing of requests that are far."""
        for record in [self._records[rid] for rid in rids if rid in self._records]:
            if record.awaits_loader:  # otherwise another request with this id is far
                self.prompt_loads.stop_loading(record, "ended")
                load_id = f"{record.rid}#{next(self._numbers)}"
                anew = record.looked_up_anew(load_id, record.meet.front)
                if self.store_detached:
                    self._keep(anew)
                    self.prompt_loads.nothing_stored(anew)
                else:
                    self._look_up(anew, None)

    def _longer_in_tree(self, rids: Sequence[str]) -> list[PromptRecord]:
        """The first waiting requests whose next block of tokens has joined the tree since the last
        poll, as far as these tokens alone tell, or before it and were not followed then."""
        live = filter(None, map(self._records.get, rids))
        waiting = [record for record in live if record.stats.prefill_s is None]
        longer = [
            record
            for record in waiting
            if record.rid in self._not_followed
            or any(self._goes_on(record, key) for key in self._inserted)
        ]
        self._inserted.clear()
        self._not_followed = {record.rid for record in longer[FOLLOWED:]}
        return longer[:FOLLOWED]

    def _goes_on(self, record: PromptRecord, key: "RadixKey") -> bool:
        """Whether `key` has the next block of tokens of a prompt."""
        req, start = record.req, record.meet.front
        stop = start + self.block_tokens
        if stop > len(key) or (key.extra_key, key.cache_salt) != (req.extra_key, req.cache_salt):
            return False
        return bool(key.token_ids[start:stop] == record.tokens[start:stop])

    def _may_be_evicted(self, rids: Sequence[str]) -> list[PromptRecord]:
        """The first waiting requests, of which the tree may have evicted blocks."""
        if self.store_detached:
            return []
        live = filter(None, map(self._records.get, rids[:MATCHED]))
        return [each for each in live if each.stats.prefill_s is None and each.agreed.lookup_done]

    @staticmethod
    def _match(records: Iterable[PromptRecord]) -> dict[str, int]:
        """By id, the number of leading tokens that the tree has of these requests. A match changes
        the order of eviction."""
        return {record.rid: record.matched_tokens() for record in records}

    def _follow_tree(self, records: Iterable[PromptRecord], fronts: Mapping[str, int]) -> None:
        """Move the fronts of waiting requests to what other requests have brought into the tree."""
        for record in records:
            if self.record(record.req) is record and fronts[record.rid] > record.meet.front:
                self._advance(record, fronts[record.rid])
                self.prompt_loads.set_first_loadable(record, record.meet.first_loadable)
                record.queue.outlook = None
                record.queue.waits = False

    def _look_up_evicted(self, records: Iterable[PromptRecord], fronts: Mapping[str, int]) -> None:
        """Repeat the lookup of a waiting request whenever the tree has evicted more of its blocks
        than have landed."""
        for record in records:
            if self.record(record.req) is not record:
                continue
            front = fronts[record.rid]
            evicted = (record.meet.front - front) // self.block_tokens
            if evicted > record.meet.landed_blocks and self._config.allows_loading(
                [True] * evicted, self.block_tokens
            ):
                self.prompt_loads.stop_loading(record, "ended")
                load_id = f"{record.rid}#{next(self._numbers)}"
                anew = record.looked_up_anew(load_id, front)
                if not record.stats.computed_tokens + record.stats.loaded_tokens:
                    record.stats.matched_tokens = front
                self._look_up(anew, self._work_before(record))
                self._counters.add("repeated_lookups")

    def _awaiting(self) -> list[PromptRecord]:
        near = (record for rid, record in self._records.items() if rid not in self._far)
        return [record for record in near if record.awaits_loader]

    def _vote(self, serving: Sequence[str]) -> tuple[list[PromptRecord], list[bool]]:
        """The requests that await the loader, in the same order on every rank, and which of them
        have changed (`Vote.changed`). A record whose state differs between ranks is dropped on all
        ranks, and does not count as work ahead. If a rank has failed, all begin anew."""
        if self._consensus.alone:
            self.prompt_loads.now_s = time.monotonic()
            awaiting = self._awaiting()
            return awaiting, [True] * len(awaiting)
        rids = sorted(serving)
        records = [self._records.get(rid) for rid in rids]
        vote = self._consensus.vote(records, failed=self.failed, evicts=self.tree_evicts)
        self.tree_evicts = vote.evicts
        self.prompt_loads.now_s = vote.now_s
        for rid, same in zip(rids, vote.alike, strict=True):
            if not same:
                self.release(rid)
        if vote.failed and rids:
            self._begin_anew()
        awaiting, changed = [], []
        for rid, new_facts in zip(rids, vote.changed, strict=True):
            record = self._records.get(rid)
            if record is not None and record.awaits_loader:
                awaiting.append(record)
                changed.append(new_facts)
        return awaiting, changed

    def _begin_anew(self) -> None:
        """A rank has failed: all ranks end their requests, those that decode too, and forget what
        they counted, which that rank may have counted otherwise."""
        self.failed = False
        self.release_all()
        self._without_keys.clear()
        self._tenants = TenantTokens()
        self._unrecorded_since_s.clear()
        self._fcfs.clear()
        self._step = _Step()
        self._reconsidered = 0
        self._reconsidered_s = -math.inf
        self.prompt_loads.late_lookup_s = -math.inf

    def _agree(
        self, awaiting: Sequence[PromptRecord], changed: Sequence[bool]
    ) -> list[PromptRecord]:
        """Apply what the ranks agree on. Returns the requests whose lookup is done since then."""
        costs = self.step_costs
        updates, shared = self._consensus.agree(awaiting, changed, costs.measured_here)
        costs.agree(shared)
        for record, update in zip(awaiting, updates, strict=True):
            lost = record.meet.wants_any(update.lost)
            self.prompt_loads.apply(record, update)
            if (update.stored or update.fetched or lost) and record.loading:
                record.queue.outlook = None
                record.queue.waits = False
        return [
            record
            for record, update in zip(awaiting, updates, strict=True)
            if update.stored is not None
        ]

    def _reconsider(self, found: Sequence[PromptRecord], serving: Sequence[str]) -> None:
        """Decide again whether to load waiting requests, given the work before them. Requests whose
        lookup has just answered are always decided on, the others in rotation. A request that was
        planned in the last step was decided on there.

        Later prompts that are served first only because this one is being loaded count as work
        before it until a block of it is overdue. They do not count after that, since this one would
        go first without loads."""
        live = [record for record in map(self._records.get, serving) if record is not None]
        live = [record for record in live if record.stats.prefill_s is None]
        waiting = [
            record
            for record in live
            if record.agreed.lookup_done and record.meet.pending and not record.queue.planned
        ]
        start = self._reconsidered % max(1, len(waiting))
        rotated = waiting[start:] + waiting[:start]
        now_s = self.prompt_loads.now_s
        count = round(min((now_s - self._reconsidered_s) / RECONSIDER_S, RECONSIDERED)) or 1
        chosen = {record.rid for record in [*found, *rotated[:count]]}
        self._reconsidered += count
        self._reconsidered_s = now_s
        for each in live:
            each.queue.planned = False
        before: list[tuple[PromptRecord | None, StepWork]] = []
        for rid in serving:
            if not chosen:
                break
            record = self._records.get(rid)
            if record is None or record.stats.prefill_s is not None:
                before.append((None, self._work_without_keys(rid)))
                continue
            if rid in chosen and record.meet.pending:
                record.queue.waits = False
                overdue = self.step_costs.is_overdue(record)
                ahead = total_work(
                    work
                    for other, work in before
                    if not (overdue and other is not None and self._passes(other.req, record))
                )
                loads = self.step_costs.should_load(record, self._config.mode, ahead)
                # Without a planned step, perhaps for want of memory, the whole prompt is loaded.
                load_from = 0 if loads else None
                if record in found or load_from != record.agreed.load_from:
                    if overdue and not loads:
                        self.prompt_loads.give_up(record)
                    else:
                        self.prompt_loads.set_load_from(record, load_from)
                    record.queue.outlook = None
                elif overdue:
                    record.queue.outlook = None  # it changes while nothing arrives
            chosen.discard(rid)
            before.append((record, record.device_work))

    def _passes(self, other: "Req", record: PromptRecord) -> bool:
        """Whether `other` came later, and is served before `record` only while that is loaded."""
        prompt = self.record(other) or self._without_keys.get(other.rid)
        if prompt is None or prompt.arrival <= record.arrival:
            return False
        if self.fair and tenant_of(other) != record.facts.tenant:
            return False
        return self._level(other) == self._level(record.req) or record.queue.prefill_due

    def _schedule_fcfs(self, ready: Sequence[str], *, went_on: bool) -> None:
        """What a server that computes all prompts would do by now.

        Args:
            ready: prompts that could be prefilled, or are.
            went_on: a prompt was prefilled, or held back, since the last poll.
        """

        def matched(rid: str) -> int:
            record = self._records.get(rid)
            return 0 if record is None else record.stats.matched_tokens

        now_s = self.prompt_loads.now_s
        self._fcfs.polled(now_s, ready, rest=self._rest, matched=matched, went_on=went_on)

    def _serve(self, serving: Sequence[str], handshaking: Collection[str]) -> None:
        live = [record for record in map(self._records.get, serving) if record is not None]
        served = [record for record in live if record.uses_link]
        # The first prompt with device memory may use all staging buffers, since its blocks leave
        # them as they land. Prompts that have slots get more of them, so that their staged blocks
        # do not keep buffers from it.
        with_memory: PromptRecord | None = None
        for record in served:
            if (with_memory is None or record.memory.slots) and self._has_memory_for(record):
                with_memory = with_memory or record
                count = record.meet.block_count
                blocks = [block for block in record.memory.staged if block < count]
                self._device_slots.place(record, blocks)
        if with_memory is not None:
            self._device_slots.reserve(with_memory, self.step_costs.next_landings(with_memory))
        self.prompt_loads.serve(served, with_memory)
        passed = [record for record in served if record.rid not in handshaking]
        self._step = _Step(passed=list(self._ends_of_loads(passed[:PASSED])))
        if with_memory is not None and self.prompt_loads.lacks_buffers:
            self._make_room(with_memory, live)

    def _ends_of_loads(
        self, served: Sequence[PromptRecord]
    ) -> Iterator[tuple[PromptRecord, float]]:
        """The prompts of `served`, in the order of the link, that could be admitted once their
        loads are over, each with the time until then. Prompts whose loads wait for a buffer are not
        among them."""
        total_s = 0.0
        for record in served:
            if not record.agreed.lookup_done or record.agreed.load_from is None:
                continue
            rest_s = self.step_costs.loads_s(record)
            total_s += rest_s
            has_memory = record.queue.has_memory is not False and not record.agreed.link_idle
            if rest_s and has_memory:
                error = self.step_costs.costs_alone(record).load.error
                yield record, total_s * (1 + error)

    def _make_room(self, with_memory: PromptRecord, live: Sequence[PromptRecord]) -> None:
        """Prompts that `with_memory` has passed hold all buffers, with blocks that wait for device
        memory, or for the rest of an end state. Give up the blocks of the last of these prompts:
        they are computed."""
        for record in reversed(live):
            if record is not with_memory and record.memory.staged:
                for block in list(record.memory.staged):
                    self._device_slots.drop(record, block, "memory")
                self.prompt_loads.set_first_loadable(record, record.meet.first_loadable)
                return

    def _end_failed_copies(self) -> None:
        """End requests with a block that could not be copied. `attach_islands` would drop it on
        this rank alone; the vote that follows ends its request on every rank. Only the launches of
        blocks that the next step attaches are waited for: the step needs them anyway. Copies that
        begin in the step itself are not seen here."""
        for record in self._awaiting():
            span = record.meet.island()
            blocks = [] if span is None else record.meet.blocks_of(span)
            if self._device_slots.copy_failed(record, blocks):
                self.release(record.rid)

    # ---- inside ----

    def _awaits_lookup(self, record: PromptRecord) -> bool:
        return record.awaits_lookup(self._config.mode) and not self.prompt_loads.lookups_late

    def _level(self, req: "Req") -> int:
        """The level of a request's priority, as in `QueueEntry`."""
        return (req.priority or 0) * self.priority_sign

    def _is_taken(self, req: "Req") -> bool:
        """Whether another live request has a record under the id of this one, which gets none."""
        record = self._records.get(req.rid)
        return record is not None and record.req is not req and not record.req.finished()

    def _live_record(self, req: "Req") -> PromptRecord:
        record = self.record(req)
        assert record is not None, req.rid
        return record

    def _next_step(
        self, record: PromptRecord, view: View, chunk_tokens: int, costs: PromptCosts
    ) -> StepPlan:
        """The decision about the next step; the front of `view` touches no island."""
        return next_step(
            view,
            mode=self._config.mode,
            chunk_tokens=chunk_tokens,
            costs=replace(costs, others_wait=self._prompt_count > 1),
            progress=record.progress,
        )

    def _outlook(self, record: PromptRecord) -> Outlook:
        """The prediction for the rest of the prefill alone, made anew after each change that it
        depends on. The rest of the running step is the same for all prompts that wait, so it is
        left out."""
        if record.queue.outlook is None:
            costs = self.step_costs.costs_alone(record)
            record.queue.outlook = self.step_costs.look_ahead(record, costs)
        return record.queue.outlook

    def _has_memory_for(self, record: PromptRecord) -> bool:
        """Whether a prompt may have slots before it is admitted: SGLang could admit it now, beside
        all other prompts that have slots."""
        needed = most_slots(record.req) - record.meet.front
        needed -= len(record.memory.slots) * self.block_tokens
        if record.queue.has_memory is None:
            # `spare_slots` has slots that can be evicted. Some may hold the prefix of this request.
            needed += record.meet.front
        elif not record.queue.has_memory:
            return False
        return needed < self.spare_slots - self.reclaimable_tokens

    def _new_record(
        self,
        req: "Req",
        key_chain: KeyChain,
        tokens: "array[int]",
        *,
        limit: int,
        front: int = 0,
        matched: Callable[[], int] = lambda: 0,
        may_overlap: bool = False,
        stored: tuple[bool, ...] | None = None,
    ) -> PromptRecord:
        """A new record.

        Args:
            limit: so many leading tokens may be loaded.
            front: so many leading tokens the tree has.
            stored: which full blocks are stored; None: a lookup will say.
        """
        arrival = next(self._numbers)
        load_id = f"{req.rid}#{arrival}"
        arrived_s = time.monotonic()
        return PromptRecord(
            req=req,
            load_id=load_id,
            tokens=tokens,
            key_chain=key_chain,
            facts=facts_of(req, load_id, tokens, self.step_costs.known, self.block_tokens),
            meet=Meet(
                block_tokens=self.block_tokens,
                page_tokens=self._page_tokens,
                limit_tokens=limit,
                prompt_tokens=max(0, len(tokens) - self.keys.next_tokens),
                front=front,
                end_blocks=self._end_blocks,
            ),
            local=LocalLoads(served_since_s=arrived_s),
            agreed=AgreedLoads(lookup_done=stored is not None, stored=stored or ()),
            matched_tokens=matched,
            arrival=arrival,
            arrived_s=arrived_s,
            may_overlap=may_overlap,
            lossy=self._lossy,
        )

    def _keep(self, record: PromptRecord) -> None:
        if record.rid not in self._records:
            self._tenants.arrives(record.facts.tenant)
        self._records[record.rid] = record  # in the place of its former record, if it has one
        self.prompt_loads.expect(record)

    def _look_up(self, record: PromptRecord, ahead: StepWork | None) -> None:
        """Keep a new record, have its blocks looked up, and loaded if that seems worth it.

        Args:
            ahead: the work of the device before this request. None: the request is far, and
                nothing is loaded yet.
        """
        self._keep(record)
        loads_now: Callable[[Sequence[bool], TierLoads], bool] = _never
        if ahead is not None:
            loads_now = self.step_costs.decision_at_arrival(record, self._config, ahead)
        self._loader.begin(
            LoadRequest(
                load_id=record.load_id,
                key_chain=record.key_chain,
                tokens=record.tokens,
                block_count=record.meet.block_count,
                first_block=record.meet.first_loadable,
                facts=record.facts,
                loads_now=loads_now,
                take_over=partial(self._device_slots.take_bytes, record),
                end_blocks=self._end_blocks,
            )
        )

    def _work_before(self, record: PromptRecord | None = None) -> StepWork:
        """The work of the device before a prompt; None: before one that arrives now."""
        works = [live.device_work for live in self._ahead_of(record)]
        return total_work([*works, *map(self._work_without_keys, self._without_keys)])

    def _ahead_of(self, record: PromptRecord | None) -> Iterator[PromptRecord]:
        """Prompts with keys that came before this one, or before one that comes now, and are
        computed before it. Where priorities adapt, prompts that are being loaded let it go first.
        """
        for live in self._records.values():
            if record is not None and live.rid == record.rid:
                return
            if live.stats.prefill_s is None and not (self.adaptive and live.loading):
                yield live

    def _work_without_keys(self, rid: str) -> StepWork:
        prompt = self._without_keys.get(rid)
        return StepWork() if prompt is None else work_of(*prompt.rest)

    def _advance(self, record: PromptRecord, tree_tokens: int) -> None:
        """The tree has the first `tree_tokens` tokens of a prompt."""
        stats = record.stats
        if stats.computed_tokens + stats.loaded_tokens:
            # What it got from others may be evicted again before it is admitted.
            more = tree_tokens - record.meet.front
            stats.rematched_tokens = max(0, stats.rematched_tokens + more)
        else:
            stats.matched_tokens = tree_tokens
        self._device_slots.discard(record, record.meet.advance(tree_tokens), "in_tree")

    def _attached(self, record: PromptRecord, span: Span) -> None:
        record.meet.attach(span)
        if record.stats.meet_token is None:
            record.stats.meet_token = span.start
        record.stats.loaded_tokens += span.tokens
        self._tenants.charge(record.facts.tenant, span.tokens)
        self._counters.add("loaded_tokens", span.tokens)
        self._reporter.write_event(record, "attach", start=span.start, stop=span.stop)

    def _computed(self, record: PromptRecord, span: Span) -> None:
        record.stats.computed_tokens += span.tokens
        self._tenants.charge(record.facts.tenant, span.tokens)
        self._counters.add("computed_tokens", span.tokens)
        self._reporter.write_event(record, "claim", start=span.start, stop=span.stop)

    def _claim(self, record: PromptRecord, stop: int, rest_s: float) -> None:
        """A step that is over in `rest_s` computes up to token `stop`."""
        self._device_slots.discard(record, record.meet.claim(stop), "overtaken")
        self.prompt_loads.set_first_loadable(record, record.meet.first_loadable)
        if stop >= len(record.tokens):
            self._prefilled(record, rest_s)

    def _prefilled(self, record: PromptRecord, rest_s: float) -> None:
        record.stats.prefill_s = record.local_waited_s()
        self.prompt_loads.stop_loading(record, "overtaken")
        if record.fallback is not None:
            self._counters.add("fallback", label=record.fallback)
        self._reporter.prefilled(record, rest_s)
        req = record.req
        req.customized_info = {**(req.customized_info or {}), "cake": [record.report()]}
