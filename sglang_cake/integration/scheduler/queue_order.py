"""The order of the waiting queue, and how the request that is being chunked goes back to it.

SGLang serves its chunked request before the queue and knows only one. A stored prompt that is being
loaded takes what others leave (`loading/priority.py`), so it must be able to step aside between two
of its chunks. The tree has those chunks already: it gives up its row, waits in the queue, and is
matched again, in the same step if there is budget left.

A request goes back only after a step in which it was admitted, and only if somebody can use the
device at once: so nobody is put back and matched again for nothing, and every return is paid for
with a step that was computed, or with blocks that joined the tree.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.loading.priority import QueueEntry, order, preempts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    from sglang_cake.integration.scheduler.coordinator import Coordinator

# How often a prompt of which nothing is loaded any more is put back before it keeps its place.
MOST_INTERRUPTIONS = 4
# How many waiting prompts that are being loaded are looked at, the first ones first, for one that
# could compute now: each costs a prediction.
_LOOKED_AT = 8


class StepBudget(NamedTuple):
    """What a step has left."""

    chunk_tokens: int  # of its budget
    slots: int  # of device memory, what can be evicted for it included


def sort_queue(queue: "list[Req]", cake: "Coordinator", policy: "SchedulePolicy") -> None:
    """Reorder SGLang's waiting queue in place. Priorities, where they count, stay first."""
    if not cake.adaptive or not (cake.fair or any(cake.loads(req.rid) for req in queue)):
        return
    queue[:] = [queue[i] for i in order([_queue_entry(req, cake, policy) for req in queue])]


def serving(
    chunked: "Req | None",
    queue: "list[Req]",
    cake: "Coordinator",
    policy: "SchedulePolicy",
    *,
    fits: bool,
) -> list[str]:
    """Ids of all that are in prefill or wait for it, in the order in which the link works for them.

    One that waits for its loads is no reason to put the chunked request back; but it may have the
    link first, if the chunked request would give way to it then.

    Args:
        fits: whether somebody of the queue could be admitted in place of the chunked request.
    """
    if chunked is None:
        return [req.rid for req in queue]
    ahead: list[str] = []
    if fits and cake.adaptive and cake.racing(chunked.rid) and may_requeue(chunked, cake):
        running = _queue_entry(chunked, cake, policy)
        loading = [_queue_entry(req, cake, policy) for req in queue if cake.racing(req.rid)]
        ahead = [
            each.rid for each in loading if each.remaining_s is not None and preempts(each, running)
        ]
    first = {*ahead, chunked.rid}
    return [*ahead, chunked.rid, *(req.rid for req in queue if req.rid not in first)]


def find_preemptor(
    req: "Req",
    queue: "list[Req]",
    cake: "Coordinator",
    policy: "SchedulePolicy",
    room: StepBudget,
) -> "Req | None":
    """Who of those that wait goes before the request that is being chunked, which may go back, and
    can do so now."""
    running = _queue_entry(req, cake, policy)
    only_stored = running.remaining_s is None or not cake.adaptive

    def first(each: "Req") -> bool:
        if only_stored and not cake.loads(each.rid):
            return False
        queue_entry = _queue_entry(each, cake, policy)
        if cake.adaptive:
            return preempts(queue_entry, running)
        # The order is SGLang's: only one that was before it, and left it the device, goes first.
        if not queue_entry.yielded or queue_entry.level > running.level:
            return False
        one, other = cake.restore(each.rid), cake.restore(req.rid)
        return one is not None and other is not None and one.arrived_s < other.arrived_s

    return next(_able(filter(first, queue), cake, room), None)


def may_yield(req: "Req", queue: "list[Req]", cake: "Coordinator", room: StepBudget) -> bool:
    """Whether the chunked request, which cannot use the device now and may go back, leaves it to
    those behind it.

    It will be back before it is late: its loads last at least as long as the step that others would
    begin now, and none of them would then keep the device for longer than that step.
    """
    restore = cake.restore(req.rid)
    if restore is None:
        return False
    others_tokens = 0
    for each in _able(queue, cake, room):
        tokens = len(each.origin_input_ids) + len(each.output_ids)
        if tokens > room.chunk_tokens and not may_requeue(each, cake):
            return False
        others_tokens += tokens
    step_s = cake.step_costs.costs(restore).prefill.step_s(0, min(others_tokens, room.chunk_tokens))
    return 0 < step_s <= restore.to_land_s


def requeue(
    req: "Req", queue: "list[Req]", tree: CakeRadixCache, before: "Req | None" = None
) -> None:
    """The chunked request, whose chunks are in the tree, waits in the queue again, first; or
    second, after `before` of the queue."""
    tree.releasing = req.rid
    release_kv_cache(req, tree, checkpoint=False)
    tree.releasing = None
    # What `Req.reset_for_retract` does, but for what the chunk under way still needs: its result
    # is yet to be processed, and must be taken for a middle chunk's.
    req.prefix_len = 0
    req.extend_end = None
    req.last_node = None
    req.lock = None
    req.num_matched_prefix_tokens = 0
    req.kv_rotation_base = None
    req.kv.cache_protected_len = 0
    req.kv.cache_inserted_len = 0
    req.kv.kv_committed_len = 0
    if before is None:
        queue.insert(0, req)
    else:
        queue.remove(before)
        queue[:0] = [before, req]


def may_requeue(req: "Req", cake: "Coordinator") -> bool:
    """Whether the chunked request may wait in the queue again."""
    # Logprobs of a prompt are gathered chunk by chunk: such a request cannot start over. One that
    # is none of ours may have more that cannot.
    restore = cake.restore(req.rid)
    if req.return_logprob or restore is None:
        return False
    # One that is only computed is interrupted a few times: it began before who interrupts it.
    return cake.racing(req.rid) or restore.times_requeued < MOST_INTERRUPTIONS


def _able(queue: "Iterable[Req]", cake: "Coordinator", room: StepBudget) -> "Iterator[Req]":
    """Who of `queue` could compute now."""
    looked_at = 0
    for req in queue:
        if cake.racing(req.rid):
            looked_at += 1
            if looked_at > _LOOKED_AT:
                continue
        if _slots(req) < room.slots and not cake.idle(req.rid, room.chunk_tokens):
            yield req


def _slots(req: "Req") -> int:
    """What it may need until its end, as SGLang reckons; nothing of it is taken to be there."""
    new: int = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    return int(len(req.origin_input_ids) + len(req.output_ids) + min(new, CLIP_MAX_NEW_TOKENS))


def _queue_entry(req: "Req", cake: "Coordinator", policy: "SchedulePolicy") -> QueueEntry:
    if not policy.enable_priority_scheduling or req.priority is None:
        return cake.queue_entry(req)
    return cake.queue_entry(req, req.priority * policy.priority_sign)
