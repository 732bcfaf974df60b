"""The order of the waiting queue, and how the request that is being chunked goes back to it.

SGLang serves its chunked request before the queue and knows only one. A stored prompt that is being
loaded takes what other prompts leave of the device (`loading/priority.py`), so it must be able to
yield between two of its chunks. Its chunks are in the tree already. The request gives up its row,
waits in the queue, and is matched again, in the same step if there is budget left.

A request goes back only after a step in which it was admitted, and only if another request can
compute at once. So every return is paid for with a step that was computed, or with blocks that
joined the tree.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.common import release_kv_cache

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.request.request_metadata import most_slots
from sglang_cake.integration.scheduler.coordinator import NEAR
from sglang_cake.loading.priority import order, preempts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_cake.integration.scheduler.coordinator import Coordinator

# How often a prompt that is not being loaded any more is put back before it keeps its place.
MOST_INTERRUPTIONS = 4
# The search for a waiting prompt that could compute now looks at so many prompts that are being
# loaded, in the order of the queue. Each costs a prediction.
_TRIED = 8


class StepBudget(NamedTuple):
    """What a step has left.

    Attributes:
        chunk_tokens: tokens that it may still compute.
        slots: device memory, including slots that can be evicted for it, beside what the chunked
            request needs to its end. Without this limit, a request that goes first could use the
            memory for as long as it decodes, while the KV of the other one is evicted.
    """

    chunk_tokens: int
    slots: int


def sort_queue(queue: "list[Req]", coordinator: "Coordinator") -> None:
    """Reorder the first NEAR requests of SGLang's waiting queue in place. Priorities, where they
    count, stay first, but not against prompts whose prefill is due."""
    if not coordinator.adaptive:
        if coordinator.priority_sign:
            queue.sort(key=lambda req: not coordinator.prefill_due(req))
        return
    if len(queue) > NEAR and (coordinator.fair or coordinator.priority_sign):
        queue.sort(key=coordinator.rough_place)
    near = queue[:NEAR]
    # An entry also notes since when a request waits, which counts for fairness.
    several = len(queue) > 1
    if coordinator.fair or (several and any(coordinator.ever_asked(req) for req in near)):
        entries = [coordinator.queue_entry(req) for req in near]
        queue[:NEAR] = [near[i] for i in order(entries)]


def serving(
    chunked: "Req | None",
    queue: "list[Req]",
    coordinator: "Coordinator",
    *,
    fits: bool,
) -> list[str]:
    """Ids of all requests that are in prefill or wait for it, in the order in which the link works
    for them.

    A request that waits for its loads does not preempt the chunked request. If it will do so once
    it is loaded, the link works for it first.

    Args:
        fits: whether a request of the queue could be admitted in place of the chunked request.
    """
    if chunked is None:
        return [req.rid for req in queue]
    ahead: list[str] = []
    preemptible = fits and coordinator.adaptive and coordinator.loading(chunked)
    if preemptible and may_requeue(chunked, coordinator):
        running = coordinator.queue_entry(chunked)
        near = queue[:NEAR]
        waiting = [coordinator.queue_entry(req) for req in near if coordinator.loading(req)]
        ahead = [each.rid for each in waiting if each.waits_for_loads and preempts(each, running)]
    first = {*ahead, chunked.rid}
    return [*ahead, chunked.rid, *(req.rid for req in queue if req.rid not in first)]


def find_preemptor(
    req: "Req",
    queue: "list[Req]",
    coordinator: "Coordinator",
    budget: StepBudget,
) -> "Req | None":
    """The waiting request that goes before the request that is being chunked, which may go back,
    and can compute now."""
    running = coordinator.queue_entry(req)
    only_stored = not running.waits_for_loads or not coordinator.adaptive

    def goes_first(each: "Req") -> bool:
        if only_stored and not coordinator.ever_asked(each):
            return False
        waiting = coordinator.queue_entry(each)
        if coordinator.adaptive:
            return preempts(waiting, running)
        # In SGLang's order, only an earlier request that yielded the device goes first.
        if not waiting.yielded or waiting.level > running.level:
            return False
        one = coordinator.record(each)
        other = coordinator.record(req)
        return one is not None and other is not None and one.arrival < other.arrival

    return next(_able(filter(goes_first, queue[:NEAR]), coordinator, budget), None)


def may_yield(
    req: "Req", queue: "list[Req]", coordinator: "Coordinator", budget: StepBudget
) -> bool:
    """Whether the chunked request, which cannot compute now and may go back, yields the device to
    requests after it.

    The device must be free again when the loads of the chunked request are over. So these loads
    must last at least as long as the step that the others would begin now, and none of the others
    may keep the device for longer than that.
    """
    record = coordinator.record(req)
    if record is None:
        return False
    others_tokens = 0
    for each in _able(queue[:NEAR], coordinator, budget):
        tokens = len(each.origin_input_ids) + len(each.output_ids)
        if tokens > budget.chunk_tokens and not may_requeue(each, coordinator):
            return False
        others_tokens += tokens
    prefill = coordinator.step_costs.costs(record).prefill
    step_s = prefill.step_s(0, min(others_tokens, budget.chunk_tokens))
    return 0 < step_s <= coordinator.step_costs.loads_s(record)


def requeue(
    req: "Req",
    queue: "list[Req]",
    tree: CakeRadixCache,
    coordinator: "Coordinator",
    preemptor: "Req | None" = None,
) -> None:
    """Put the chunked request, whose chunks are in the tree, back into the queue: first, or after
    `preemptor` of the queue and all that have waited for longer. The queue changes last."""
    tree.releasing = req.rid
    try:
        release_kv_cache(req, tree, checkpoint=False)
    finally:
        tree.releasing = None
    # As `Req.reset_for_retract`, except for fields of the chunk under way: its result is still to
    # be processed, and must be taken for that of a middle chunk.
    req.prefix_len = 0
    req.extend_end = None
    req.last_node = None
    req.lock = None
    req.num_matched_prefix_tokens = 0
    req.kv_rotation_base = None
    req.swa_branching_seqlen = None
    req.mamba_branching_seqlen = None
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    req.kv.mamba_last_track_seqlen = None
    req.kv.cache_protected_len = 0
    req.kv.cache_inserted_len = 0
    req.kv.kv_committed_len = 0
    if preemptor is None:
        queue.insert(0, req)
    else:
        queue.remove(preemptor)
        waited_s = coordinator.queue_entry(req).waited_s
        older = (coordinator.queue_entry(each).waited_s > waited_s for each in queue)
        place = next((index for index, is_older in enumerate(older) if not is_older), len(queue))
        queue.insert(place, req)
        queue.insert(0, preemptor)


def may_requeue(req: "Req", coordinator: "Coordinator") -> bool:
    """Whether the chunked request may wait in the queue again.

    Logprobs of a prompt are gathered chunk by chunk, so a request that returns them cannot start
    over. The chunks of a beam search are not in the tree, so they would be computed again. A
    request without a record may have other parts that cannot start over.
    """
    record = coordinator.record(req)
    if req.return_logprob or req.skip_radix_cache_insert or record is None:
        return False
    # A prompt that is only computed keeps its place after a few interruptions.
    interrupted = record.queue.times_requeued
    return coordinator.loading(req) or interrupted < MOST_INTERRUPTIONS


def _able(
    queue: "Iterable[Req]", coordinator: "Coordinator", budget: StepBudget
) -> "Iterator[Req]":
    """The requests of `queue` that could compute now, each in one row: a beam search needs more,
    which could be those of the request that goes back."""
    tried = 0
    for req in queue:
        if req.beam_group is not None or coordinator.is_far(req):
            continue
        if coordinator.loading(req):
            tried += 1
            if tried > _TRIED:
                continue
        if most_slots(req) >= budget.slots:
            continue
        if not coordinator.would_wait(req, budget.chunk_tokens):
            yield req
