"""All live prompts of one scheduler process: takes the loader's events, asks the pure parts for
decisions, and carries them out.

SGLang drives it in this order in each scheduling step:

1. `poll`: the loader's events are taken, all ranks agree on them, and landed blocks get slots.
2. SGLang's checkpoint of the chunk computed before (`BlockSaving.checkpointed`).
3. For each request of the step: `settle` attaches the islands that the front touches, `plan` says
   how far to compute, and `claimed` records what the step computes.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from sglang_cake.core.config import CakeConfig
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest, KeyChain
from sglang_cake.core.spans import Span
from sglang_cake.integration import cached_tokens
from sglang_cake.integration.compat import longest_prefix_tokens
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.request.prompt_load import AgreedLoads, LocalLoads, PromptLoad
from sglang_cake.integration.request.request_metadata import (
    facts_of,
    keyable,
    may_overlap_last_step,
    seed_of,
    tenant_of,
)
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.loader_inbox import LoaderInbox
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import StepWork
from sglang_cake.loading.loader import Loader, Prompt
from sglang_cake.loading.meet import Meet
from sglang_cake.loading.planner import Step, island_start
from sglang_cake.loading.priority import QueueEntry, TenantTokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Attach = Callable[["Req", torch.Tensor, int], None]

# In a poll, so many waiting requests are asked again whether to load: each costs a prediction.
RECONSIDERED = 8


class Coordinator:
    """Owned by the scheduler thread.

    With several ranks, every rank takes part in the same reductions in the same order, whatever
    fails on one of them in between.

    Args:
        page_tokens: page size of the tree.
        adapter: `(lora_id)` gives the digest of that LoRA adapter's content; None: not known.

    Attributes:
        suspended: the tree holds KV of before a change of weights.
        detached: no store is in use, so no request is loaded.
        waiting: a request was held back in this step.
        step_s: time that cake has taken of the step under way, see `timed`.
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
        adapter: Callable[[str], str | None],
        consensus: RankConsensus,
        counters: Counters,
        reporter: RequestReporter,
    ) -> None:
        self._loader = loader
        self._device_slots = device_slots
        self._config = config
        self._page_tokens = page_tokens
        self._adapter = adapter
        self._consensus = consensus
        self._counters = counters
        self._reporter = reporter
        self._namespace: Digest | None = None  # seeds every key; None: no request is loaded
        self._loads: dict[str, PromptLoad] = {}  # in order of arrival, the same on every rank
        self._numbers = itertools.count()
        self._tenants = TenantTokens()
        # The shared clock when a request that has no record was first looked at.
        self._unrecorded_since_s: WeakKeyDictionary[Req, float] = WeakKeyDictionary()
        self._reconsidered = 0  # how many waiting requests were asked again so far
        self.step_costs = step_costs
        self.inbox = LoaderInbox(loader, device_slots, config, reporter)
        self.suspended = False
        self.detached = False
        self.off_here = False
        self.off_everywhere = False
        self.waiting = False
        self.step_s = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside counts as time that cake takes of the step under way."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.step_s += time.perf_counter() - started_s

    # ---- a request's life ----

    def arrive(self, req: "Req", matched: Callable[[Any, int], int]) -> None:
        """A request joined the queue: look it up and start loading, if its token ids alone decide
        its KV.

        Args:
            matched: `(tokens, limit)` gives the number of leading tokens that the tree holds.
        """
        if self.detached or self.off_here or not keyable(req):
            return
        adapter = None if req.lora_id is None else self._adapter(req.lora_id)
        if self._namespace is None or self.suspended or (req.lora_id and adapter is None):
            self._counters.add("unnamed_requests")
            return
        seed = seed_of(req, self._namespace, adapter)
        self.end(req.rid)  # a retracted request comes back under the same id
        tokens = req.origin_input_ids + req.output_ids
        limit = longest_prefix_tokens(req, len(tokens))
        block_tokens = self._config.block_tokens
        load_id = f"{req.rid}#{next(self._numbers)}"
        cost = self._loader.cost
        arrived_s = time.monotonic()
        load = PromptLoad(
            rid=req.rid,
            load_id=load_id,
            tokens=tokens,
            chain=KeyChain(seed, block_tokens),
            facts=facts_of(req, load_id, tokens, self.step_costs.own, block_tokens),
            meet=Meet(
                block_tokens=block_tokens,
                page_tokens=self._page_tokens,
                limit_tokens=limit,
                prompt_tokens=len(tokens),
                front=matched(tokens, limit),
            ),
            local=LocalLoads(cost, served_since_s=arrived_s),
            agreed=AgreedLoads(cost),
            arrived_s=arrived_s,
            may_overlap=may_overlap_last_step(req),
            lossy=self._config.lossy,
        )
        ahead = sum((live.device_work for live in self._ahead_of_arrival()), StepWork())
        self._loads[req.rid] = load
        self.inbox.expect(load)
        self._tenants.arrives(load.facts.tenant)
        self._loader.begin(
            Prompt(
                load_id=load.load_id,
                chain=load.chain,
                tokens=tokens,
                blocks=load.meet.blocks,
                first_block=load.meet.fence,
                facts=load.facts,
                should_load=self.step_costs.should_load_at_arrival(load, self._config, ahead),
                arrived=partial(self._device_slots.arrived, load),
            )
        )
        self._reporter.trace(load, "arrive", tokens=len(tokens), block_tokens=block_tokens)

    def end(self, rid: str) -> None:
        """The request is over, aborted or retracted: return all that it holds. Unknown ids are
        fine."""
        if (load := self._loads.pop(rid, None)) is not None:
            with contextlib.ExitStack() as steps:  # each of them runs, even if another one raises
                steps.callback(self._reporter.ended, load)
                steps.callback(self._tenants.leaves, load.facts.tenant)
                steps.callback(self.inbox.forget, load)
                steps.callback(self._device_slots.discard_all, load, "ended")

    def end_all(self) -> None:
        """End every request: the tree is being emptied, or the weights change."""
        for rid in list(self._loads):
            self.end(rid)

    def emptied(self) -> None:
        """The tree is being emptied."""
        self.end_all()
        self.suspended = False

    def rebase(self, namespace: Digest | None, *, suspended: bool) -> None:
        """From now on KV means something else. Live requests end, and are never stored.

        Args:
            namespace: digest that seeds every key; None: not known yet, so no request is loaded.
            suspended: the tree still holds KV of before. What is computed on top of it belongs to
                no namespace, so nothing is loaded or stored until the tree is emptied.
        """
        self.end_all()
        self._namespace = namespace
        self.suspended = suspended

    def prompt_load(self, rid: str) -> PromptLoad | None:
        """The record of a live request, if it has one."""
        return self._loads.get(rid)

    @property
    def live(self) -> list[str]:
        """Ids of all requests that have a record, in order of arrival."""
        return list(self._loads)

    # ---- on and off ----

    def switch_off(self) -> bool:
        """Cake is off on this rank: no request is looked up any more. Returns whether all ranks
        know; if not, `on_everywhere` tells them."""
        self.off_here = True
        self.off_everywhere = self._consensus.alone
        return self.off_everywhere

    def on_everywhere(self) -> bool:
        """Whether cake is on, on every rank. If it is not, all requests have ended on all ranks.

        Each rank calls it at the start of each poll with prompts to prefill, and of the first poll
        after an unsafe hook.
        """
        if not self.off_everywhere and not self._consensus.on(not self.off_here):
            self.off_here = True
            self.off_everywhere = True
            self.end_all()
        return not self.off_everywhere

    # ---- once a step ----

    def poll(self, serving: Sequence[str]) -> None:
        """Take the loader's events, agree on them, and give slots to landed blocks of the request
        that is served first.

        An exception on this rank is raised at the end. Then this rank has no requests any more, and
        those that it had have ended on every rank.

        Args:
            serving: ids of the requests that are being prefilled or wait for it, in order; the same
                ones on every rank.
        """
        self.waiting = False
        step_s = self.step_s
        self.step_s = 0.0
        failures: list[Exception] = []
        self._attempt(failures, lambda: self._take_events(step_s))
        open_loads = self._vote(serving)
        if open_loads:  # the reduction comes first, and takes place whatever fails
            self._attempt(failures, lambda: self._reconsider(self._agree(open_loads), serving))
        self._attempt(failures, lambda: self._serve(serving))
        if open_loads:
            self._vote(serving)  # a request that has failed on another rank is not scheduled
        if failures:
            raise failures[0]

    def reclaim(self, tokens: int) -> int:
        """SGLang needs memory that landed blocks occupy. Returns the tokens freed."""
        return self._device_slots.reclaim(list(self._loads.values()), tokens)

    @property
    def held_tokens(self) -> int:
        """Slots that hold landed blocks."""
        return self._device_slots.held_tokens

    # ---- one request of the step ----

    def hold(self, req: "Req") -> bool:
        """Whether a waiting request stays in the queue while its lookup is under way."""
        load = self._loads.get(req.rid)
        held = load is not None and load.awaits_lookup(self._config.mode)
        self.waiting |= held
        return held

    def settle(self, req: "Req", attach: Attach) -> None:
        """Bring the front up to `req.prefix_len` and attach the islands that it touches.

        Args:
            attach: `(req, slots, stop)` makes `slots` the KV of `[req.prefix_len, stop)`, gives
                them to the tree and moves `req.prefix_len` to `stop`.
        """
        if (load := self._loads.get(req.rid)) is None:
            return
        stats = load.stats
        if not stats.computed_tokens + stats.loaded_tokens:
            stats.matched_tokens = req.prefix_len
        self._advance(load, req)
        while (span := load.meet.island()) is not None:
            blocks = load.meet.blocks_of(span)
            if not self._device_slots.place(load, blocks):
                # No memory for the whole island: blocks without slots are computed.
                unplaced = [b for b in blocks if b not in load.landed.slots]
                self._device_slots.discard(load, unplaced, "memory")
                for block in unplaced:
                    load.meet.dropped(block)
                continue
            self._attached(load, span)
            attach(req, self._device_slots.take(load, span), span.stop)
            cached_tokens.loaded(req, span)
            self._advance(load, req)  # the tree may have matched more by now
        self.inbox.fence(load, load.meet.fence)

    def plan(self, req: "Req", chunk_tokens: int) -> Step | None:
        """The next step of a settled request; None: compute as usual, no block is to come."""
        load = self._loads.get(req.rid)
        if load is None or not load.meet.pending:
            return None
        load.queue.remaining_s = self.step_costs.remaining_s(load)
        if load.stats.predicted_s is None:
            load.stats.predicted_s = load.local_waited_s() + load.queue.remaining_s
        step = load.next_step(self._config.mode, chunk_tokens, self.step_costs.costs(load))
        self.waiting |= step.wait
        load.queue.yielded |= step.wait
        load.queue.planned = True
        self.inbox.load_from(load, step.load_from, overdue=step.overdue)
        return step if load.loading else None

    def claimed(self, req: "Req", stop: int, *, overlapped: bool = False) -> None:
        """The step being scheduled computes `[req.prefix_len, stop)`.

        Args:
            overlapped: it is an overlapped last step; `overlapped` follows when it has run.
        """
        start = req.prefix_len
        self.step_costs.claimed(start, stop)
        if (load := self._loads.get(req.rid)) is None:
            return
        load.queue.yielded = False
        self._computed(load, Span(start, stop))
        if not overlapped:
            self._advance(load, req)
            self._claim(req, load, stop)

    def overlapped(
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
            used: blocks of `span` that came while the step ran, and were used.
            missing: blocks of `span` that did not come, and were computed.
            tokens: of `span`, those in `used` blocks.
        """
        load = self._loads[req.rid]
        load.stats.overlapped_tokens += tokens
        self._counters.add("overlapped_tokens", tokens)
        for block in used:
            load.meet.landed(block)
            self.inbox.used_while_read(load, block)
        for block in missing:
            load.meet.lost(block)
        while (front := load.meet.front) < span.stop:
            if (island := load.meet.island()) is not None:
                self._attached(load, island)
                cached_tokens.loaded(req, island)
            else:
                computed = Span(front, min(island_start(load.meet.view()), span.stop))
                load.meet.claim(computed.stop)
                self._computed(load, computed)
                cached_tokens.computed(req, computed.tokens)
        self._claim(req, load, stop)

    # ---- what the order of the queue depends on ----

    @property
    def block_tokens(self) -> int:
        """Tokens of a whole block."""
        return self._config.block_tokens

    @property
    def adaptive(self) -> bool:
        """Whether prompts that are being loaded let others go first."""
        return self._config.priority != "fcfs"

    @property
    def fair(self) -> bool:
        """Whether tenants are served in turn."""
        return self._config.priority == "fair"

    def loading(self, rid: str) -> bool:
        """Whether a block of this request is being loaded, or has landed and waits."""
        load = self._loads.get(rid)
        return load is not None and load.agreed.lookup_done and load.loading

    def uses_store(self, rid: str) -> bool:
        """Whether a block of this request came from the store, or is being loaded."""
        load = self._loads.get(rid)
        return load is not None and (load.agreed.begun or self.loading(rid))

    def would_wait(self, rid: str, chunk_tokens: int) -> bool:
        """Whether the request would compute nothing if a step were scheduled for it now."""
        if (load := self._loads.get(rid)) is None:
            return False
        return load.would_wait(self._config.mode, chunk_tokens, self.step_costs.costs(load))

    def requeued(self, rid: str) -> None:
        """The request went back to the queue between two of its chunks."""
        self._loads[rid].queue.times_requeued += 1
        self._reporter.trace(self._loads[rid], "yield")

    def queue_entry(self, req: "Req", level: int = 0) -> QueueEntry:
        """What `priority.order` needs of a waiting request whose priority counts as `level`."""
        load = self._loads.get(req.rid)
        now_s = self.inbox.now_s
        if load is not None:
            entry = load.queue_entry(self.step_costs.chunk_tokens, now_s)
        else:
            since_s = self._unrecorded_since_s.setdefault(req, now_s)
            entry = QueueEntry(req.rid, None, now_s - since_s)
        turn = 0
        if self.fair:
            turn = self._tenants.turn(load.facts.tenant if load else tenant_of(req))
        return replace(entry, turn=turn, level=level)

    # ---- parts of `poll` ----

    def _attempt(self, failures: list[Exception], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)
            self.end_all()

    def _take_events(self, step_s: float) -> None:
        self.step_costs.polled()
        self._reporter.stepped(
            overhead_s=step_s if self._loads else None,  # an idle poll is no step
            costs=self.step_costs.own,
        )
        self.inbox.take()
        self._device_slots.check_copies()
        self.inbox.measure([load for load in self._loads.values() if load.awaits_loader])

    def _vote(self, serving: Sequence[str]) -> list[PromptLoad]:
        """The requests that await the loader, in the same order on every rank. Requests that are
        not in the same state on every rank end on all."""
        if self._consensus.alone:
            return [load for load in self._loads.values() if load.awaits_loader]
        rids = sorted(serving)
        loads = [self._loads.get(rid) for rid in rids]
        for rid, same in zip(rids, self._consensus.vote(loads), strict=True):
            if not same:
                self.end(rid)
        live = (self._loads.get(rid) for rid in rids)
        return [load for load in live if load is not None and load.awaits_loader]

    def _agree(self, open_loads: Sequence[PromptLoad]) -> list[PromptLoad]:
        """Apply what the ranks agree on. Returns the requests whose lookup is done since then."""
        updates = self.step_costs.agree(open_loads, self._consensus)
        for load, update in zip(open_loads, updates, strict=True):
            self.inbox.apply(load, update)
            if (update.stored or update.landed or update.lost) and load.loading:
                load.queue.remaining_s = self.step_costs.remaining_s(load)
        return [
            load
            for load, update in zip(open_loads, updates, strict=True)
            if update.stored is not None
        ]

    def _reconsider(self, found: Sequence[PromptLoad], serving: Sequence[str]) -> None:
        """Decide whether to load requests that wait in the queue, given what goes before them:
        those whose lookup has just answered, and some of the others, in rotation. A request that
        was planned in the last step was decided on there."""
        live = [load for load in map(self._loads.get, serving) if load is not None]
        live = [load for load in live if load.stats.prefill_s is None]
        waiting = [
            load
            for load in live
            if load.agreed.lookup_done and load.meet.pending and not load.queue.planned
        ]
        start = self._reconsidered % max(1, len(waiting))
        rotated = waiting[start:] + waiting[:start]
        chosen = {load.rid for load in [*found, *rotated[:RECONSIDERED]]}
        self._reconsidered += RECONSIDERED
        ahead = StepWork()
        for load in live:
            if load.rid in chosen and load.meet.pending:
                loads = self.step_costs.should_load(load, self._config.mode, ahead)
                if load in found or loads != (load.agreed.load_from is not None):
                    overdue = self.step_costs.is_overdue(load)
                    self.inbox.load_from(load, 0 if loads else None, overdue=overdue)
                    load.queue.remaining_s = self.step_costs.remaining_s(load)
            load.queue.planned = False
            ahead += load.device_work

    def _serve(self, serving: Sequence[str]) -> None:
        live = (self._loads.get(rid) for rid in serving)
        served = [load for load in live if load is not None and load.uses_link]
        self.inbox.serve(served)
        if served:
            first = served[0]
            self._device_slots.place(first, list(first.landed.staged))
            self._device_slots.reserve(first, self.step_costs.blocks_ahead(first))

    # ---- inside ----

    def _ahead_of_arrival(self) -> list[PromptLoad]:
        """Prompts that are computed before a request that has just arrived. Where priorities adapt,
        prompts that are being loaded let it go first."""
        live = [load for load in self._loads.values() if load.stats.prefill_s is None]
        return [load for load in live if not (self.adaptive and load.loading)]

    def _advance(self, load: PromptLoad, req: "Req") -> None:
        self._device_slots.discard(load, load.meet.advance(req.prefix_len), "in_tree")

    def _attached(self, load: PromptLoad, span: Span) -> None:
        load.meet.attach(span)
        if load.stats.meet_token is None:
            load.stats.meet_token = span.start
        load.stats.loaded_tokens += span.tokens
        self._tenants.charge(load.facts.tenant, span.tokens)
        self._counters.add("loaded_tokens", span.tokens)
        self._reporter.trace(load, "attach", start=span.start, stop=span.stop)

    def _computed(self, load: PromptLoad, span: Span) -> None:
        load.stats.computed_tokens += span.tokens
        self._tenants.charge(load.facts.tenant, span.tokens)
        self._counters.add("computed_tokens", span.tokens)
        self._reporter.trace(load, "claim", start=span.start, stop=span.stop)

    def _claim(self, req: "Req", load: PromptLoad, stop: int) -> None:
        self.inbox.fence(load, load.meet.claim(stop))
        if stop >= len(load.tokens):
            self._prefilled(req, load)

    def _prefilled(self, req: "Req", load: PromptLoad) -> None:
        load.stats.prefill_s = load.local_waited_s()
        self.inbox.stop_loading(load, "overtaken")
        if load.fallback is not None:
            self._counters.add("fallback", label=load.fallback)
        self._reporter.prefilled(load)
        req.customized_info = {**(req.customized_info or {}), "cake": [load.report()]}
