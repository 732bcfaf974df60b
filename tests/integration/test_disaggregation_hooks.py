"""What differs on a prefill server: where its requests wait, and what its sender may send."""

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from adder_harness import BareTree
from coordinator_harness import BLOCK, NAMESPACE, CoordinatorHarness, FakeReq, req_of
from kv_pools import Staging, mha, record_of
from registered_hooks import Hooks, hooks_of
from sglang.srt.lora.lora_registry import LoRARef

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest, Media, MediaItem, Span
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.copier import SlotCopy
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.request import request_keys
from sglang_cake.integration.request.media import media_numbers
from sglang_cake.integration.scheduler import scheduler_hooks


@pytest.fixture
def hooks() -> Hooks:
    return hooks_of(scheduler_hooks.install)


class PrefillServer:
    """What the hooks touch of the scheduler of a prefill server."""

    def __init__(self, harness: CoordinatorHarness) -> None:
        self.chunked_req = None
        self.waiting_queue: list[FakeReq] = []
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
        self.running_batch = None
        self.tree_cache = SimpleNamespace(
            coordinator=harness.coordinator,
            matched_tokens=lambda req, tokens, limit: 0,
            service=None,
            saving=None,
            helpers=None,
            let_go=lambda: None,
        )


@pytest.fixture
def harness() -> Iterator[CoordinatorHarness]:
    with CoordinatorHarness(mode="load") as made:
        yield made


@pytest.fixture
def server(harness: CoordinatorHarness) -> PrefillServer:
    return PrefillServer(harness)


def test_prefill_server_loads_while_a_request_awaits_its_decode_server(
    hooks: Hooks, harness: CoordinatorHarness, server: PrefillServer
) -> None:
    req = req_of(4.5)
    keys = harness.fill(req.origin_input_ids, {0, 1, 2, 3})
    server.disagg_prefill_bootstrap_queue.queue.append(req)
    hooks["_add_request_to_queue"](None, server, req)
    harness.open(*keys)
    record = harness.coordinator.live[req.rid]
    for _ in range(8):
        harness.settle()
        hooks["_process_hicache_events"](None, server)
    assert record.meet.island() == Span(0, 4 * BLOCK)
    assert len(record.memory.slots) == 4  # on the device before the handshake is over
    server.waiting_queue.append(server.disagg_prefill_bootstrap_queue.queue.pop())
    assert harness.step(req)
    assert record.stats.loaded_tokens == 4 * BLOCK
    harness.leave(req)


def test_prefill_server_refused_request_is_not_looked_up(
    hooks: Hooks, harness: CoordinatorHarness, server: PrefillServer
) -> None:
    server.disagg_prefill_bootstrap_queue.queue.append(req_of(2.5, "other"))
    hooks["_add_request_to_queue"](None, server, req_of(2.5, "refused"))
    assert list(harness.coordinator.live) == []


@pytest.mark.parametrize("of_size", ["", "|elastic_ep_size=8"])
def test_arrival_extra_key_that_is_the_id_of_an_adapter_is_kept_apart_from_its_requests(
    hooks: Hooks, server: PrefillServer, of_size: str
) -> None:
    """SGLang's tree would give KV of the bare model to requests with the adapter, and that would be
    stored as the adapter's."""
    lora_id = LoRARef.deterministic_id("name", "/path")
    theirs, client, tenant = (req_of(2.5, name) for name in ("theirs", "client", "tenant"))
    theirs.lora_id = lora_id
    theirs.extra_key = client.extra_key = lora_id + of_size
    tenant.extra_key = "tenant"
    for req in (theirs, client, tenant, client):  # and once more after a retraction
        hooks["_add_request_to_queue"](None, server, req)
    assert theirs.extra_key == lora_id + of_size
    assert client.extra_key == f"{lora_id}{of_size}/"
    assert tenant.extra_key == "tenant"


def test_arrival_extra_keys_that_differ_in_slashes_stay_different(
    hooks: Hooks, server: PrefillServer
) -> None:
    lora_id = LoRARef.deterministic_id("name", "/path")
    requests = [req_of(2.5, name) for name in "abcd"]
    for req, key in zip(requests, ("", "/", "//", "/x"), strict=True):
        req.extra_key = lora_id + key
        for _ in range(2):  # and once more after a retraction
            hooks["_add_request_to_queue"](None, server, req)
    found = [req.extra_key for req in requests]
    assert found == [f"{lora_id}/", f"{lora_id}//", f"{lora_id}///", f"{lora_id}/x"]


@pytest.mark.parametrize("key", [LoRARef.deterministic_id("name", "/path"), "tenant/", None])
def test_decode_server_retracted_request_is_computed_again_under_the_key_of_its_client(
    hooks: Hooks, server: PrefillServer, harness: CoordinatorHarness, key: str | None
) -> None:
    """The prefill server changes the key as it did before, so both servers find one digest."""
    here, there = req_of(2.5, "here"), req_of(2.5, "there")
    here.extra_key = key
    hooks["_add_request_to_queue"](None, server, here)
    payload = hooks["build_rebootstrap_payload"]({"extra_key": here.extra_key, "rid": "r"}, here)
    assert payload == {"extra_key": key, "rid": "r"}
    there.extra_key = payload["extra_key"]
    hooks["_add_request_to_queue"](None, server, there)
    digests = []
    for req in (here, there):
        chain = harness.coordinator.keys.chain(req)
        assert chain is not None
        digests.append(chain.prefix_digest(req.origin_input_ids))
    assert digests[0] == digests[1]


def test_prefill_server_ranks_reduce_while_a_request_awaits_its_decode_server(
    hooks: Hooks, server: PrefillServer
) -> None:
    calls: list[str] = []
    server.tree_cache.coordinator = SimpleNamespace(
        off_everywhere=False,
        adaptive=False,
        timed=server.tree_cache.coordinator.timed,
        on_everywhere=lambda: calls.append("together") or True,
        poll=lambda serving, chunked, handshaking: calls.extend(serving),
    )
    waiting, handshaking = req_of(2.5, "waiting"), req_of(2.5, "handshaking")
    server.disagg_prefill_bootstrap_queue.queue.append(handshaking)
    hooks["_process_hicache_events"](None, server)
    assert calls == ["together", "handshaking"]
    server.waiting_queue.append(waiting)
    hooks["_process_hicache_events"](None, server)
    assert calls[2:] == ["together", "waiting", "handshaking"]


def test_prefill_server_prompt_that_starts_over_is_looked_up_again(
    hooks: Hooks, harness: CoordinatorHarness, server: PrefillServer
) -> None:
    req = req_of(2.5)
    harness.arrive(req)
    harness.coordinator.release(req.rid)  # its row was released
    hooks["optimistic_release_and_requeue"](None, server, req)
    assert list(harness.coordinator.live) == [req.rid]


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_prefill_server_prefix_goes_out_behind_the_step_while_blocks_are_copied(
    hooks: Hooks, server: PrefillServer, copying: bool, allowed: bool
) -> None:
    server.tree_cache.coordinator = SimpleNamespace(copying=copying)
    sent: list[bool] = []
    send = lambda scheduler, req, allow_send: sent.append(allow_send)  # noqa: E731
    hooks["maybe_send_cached_prefix_chunk"](send, server, req_of(2.5), allow_send=allowed)
    server.tree_cache.coordinator = None
    hooks["maybe_send_cached_prefix_chunk"](send, server, req_of(2.5), allow_send=allowed)
    assert sent == [allowed and not copying, allowed]


@pytest.mark.parametrize("copying", [False, True])
def test_prefill_server_of_sglang_0_5_22_sends_no_prefix_while_blocks_are_copied(
    hooks: Hooks, server: PrefillServer, copying: bool
) -> None:
    """Its method has no `allow_send`."""
    server.tree_cache.coordinator = SimpleNamespace(copying=copying)
    sent: list[Any] = []
    send = lambda scheduler, req: sent.append(req)  # noqa: E731
    hooks["maybe_send_cached_prefix_chunk"](send, server, req := req_of(2.5))
    assert sent == ([] if copying else [req])


@pytest.mark.parametrize(
    ("place", "loads_over_in_s"),
    [
        ("bootstrap queue", []),
        ("inflight queue", [0.0]),
        ("waiting queue", [0.0]),
        ("in chunks", [0.0]),
        ("nowhere", [2.0]),
    ],
)
def test_prefill_server_sleeps_long_for_loads_only_while_no_request_awaits_its_decode_server(
    hooks: Hooks, server: PrefillServer, place: str, loads_over_in_s: list[float]
) -> None:
    """No message of a decode server wakes the scheduler: a finished transfer, or the handshake of a
    prompt that was begun before it, would be noticed late."""
    slept: list[float] = []
    server.tree_cache.coordinator = SimpleNamespace(
        waiting=True, live={"loads": None}, alone=True, loads_over_in_s=2.0
    )
    server.tree_cache.service = SimpleNamespace(
        waker=SimpleNamespace(sleep=lambda requests, over_in_s: slept.append(over_in_s))
    )
    server.tree_cache.runahead = None
    loads, other = (
        SimpleNamespace(pending_bootstrap=awaits) for awaits in (False, place != "nowhere")
    )
    scheduler: Any = server
    scheduler.require_mlp_sync = False
    scheduler.request_receiver = SimpleNamespace(recv_from_tokenizer="socket")
    scheduler.disagg_prefill_inflight_queue = [other] * (place == "inflight queue")
    scheduler.disagg_prefill_bootstrap_queue.queue += [other] * (place == "bootstrap queue")
    scheduler.waiting_queue = [loads, *[other] * (place == "waiting queue")]
    scheduler.chunked_req = other if place == "in chunks" else None
    hooks["on_idle"](None, scheduler)
    assert slept == loads_over_in_s
    assert BOUNDARY.counts["Scheduler.on_idle"] == 0


def test_device_slots_are_copying_until_the_last_block_of_the_tree_is_on_the_device() -> None:
    ended: set[int] = set()

    class Launcher:
        """A copier whose copies end when a test says so."""

        count = 0

        def check(self) -> None:
            pass

        def wait_launched(self, launches: Sequence[Future[Copy]]) -> list[Copy | None]:
            return [launched.result() for launched in launches]

        def load(self, copy: SlotCopy, staged: Any) -> None:
            self.count += 1
            number = self.count
            event: Any = SimpleNamespace(query=lambda: number in ended)
            copy.launched.set_result(Copy(event, event, number=number))

    kv = DeviceKV(mha(4 * BLOCK), block_tokens=BLOCK)
    staging = Staging(kv)
    allocator: Any = SimpleNamespace(
        alloc=lambda tokens: torch.arange(BLOCK, BLOCK + tokens),
        available_size=lambda: 2 * BLOCK,
        free_segment=lambda slots, start_pos: None,
    )
    copier: Any = Launcher()
    device_slots = DeviceSlots(kv, copier, allocator, lambda tokens: None, Counters())
    record = record_of(2, block=BLOCK)
    record.meet.found([True, True])
    for block in (1, 0):
        staging.land(record, block)
    assert device_slots.place(record, [0, 1])
    assert not device_slots.copying  # no copy into the tree
    device_slots.take_slots(record, Span(0, 2 * BLOCK - 1))
    for number in (1, 2):
        device_slots.check_copies()
        assert device_slots.copying
        ended.add(number)
    assert not device_slots.copying


# ---- from a prefill to a decode server ----


class Metadata:
    """Two requests' places in what a prefill server sends with KV."""

    def __init__(self) -> None:
        self.bootstrap_room = torch.zeros((2, 8), dtype=torch.uint64)
        self.bootstrap_room[:, 0] = 77  # SGLang's number


def sent(hooks: Hooks, coordinator: Any, req: Any, metadata: Metadata) -> None:
    scheduler = SimpleNamespace(tree_cache=BareTree(coordinator), disagg_metadata_buffers=metadata)
    hooks["send_kv_chunk"](scheduler, req)
    assert not metadata.bootstrap_room[:, 1:].view(torch.int64).any()
    hooks["send_kv_chunk"](scheduler, req, last_chunk=True)


def received(hooks: Hooks, coordinator: Any, req: Any, metadata: Metadata) -> None:
    assert metadata.bootstrap_room[:, 0].tolist() == [77, 77]
    transfers = SimpleNamespace(
        scheduler=SimpleNamespace(tree_cache=SimpleNamespace(coordinator=coordinator)),
        metadata_buffers=metadata,
    )
    hooks["_commit_transfer_to_req"](
        None, transfers, SimpleNamespace(req=req, metadata_buffer_index=1)
    )


def generating(req: FakeReq, *, finished: bool = False, fake: bool = False) -> Any:
    """The request on the decode server, with the first token of its answer."""
    same: Any = FakeReq(req.rid, req.origin_input_ids)
    same.output_ids = array("q", [1])
    same.cache_salt = req.cache_salt
    same.finished = lambda: finished
    same.skip_radix_cache_insert = fake
    return same


def test_decode_server_counts_the_requests_between_failures(hooks: Hooks) -> None:
    coordinator: Any = SimpleNamespace(answer=lambda req, digest: None)
    for _ in range(5):
        assert not BOUNDARY.health.failed()
        for number in range(500):
            received(hooks, coordinator, generating(req_of(1.5, str(number))), Metadata())


@pytest.mark.parametrize("blocks", [0.5, 4.5])
def test_decode_server_that_finds_the_same_digest_stores_only_what_is_behind_the_prompt(
    hooks: Hooks, harness: CoordinatorHarness, blocks: float
) -> None:
    req: Any = req_of(blocks)
    req.metadata_buffer_index = 1
    harness.arrive(req)
    metadata = Metadata()
    sent(hooks, harness.coordinator, req, metadata)
    harness.coordinator.release(req.rid)
    reads = len(harness.slow.waiting)
    answering = generating(req)
    received(hooks, harness.coordinator, answering, metadata)
    record = harness.coordinator.live[answering.rid]
    assert record.tokens == req.origin_input_ids
    assert record.agreed.stored == (True,) * int(blocks)  # the prefill server stores them
    assert not record.awaits_loader
    assert len(harness.slow.waiting) == reads
    assert not harness.coordinator.keys.suspended


@pytest.mark.parametrize("knows", ["neither", "prefill", "decode", "other weights"])
def test_decode_server_that_finds_another_namespace_stores_nothing_until_its_tree_is_empty(
    hooks: Hooks, harness: CoordinatorHarness, knows: str
) -> None:
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    before: Any = generating(req_of(2.5, "before"))
    metadata, coordinator = Metadata(), harness.coordinator
    coordinator.rebase(None if knows in ("neither", "decode") else NAMESPACE, suspended=False)
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    if knows in ("prefill", "neither"):
        coordinator.rebase(None, suspended=False)
    if knows == "decode":
        coordinator.rebase(NAMESPACE, suspended=False)
    if knows == "other weights":
        coordinator.rebase(Digest(b"o" * 32), suspended=False)
    harness.arrive(before)
    other = generating(req)
    received(hooks, coordinator, other, metadata)
    assert coordinator.on_everywhere()
    assert not other.skip_radix_cache_insert
    assert coordinator.keys.suspended
    assert list(coordinator.live) == []
    coordinator.rebase(NAMESPACE, suspended=coordinator.keys.suspended)
    harness.arrive(req)
    assert list(coordinator.live) == []
    coordinator.emptied()
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata_of := Metadata())
    received(hooks, coordinator, generating(req), metadata_of)
    assert list(coordinator.live) == [req.rid]


def picture(content: bytes) -> Media:
    """Of the last tokens of `req_of(2.5)`, in no full block."""
    return Media((MediaItem(content * 32, ((2 * BLOCK + 1, 2 * BLOCK + 5),)),))


DIFFERS = ["salt", "first token", "last token", "picture"]
DIFFERS += ["keys here", "keys there", "token without keys"]


@pytest.mark.parametrize("differs", DIFFERS)
def test_decode_server_prompt_that_differs_is_kept_out_of_the_tree_and_others_are_stored(
    hooks: Hooks, harness: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    """Each server renders templates, and fetches pictures, by itself."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    before, metadata, coordinator = req_of(2.5, "before"), Metadata(), harness.coordinator
    other = generating(req)
    match differs:
        case "salt":
            other.cache_salt = "other"
        case "first token":
            other.origin_input_ids = array("q", [9, *req.origin_input_ids[1:]])
        case "last token":
            other.origin_input_ids = array("q", [*req.origin_input_ids[:-1], 9])
        case "picture":
            pictures = {id(req): picture(b"a"), id(other): picture(b"b")}
            media_of = lambda each: pictures.get(id(each), Media())  # noqa: E731
            monkeypatch.setattr(request_keys, "media_of", media_of)
        case "keys here":
            other.session = object()
        case "keys there":
            req.session = object()
        case "token without keys":  # of the text before a picture, which the tree may share
            other.session = req.session = object()
            other.origin_input_ids = array("q", [9, *req.origin_input_ids[1:]])
    harness.arrive(before)
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    coordinator.release(req.rid)
    received(hooks, coordinator, other, metadata)
    assert coordinator.on_everywhere()  # the poll that follows
    assert other.skip_radix_cache_insert  # SGLang reads it when the request joins a batch
    assert list(coordinator.live) == ["before"]
    assert not coordinator.keys.suspended
    assert harness.counters.snapshot()["differing_prompts", ""] == 1
    received(hooks, coordinator, other, metadata)  # again, after a retraction
    assert coordinator.on_everywhere()
    assert list(coordinator.live) == ["before"]
    same = generating(before)
    before.metadata_buffer_index = 1
    sent(hooks, coordinator, before, metadata := Metadata())
    coordinator.release("before")
    received(hooks, coordinator, same, metadata)
    assert coordinator.on_everywhere()
    assert not same.skip_radix_cache_insert
    assert coordinator.record(same) is not None


def test_decode_server_prompts_that_differ_are_one_line_of_the_log(
    hooks: Hooks, harness: CoordinatorHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Any client can send them."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    metadata = Metadata()
    harness.arrive(req)
    sent(hooks, harness.coordinator, req, metadata)
    for number in range(5):
        other = generating(req_of(2.5, f"other {number}"))
        other.cache_salt = "other"
        received(hooks, harness.coordinator, other, metadata)
        assert harness.coordinator.on_everywhere()
    assert harness.counters.snapshot()["differing_prompts", ""] == 5
    assert [record.args for record in caplog.records] == [("other 0", 1)]


@pytest.mark.parametrize("foreign", ["namespace", "adapter"])
def test_decode_server_whose_tree_has_foreign_kv_keeps_no_prompt_out_of_it(
    hooks: Hooks, harness: CoordinatorHarness, foreign: str
) -> None:
    """It stores nothing of it anyway, and SGLang goes on using its tree."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    req.lora_id = None if foreign == "namespace" else "adapter"
    metadata, coordinator = Metadata(), harness.coordinator
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    if foreign == "namespace":
        coordinator.rebase(NAMESPACE, suspended=True)
    else:
        coordinator.keys.adapter_is_foreign("adapter")
    coordinator.release(req.rid)
    other = generating(req)
    other.lora_id = req.lora_id
    received(hooks, coordinator, other, metadata)
    assert coordinator.on_everywhere()
    assert not other.skip_radix_cache_insert
    assert list(coordinator.live) == []


@pytest.mark.parametrize("adapter", ["unknown", "other"])
def test_decode_server_that_cannot_name_an_adapter_stores_nothing_of_that_adapter_alone(
    hooks: Hooks, harness: CoordinatorHarness, adapter: str
) -> None:
    """Its files are still being hashed, or tensors were sent, which each server names by itself."""
    coordinator = harness.coordinator

    def answers(rid: str, prefill_adapter: str | None, decode_adapter: str | None) -> None:
        req: Any = req_of(2.5, rid)
        req.metadata_buffer_index = 1
        req.lora_id = prefill_adapter
        harness.arrive(req)
        metadata = Metadata()
        sent(hooks, coordinator, req, metadata)
        coordinator.release(rid)
        answering = generating(req)
        answering.lora_id = decode_adapter
        received(hooks, coordinator, answering, metadata)

    answers("before", "other", "other")
    answers("a", "adapter", adapter)
    answers("b", None, None)
    answers("c", adapter, adapter)
    answers("d", "adapter", "adapter")
    assert not coordinator.keys.suspended
    # Where the adapter is its own, the tree may give it the other server's KV.
    kept = ["before"] if adapter == "unknown" else []
    assert list(coordinator.live) == [*kept, "b", "d"]
    coordinator.emptied()
    answers("e", "other", "other")
    assert list(coordinator.live) == ["e"]


@pytest.mark.parametrize("prefill_adapter", ["adapter", "other", "unknown"])
def test_decode_server_knows_the_adapter_of_a_prompt_of_a_server_with_a_detached_store(
    hooks: Hooks, harness: CoordinatorHarness, prefill_adapter: str
) -> None:
    """The prefill server has other files under the name of the adapter, and its store is detached.
    The KV that it sends joins the tree, below prompts with this adapter."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    req.lora_id = prefill_adapter
    metadata, coordinator = Metadata(), harness.coordinator
    coordinator.store_detached = True
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    coordinator.release(req.rid)
    coordinator.store_detached = False
    answering = generating(req)
    answering.lora_id = "adapter"
    received(hooks, coordinator, answering, metadata)
    own = [req.rid] if prefill_adapter == "adapter" else []
    assert list(coordinator.live) == own
    assert not coordinator.keys.suspended
    coordinator.release(req.rid)
    harness.arrive(answering)
    assert list(coordinator.live) == own


@pytest.mark.parametrize("detached", ["prefill", "decode"])
def test_decode_server_with_a_detached_store_on_either_side_keeps_its_namespace_and_its_tree(
    hooks: Hooks, harness: CoordinatorHarness, detached: str
) -> None:
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    metadata, coordinator = Metadata(), harness.coordinator
    coordinator.store_detached = detached == "prefill"
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    coordinator.release(req.rid)
    coordinator.store_detached = detached == "decode"
    received(hooks, coordinator, answering := generating(req), metadata)
    assert coordinator.on_everywhere()
    assert list(coordinator.live) == ([] if detached == "decode" else [req.rid])
    assert not answering.skip_radix_cache_insert
    assert not coordinator.keys.suspended


def test_decode_server_knows_the_namespace_of_a_prompt_without_keys(
    hooks: Hooks, harness: CoordinatorHarness
) -> None:
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    req.session = object()
    metadata, coordinator = Metadata(), harness.coordinator
    harness.arrive(req)
    sent(hooks, coordinator, req, metadata)
    other = generating(req)
    other.session = req.session
    received(hooks, coordinator, other, metadata)
    assert list(coordinator.live) == []
    assert not coordinator.keys.suspended
    coordinator.rebase(Digest(b"o" * 32), suspended=False)  # the prefill server has other weights
    received(hooks, coordinator, other, metadata)
    assert coordinator.keys.suspended


@pytest.mark.parametrize("lost", ["store attached", "namespace known", "failure", "emptied"])
def test_prefill_server_without_the_record_of_a_prompt_still_names_it(
    hooks: Hooks, harness: CoordinatorHarness, lost: str
) -> None:
    """The decode server keeps its KV: otherwise the next turn would be sent whole."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    same, coordinator = generating(req), harness.coordinator
    coordinator.store_detached = lost == "store attached"
    if lost == "namespace known":
        coordinator.rebase(None, suspended=False)
    harness.arrive(req)
    match lost:
        case "store attached":
            coordinator.store_detached = False
        case "namespace known":
            coordinator.rebase(NAMESPACE, suspended=False)
        case "failure":
            coordinator.release_all()
        case "emptied":
            coordinator.emptied()
    sent(hooks, coordinator, req, metadata := Metadata())
    received(hooks, coordinator, same, metadata)
    assert coordinator.on_everywhere()
    assert not same.skip_radix_cache_insert
    assert coordinator.record(same) is not None


def test_prompt_digest_without_keys_does_not_depend_on_the_numbers_of_media(
    harness: CoordinatorHarness,
) -> None:
    """Each process numbers media anew."""
    keys, digests = harness.coordinator.keys, []
    for number, last in ((5, 3), (6, 3), (5, 4)):
        req: Any = FakeReq("r", array("q", [1, media_numbers() + number, 2, last]))
        digests.append(keys.prompt_digest(req, req.origin_input_ids, None))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("how", [{"finished": True}, {"fake": True}])
def test_decode_server_request_without_kv_is_left_alone(
    hooks: Hooks, harness: CoordinatorHarness, how: dict[str, bool]
) -> None:
    received(hooks, harness.coordinator, generating(req_of(2.5), **how), Metadata())
    assert not harness.coordinator.keys.suspended
    assert list(harness.coordinator.live) == []


def test_prefill_server_that_failed_names_neither_weights_nor_prompt(
    hooks: Hooks, harness: CoordinatorHarness
) -> None:
    """Its tree may have KV that no key names, before the other ranks know that it is off."""
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    harness.arrive(req)
    harness.coordinator.release(req.rid)
    harness.coordinator.switch_off()
    sent(hooks, harness.coordinator, req, metadata := Metadata())
    assert not metadata.bootstrap_room[:, 1:].view(torch.int64).any()


def test_prefill_server_sends_no_digest_of_an_earlier_request(
    hooks: Hooks, harness: CoordinatorHarness
) -> None:
    req: Any = req_of(2.5)
    req.metadata_buffer_index = 1
    harness.arrive(req)
    metadata = Metadata()
    place = metadata.bootstrap_room.view(torch.int64)[1, 1:]
    sent(hooks, harness.coordinator, req, metadata)
    of_prompt = place.tolist()
    for coordinator in (harness.coordinator, None):
        harness.coordinator.rebase(None, suspended=False)
        place.copy_(torch.tensor(of_prompt))
        scheduler = SimpleNamespace(
            tree_cache=BareTree(coordinator), disagg_metadata_buffers=metadata
        )
        hooks["send_kv_chunk"](scheduler, req, last_chunk=True)
        assert any(of_prompt)
        assert not place.any()
