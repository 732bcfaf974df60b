"""Hooks into SGLang's scheduler: arrivals, the poll of each step, the order of the queue.

On a prefill server (`--disaggregation-mode prefill`), a request waits in a queue of its own until a
decode server is ready for it. Its blocks are looked up and loaded meanwhile. A decode server loads
nothing, and stores what it generates.
"""

import logging
import random
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.errors import CakeError
from sglang_cake.integration import response_stats
from sglang_cake.integration.boundary import BOUNDARY, guarded, register
from sglang_cake.integration.compat import request_source, spare_metadata
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.request.request_keys import keep_apart_from_adapters, key_of_client
from sglang_cake.integration.scheduler import queue_order
from sglang_cake.integration.scheduler.prefill_adder import CakePrefillAdder, others_fit

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_cake.integration.scheduler.coordinator import Coordinator

logger = logging.getLogger("sglang_cake")

# The pause between two polls that only wait for other servers: members of a KV-Runahead group, or
# decode servers. Their messages do not wake the scheduler.
_POLL_PAUSE_S = 0.0005
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TRANSFERS = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
# SGLang's ranks shuffle their queues with Python's global generator, seeded alike on all of them. A
# library that draws from it on one rank, as boto does for the pause before a retry, would have the
# ranks compute different requests. Each rank shuffles with this one.
_SHUFFLES = random.Random(0)
_OFF = "cake is switched off after failures, which the server's log has; start the server again"


def install() -> None:
    """Register the scheduler hooks. Call while plugins are being loaded."""
    register(f"{_POLICY}.calc_priority", _prioritized, HookType.AFTER)
    register(f"{_POLICY}._sort_randomly", _sort_randomly, HookType.AROUND)
    register(f"{_SCHEDULER}.get_prefill_adder_class", _adder_class, HookType.AFTER)
    register(f"{_SCHEDULER}.can_schedule_lora_req", _adapters_in_use, HookType.BEFORE)
    register(f"{_SCHEDULER}._process_hicache_events", _poll, HookType.AFTER)
    register(f"{_SCHEDULER}._add_request_to_queue", _arrived, HookType.AFTER)
    register(f"{_SCHEDULER}.optimistic_release_and_requeue", _starts_over, HookType.AFTER)
    register(f"{_SCHEDULER}.maybe_send_cached_prefix_chunk", _send_prefix, HookType.AROUND)
    register(f"{_SCHEDULER}.send_kv_chunk", _send_digest, HookType.BEFORE)
    register(f"{_BATCH}.prepare_for_extend", _prepare, HookType.AROUND, unsafe=True)
    # If it fails, the tree may have KV of another namespace.
    register(f"{_TRANSFERS}._commit_transfer_to_req", _received, HookType.AFTER, unsafe=True)
    register(f"{_REQ}.build_rebootstrap_payload", _recomputed, HookType.AFTER)
    register(f"{_SCHEDULER}.process_decode_queue", _poll, HookType.AFTER)
    register(f"{_SCHEDULER}.on_idle", _idle, HookType.AFTER)
    register(f"{_SCHEDULER}.attach_hicache_storage_wrapped", _attach_store, HookType.AROUND)
    register(f"{_SCHEDULER}.detach_hicache_storage_wrapped", _detach_store, HookType.AROUND)


def _sort_randomly(original: Any, waiting_queue: "list[Req]") -> None:
    """`--schedule-policy random`."""
    _SHUFFLES.shuffle(waiting_queue)


def _prepare(original: Any, batch: Any) -> None:
    tree = batch.tree_cache
    is_cakes = isinstance(tree, CakeRadixCache)
    if is_cakes:  # also while cake is off: requests may have gone back to the queue before
        for req in batch.reqs:
            response_stats.starts_at_prefix(req)
    original(batch)
    if is_cakes:
        tree.restart_windows(batch)


def _coordinator(scheduler: "Scheduler") -> "Coordinator | None":
    return getattr(scheduler.tree_cache, "coordinator", None)


def _adder_class(original: Any, scheduler: "Scheduler") -> Any:
    return original if _coordinator(scheduler) is None else partial(CakePrefillAdder, scheduler)


def _adapters_in_use(scheduler: "Scheduler", req: "Req", running: set[str | None]) -> None:
    """SGLang counts the adapter of each request that it gave to the adder, admitted or not. The
    adapter of a request that was held back must not count, so that requests after it get its place.

    With `--enable-lora-overlap-loading`, SGLang has loaded that adapter already, and it counts.
    Otherwise another adapter would be loaded over it now, and be overwritten in the next step."""
    coordinator = _coordinator(scheduler)
    if coordinator is not None and not scheduler.enable_lora_overlap_loading:
        running -= coordinator.held_adapters
        coordinator.held_adapters = set()
        coordinator.new_adapters = {req.lora_id} - running


def _prioritized(_: None, policy: Any, queue: "list[Req]", *args: Any, **kwargs: Any) -> None:
    coordinator = getattr(policy.tree_cache, "coordinator", None)
    if coordinator is not None:
        with coordinator.timed():
            queue_order.sort_queue(queue, coordinator)


def _poll(_: None, scheduler: "Scheduler", *args: Any, **kwargs: Any) -> None:
    coordinator = _coordinator(scheduler)
    tree = scheduler.tree_cache
    if coordinator is None:
        return
    with coordinator.timed():
        if getattr(scheduler, "prefill_decode_interval", 0):
            coordinator.step_costs.ran(decode=_decodes(scheduler.last_batch))
        # Without a prompt to prefill nothing is decided. Ranks reduce then only after an unsafe
        # hook, which may have failed on one of them: that rank has no request to reduce.
        handshaking = _handshaking(scheduler)
        prompts = scheduler.chunked_req is not None or bool(scheduler.waiting_queue or handshaking)
        reduces = prompts or BOUNDARY.unsafe_hook_called
        BOUNDARY.unsafe_hook_called = False
        if (reduces or coordinator.off_everywhere) and not coordinator.on_everywhere():
            tree.let_go()
            return
        _identify(tree)
        serving = _serving(scheduler, coordinator)
        chunked = None if scheduler.chunked_req is None else scheduler.chunked_req.rid
        if serving is None:  # all ranks poll, with the same requests, whatever fails on one
            waiting = [req.rid for req in scheduler.waiting_queue]
            serving = waiting if chunked is None else [chunked, *waiting]
        held = [req.rid for req in handshaking]
        coordinator.poll([*serving, *held], chunked, handshaking=frozenset(held))
        if tree.saving is not None:
            tree.saving.polled(lambda record: coordinator.record(record.req) is record)
    if tree.runahead is not None:
        tree.runahead.poll(scheduler)


def _decodes(batch: "ScheduleBatch | None") -> bool:
    """Whether a step prefills nothing, on any rank that runs its steps with this one."""
    if batch is None or batch.is_extend_in_batch:
        return False
    return not batch.forward_mode.is_extend_or_draft_extend_or_mixed()


@guarded("Identity.poll", unsafe=True)
def _identify(tree: CakeRadixCache) -> None:
    """Take a namespace that has been found in the background."""
    if tree.service is not None:
        tree.service.identity.poll()


@guarded("Scheduler._process_hicache_events")
def _serving(scheduler: "Scheduler", coordinator: "Coordinator") -> list[str]:
    chunked = scheduler.chunked_req
    queue = scheduler.waiting_queue
    fits = chunked is not None and bool(queue)
    fits = fits and others_fit(scheduler, scheduler.running_batch, chunked)
    return queue_order.serving(chunked, queue, coordinator, fits=fits)


def _handshaking(scheduler: "Scheduler") -> "list[Req]":
    """The requests of a prefill server that no decode server is ready for, in order of arrival;
    the same ones on every rank."""
    queue = scheduler.disagg_prefill_bootstrap_queue
    return [] if queue is None else list(queue.queue)


def _is_sending(scheduler: "Scheduler") -> bool:
    """Whether a prefill server has a request whose KV is being sent, or one that was begun before a
    decode server was ready for it."""
    sending = scheduler.disagg_prefill_inflight_queue
    if sending is None:  # not a prefill server
        return False
    prompts = (scheduler.chunked_req, *scheduler.waiting_queue)
    return bool(sending) or any(req is not None and req.pending_bootstrap for req in prompts)


def _arrived(_: None, scheduler: "Scheduler", req: "Req", *args: Any, **kwargs: Any) -> None:
    keep_apart_from_adapters(req)  # the tree is asked for no match before
    queues = (scheduler.waiting_queue, _handshaking(scheduler))
    if any(queue and queue[-1] is req for queue in queues):  # otherwise SGLang refused it
        _arrive(scheduler, req)


def _starts_over(_: None, scheduler: "Scheduler", req: "Req") -> None:
    """A prompt that was computed before a decode server was ready has given its row back."""
    _arrive(scheduler, req)


def _arrive(scheduler: "Scheduler", req: "Req") -> None:
    coordinator = _coordinator(scheduler)
    if coordinator is not None:
        BOUNDARY.health.arrived()
        tree = scheduler.tree_cache
        coordinator.arrive(req, lambda tokens, limit: tree.matched_tokens(req, tokens, limit))


def _send_prefix(original: Any, scheduler: "Scheduler", req: "Req", **options: bool) -> None:
    """Before a step, SGLang sends what a prompt has in the tree. It sends it after the step while
    loaded blocks are being copied: the step waits for them, and not every sender would.

    The loop without overlap schedule sends chunks between steps. Each sender waits there: it reads
    the numbers of the pages in the scheduler's stream, which waits for the copies."""
    coordinator = _coordinator(scheduler)
    if coordinator is None or not coordinator.copying:
        original(scheduler, req, **options)
    elif "allow_send" in options:  # in 0.5.22 it only sends
        original(scheduler, req, allow_send=False)


def _send_digest(
    scheduler: "Scheduler", req: "Req", last_chunk: bool = False, end_idx: int | None = None
) -> None:
    """Send the digest of a prompt with its last KV, for the decode server to compare."""
    if last_chunk and isinstance(scheduler.tree_cache, CakeRadixCache):
        spare = spare_metadata(scheduler.disagg_metadata_buffers, req.metadata_buffer_index)
        spare.zero_()
        coordinator = _coordinator(scheduler)
        if coordinator is not None:
            numbers = struct.unpack("7q", coordinator.prompt_digest(req))
            spare.copy_(torch.tensor(numbers, dtype=torch.int64))


def _received(_: None, transfers: "DecodeTransferQueue", decode_req: "DecodeRequest") -> None:
    """The KV of a prompt has come, unless the request has failed, or nothing was sent for it."""
    BOUNDARY.health.arrived()  # it came to no queue that `_arrived` knows
    coordinator = _coordinator(transfers.scheduler)
    req = decode_req.req
    if coordinator is None or req.skip_radix_cache_insert or req.finished():
        return
    spare = spare_metadata(transfers.metadata_buffers, decode_req.metadata_buffer_index)
    coordinator.save_answer(req, struct.pack("7q", *spare.tolist()))


def _recomputed(payload: dict[str, Any], req: "Req") -> dict[str, Any]:
    """A decode server has retracted a request, and the prefill server computes it once more. That
    server changes the extra key itself."""
    return payload | {"extra_key": key_of_client(req)}


def _idle(_: None, scheduler: "Scheduler") -> None:
    coordinator = _coordinator(scheduler)
    if coordinator is not None and coordinator.live and _handshaking(scheduler):
        time.sleep(_POLL_PAUSE_S)  # a handshake wakes no thread, and loads need the interpreter
        return
    if coordinator is None or not coordinator.waiting:
        return
    tree = scheduler.tree_cache
    requests = request_source(scheduler)
    if tree.runahead is not None:
        time.sleep(_POLL_PAUSE_S)
    elif requests is not None:  # otherwise this rank waits for the one that receives requests
        # Loads and requests of other ranks do not wake this one, nor does a decode server.
        others = not coordinator.alone or scheduler.require_mlp_sync or _is_sending(scheduler)
        tree.service.waker.sleep(requests, 0.0 if others else coordinator.loads_over_in_s)


def _attach_store(original: Any, scheduler: "Scheduler", request: Any) -> Any:
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    tree = scheduler.tree_cache
    if not isinstance(tree, CakeRadixCache):
        return original(scheduler, request)
    if tree.service is None:
        return AttachHiCacheStorageReqOutput(success=False, message=_OFF)
    try:
        tree.service.attach_store(request.hicache_storage_backend)
    except (CakeError, OSError) as error:
        logger.warning("cake: the store stays: %s", error)  # SGLang answers for one rank alone
        return AttachHiCacheStorageReqOutput(success=False, message=str(error))
    return AttachHiCacheStorageReqOutput(success=True, message="")


def _detach_store(original: Any, scheduler: "Scheduler", request: Any) -> Any:
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

    tree = scheduler.tree_cache
    if not isinstance(tree, CakeRadixCache):
        return original(scheduler, request)
    if tree.service is None:
        return DetachHiCacheStorageReqOutput(success=False, message=_OFF)
    tree.service.detach_store()
    return DetachHiCacheStorageReqOutput(success=True, message="")
