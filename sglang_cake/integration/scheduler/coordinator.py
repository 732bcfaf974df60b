"""The scheduler thread's side: facts in, decisions by the pure parts, effects on SGLang.

Within a scheduling step: `poll` (what has landed; agreed across ranks), then SGLang's checkpoint of
the chunk computed before (`checkpointed`), then for each request of the step `settle` (attach the
islands that the front touches), `plan` (how far to compute) and `claimed`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
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
from sglang_cake.integration.request.request_metadata import (
    begins_early,
    facts_of,
    keyable,
    seed_of,
    tenant_of,
)
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.request.restore import Restore
from sglang_cake.integration.scheduler.loader_inbox import LoaderInbox
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.scheduler.step_poll import StepPoll
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import StepWork
from sglang_cake.loading.fair_queueing import TenantTokens
from sglang_cake.loading.loader import Loader, Prompt
from sglang_cake.loading.meet import Meet
from sglang_cake.loading.planner import Step, room
from sglang_cake.loading.priority import QueueEntry

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Attach = Callable[["Req", torch.Tensor, int], None]


class Coordinator:
    """All live requests of one scheduler process.

    Args:
        page_tokens: page size of the tree.
        adapter: `(lora_id)` is what stands for that LoRA adapter in keys; None while nobody knows.
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
        self._namespace: Digest | None = None  # seeds every key; None: no request is ours
        self._page_tokens = page_tokens
        self.step_costs = step_costs
        self._counters = counters
        self._reporter = reporter
        self._adapter = adapter
        self.suspended = self.detached = False  # detached: no store, so no request is ours
        self._restores: dict[str, Restore] = {}  # in order of arrival, alike on every rank
        self.inbox = LoaderInbox(loader, device_slots, config, reporter)
        self._numbers = itertools.count()
        self._tenants = TenantTokens()
        self._others_since_s: WeakKeyDictionary[Req, float] = WeakKeyDictionary()  # not in these
        self._step_poll = StepPoll(
            self._restores,
            self.end,
            loader,
            device_slots,
            self.inbox,
            config.mode,
            step_costs,
            consensus,
            reporter,
        )
        self.waiting = False  # a request was held back in this step
        self.step_s = 0.0  # time that cake has taken of the step under way; the hooks add to it

    # ---- a request's life ----

    def arrive(self, req: "Req", matched: Callable[[Any, int], int]) -> None:
        """A request joined the queue: look it up and start loading, if tokens say all of its KV.

        Args:
            matched: `(tokens, limit)` says how many leading tokens the tree holds already.
        """
        if self.detached or self._step_poll.leaving or not keyable(req):
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
        ticket = f"{req.rid}#{next(self._numbers)}"
        restore = Restore(
            rid=req.rid,
            ticket=ticket,
            tokens=tokens,
            chain=KeyChain(seed, block_tokens),
            lossy=self._config.lossy,
            early=begins_early(req),
            load=self._loader.cost,
            facts=facts_of(req, ticket, tokens, self.step_costs.own, block_tokens),
            meet=Meet(
                block_tokens=block_tokens,
                page_tokens=self._page_tokens,
                limit_tokens=limit,
                prompt_tokens=len(tokens),
                front=matched(tokens, limit),
            ),
        )
        ahead = sum((live.to_compute for live in self._before(restore)), StepWork())
        self._restores[req.rid] = restore
        self.inbox.expect(restore)
        self._tenants.arrives(restore.facts.tenant)
        self._loader.begin(
            Prompt(
                rid=restore.ticket,
                chain=restore.chain,
                tokens=tokens,
                blocks=restore.meet.blocks,
                first_block=restore.meet.fence,
                facts=restore.facts,
                worth=self.step_costs.worth_now(restore, self._config, ahead),
            )
        )
        self._reporter.tell(restore, "arrive", tokens=len(tokens), block_tokens=block_tokens)

    def end(self, rid: str) -> None:
        """The request is over, aborted or retracted: give everything back. Unknown ids are fine."""
        if (restore := self._restores.pop(rid, None)) is not None:
            with contextlib.ExitStack() as steps:  # each of them, whatever becomes of the others
                steps.callback(self._reporter.ended, restore)
                steps.callback(self._tenants.leaves, restore.facts.tenant)
                steps.callback(self.inbox.forget, restore)
                steps.callback(self._device_slots.discard, restore, {*restore.slots}, "ended")

    def end_all(self) -> None:
        """Give everything back: the tree is being emptied, or the weights change."""
        for rid in list(self._restores):
            self.end(rid)

    def rebase(self, namespace: Digest | None, *, suspended: bool) -> None:
        """From now on KV means something else; live requests are forgotten, and never stored.

        Args:
            namespace: digest that seeds every key; None: not known yet, so no request is ours.
            suspended: the tree still holds KV of before. What is computed on top of it means
                nothing in any namespace, so nothing is loaded or stored until the tree is emptied.
        """
        self.end_all()
        self._namespace = namespace
        self.suspended = suspended

    def leave(self) -> bool:
        """Cake is off on this rank: no request is looked up any more. Returns whether all ranks
        know; if not, `together` tells them."""
        return self._step_poll.leave()

    def together(self) -> bool:
        """Whether cake is on, on every rank. Each of them calls it at the start of each poll with
        prompts to prefill, and of the first one after an unsafe hook."""
        return self._step_poll.together()

    @property
    def left(self) -> bool:
        """Whether cake is off on every rank."""
        return self._step_poll.left

    def emptied(self) -> None:
        """The tree is being emptied."""
        self.end_all()
        self.suspended = False

    def restore(self, rid: str) -> Restore | None:
        """The live record of a request, if it has one."""
        return self._restores.get(rid)

    @property
    def live(self) -> list[str]:
        """Ids of all requests that have a record, in order of arrival."""
        return list(self._restores)

    # ---- once a step ----

    def poll(self, serving: Sequence[str]) -> None:
        """Take the loader's news, agree on it, and move landed blocks of the request being served.

        What fails on this rank fails here after all ranks have agreed who goes on: those requests
        end everywhere.

        Args:
            serving: ids of the requests that are being prefilled or wait for it, in order; the same
                ones on every rank.
        """
        self.waiting = False
        step_s, self.step_s = self.step_s, 0.0
        self._step_poll.run(serving, step_s)

    def reclaim(self, tokens: int) -> int:
        """SGLang needs memory that landed blocks occupy. Returns the tokens freed."""
        return self._device_slots.reclaim(list(self._restores.values()), tokens)

    @property
    def held_tokens(self) -> int:
        """Slots that hold landed blocks."""
        return self._device_slots.held_tokens

    # ---- one request of the step ----

    def hold(self, req: "Req") -> bool:
        """Whether a waiting request should stay in the queue while its lookup is under way."""
        restore = self._restores.get(req.rid)
        held = restore is not None and restore.held(self._config.mode)
        self.waiting |= held
        return held

    def settle(self, req: "Req", attach: Attach) -> None:
        """Bring the front up to `req.prefix_len` and attach the islands that it touches.

        Args:
            attach: `(req, slots, stop)` makes `slots` the KV of `[req.prefix_len, stop)`, gives
                them to the tree and moves `req.prefix_len` to `stop`.
        """
        if (restore := self._restores.get(req.rid)) is None:
            return
        if not restore.computed_tokens + restore.loaded_tokens:
            restore.matched_tokens = req.prefix_len
        self._advance(restore, req)
        while (span := restore.meet.island()) is not None:
            blocks = restore.meet.blocks_of(span)
            if not self._device_slots.place(restore, blocks):
                # No memory for the whole island: what has no slots now is computed.
                unplaced = [b for b in blocks if b not in restore.slots]
                self._device_slots.discard(restore, unplaced, "memory")
                for block in unplaced:
                    restore.meet.dropped(block)
                continue
            self._attached(restore, span)
            attach(req, self._device_slots.take(restore, span), span.stop)
            cached_tokens.loaded(req, span)
            self._advance(restore, req)  # the tree may have matched more by now
        self.inbox.fence(restore, restore.meet.fence)

    def plan(self, req: "Req", chunk_tokens: int) -> Step | None:
        """The next step of a settled request; None: compute as usual, nothing is to come."""
        restore = self._restores.get(req.rid)
        if restore is None or not restore.meet.racing:
            return None
        restore.remaining_s = self.step_costs.remaining_s(restore)
        if restore.predicted_s is None:
            restore.predicted_s = restore.local_waited_s() + restore.remaining_s
        step = restore.next_step(self._config.mode, chunk_tokens, self.step_costs.costs(restore))
        self.waiting |= step.wait
        restore.yielded |= step.wait
        restore.planned = True
        self.inbox.load(restore, step.keep, late=step.late)
        return step if restore.racing else None

    @property
    def block_tokens(self) -> int:
        """Of a whole block."""
        return self._config.block_tokens

    @property
    def adaptive(self) -> bool:
        """Whether prompts that are being loaded let others go first."""
        return self._config.priority != "fcfs"

    @property
    def fair(self) -> bool:
        """Whether tenants take turns."""
        return self._config.priority == "fair"

    def racing(self, rid: str) -> bool:
        """Whether some of this request's KV is being loaded, or waits for its front."""
        return (live := self._restores.get(rid)) is not None and live.known and live.racing

    def loads(self, rid: str) -> bool:
        """Whether some of this request's KV came from the store, or is being loaded."""
        return (live := self._restores.get(rid)) is not None and (live.begun or self.racing(rid))

    def idle(self, rid: str, chunk_tokens: int) -> bool:
        """Whether the request would leave the device alone, were it its turn."""
        if (live := self._restores.get(rid)) is None:
            return False
        return live.idle(self._config.mode, chunk_tokens, self.step_costs.costs(live))

    def requeued(self, rid: str) -> None:
        """The request went back to the queue between two of its chunks."""
        self._restores[rid].times_requeued += 1
        self._reporter.tell(self._restores[rid], "yield")

    def queue_entry(self, req: "Req", level: int = 0) -> QueueEntry:
        """What `priority.order` must know of a waiting request whose priority counts as `level`."""
        live, turn = self._restores.get(req.rid), 0
        if self.fair:
            turn = self._tenants.turn(live.facts.tenant if live else tenant_of(req))
        now_s = self.inbox.now_s
        if live is not None:
            own = live.queue_entry(self.step_costs.chunk_tokens, now_s)
        else:
            own = QueueEntry(req.rid, None, now_s - self._others_since_s.setdefault(req, now_s))
        return replace(own, turn=turn, level=level)

    def claimed(self, req: "Req", stop: int) -> None:
        """The step being scheduled computes `[req.prefix_len, stop)`."""
        start = req.prefix_len
        self.step_costs.claimed(start, stop)
        if (restore := self._restores.get(req.rid)) is None:
            return
        restore.yielded = False
        self._computed(restore, Span(start, stop))
        if restore.overlap is None:
            self._advance(restore, req)
            self._claim(req, restore, stop)

    def overlapped(self, req: "Req", stop: int, landed: Collection[int]) -> None:
        """The step that began before all blocks were there is computed, up to `stop`: of those that
        were on their way it took `landed`, and computed the others."""
        restore = self._restores[req.rid]
        overlap, restore.overlap = restore.overlap, None
        assert overlap is not None
        for block in overlap.readings:
            if block in landed:
                restore.meet.landed(block)
                restore.arrived.pop(block).release(used=True)
            else:
                restore.meet.lost(block)
        while (front := restore.meet.front) < overlap.span.stop:
            if (span := restore.meet.island()) is not None:
                self._attached(restore, span)
                cached_tokens.loaded(req, span)
            else:
                span = Span(front, min(room(restore.meet.view()), overlap.span.stop))
                restore.meet.claim(span.stop)
                self._computed(restore, span)
                cached_tokens.computed(req, span.tokens)
        self._claim(req, restore, stop)

    # ---- inside ----

    def _before(self, restore: Restore) -> list[Restore]:
        """Who has the device before a request that has just come, and is computed: prompts that are
        being loaded leave it to others, where priorities adapt."""
        live = [r for r in self._restores.values() if r.prefill_s is None]
        return [r for r in live if not (self.adaptive and r.racing)]

    def _advance(self, restore: Restore, req: "Req") -> None:
        self._device_slots.discard(restore, restore.meet.advance(req.prefix_len), "in_tree")

    def _attached(self, restore: Restore, span: Span) -> None:
        restore.meet.attach(span)
        restore.meet_token = span.start if restore.meet_token is None else restore.meet_token
        restore.loaded_tokens += span.tokens
        self._tenants.charge(restore.facts.tenant, span.tokens)
        self._counters.add("loaded_tokens", span.tokens)
        self._reporter.tell(restore, "attach", start=span.start, stop=span.stop)

    def _computed(self, restore: Restore, span: Span) -> None:
        restore.computed_tokens += span.tokens
        self._tenants.charge(restore.facts.tenant, span.tokens)
        self._counters.add("computed_tokens", span.tokens)
        self._reporter.tell(restore, "claim", start=span.start, stop=span.stop)

    def _claim(self, req: "Req", restore: Restore, stop: int) -> None:
        self.inbox.fence(restore, restore.meet.claim(stop))
        if stop >= len(restore.tokens):
            self._prefilled(req, restore)

    def _prefilled(self, req: "Req", restore: Restore) -> None:
        restore.prefill_s = time.monotonic() - restore.arrived_s
        self.inbox.stop_loading(restore, "overtaken")
        if restore.side is not None:
            self._counters.add("fallback", label=restore.side)
        self._reporter.prefilled(restore)
        req.customized_info = {**(req.customized_info or {}), "cake": [restore.story()]}
