"""The scheduler thread's side, driven as SGLang drives it, with a store held by the hand."""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_pools import allocator_of, as_bytes, buffers_of, mha, scramble

from sglang_cake.core.buffers import BufferPool
from sglang_cake.core.config import CakeConfig
from sglang_cake.core.counters import Counters
from sglang_cake.core.io_thread import IoThread
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.scheduler.step_poll import JUDGED
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.fair_queueing import TURN_TOKENS
from sglang_cake.loading.loader import Loader
from sglang_cake.stores.base import Store
from sglang_cake.stores.memory_store import MemoryStore
from sglang_cake.testing.faulty import FaultyStore, SlowStore

BLOCK, PAGE, CHUNK, PATIENCE_S = 16, 4, 40, 60.0
NAMESPACE = Digest(b"n" * 32)
PREFILL = PrefillCost(0.0, 1e-3, 1e-9, error=0.0)
LOAD = LoadCost(0.0, 0.05, error=0.0, depth=2)


@dataclass(eq=False)
class FakeReq:
    """What the coordinator touches of SGLang's request."""

    rid: str
    origin_input_ids: array
    prefix_len: int = 0
    output_ids: array = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    input_embeds: Any = None
    positional_embed_overrides: Any = None
    multimodal_inputs: Any = None
    session: Any = None
    sampling_params: Any = field(
        default_factory=lambda: SimpleNamespace(custom_params=None, max_new_tokens=8)
    )
    customized_info: dict | None = None
    retracted_stain: bool = False
    cached_tokens: int = 0
    cached_tokens_storage: int = 0
    storage_hit_length: int = 0
    storage_hit_start: int | None = None
    _cache_breakdown_computed: bool = False
    owned: list[torch.Tensor] = field(default_factory=list)  # every slot it has, for the audit

    def _compute_max_prefix_len(self, tokens: int) -> int:
        return max(0, tokens - 1)


class Desk:
    def __init__(
        self,
        *,
        slots: int = 20 * BLOCK,
        staging: int = 6,
        mode: Any = "both",
        priority: Any = "adaptive",
        prefill: PrefillCost = PREFILL,
        store: Callable[[Store], Store] | None = None,
        ranks: bool = False,
        io: Any = None,
        load: LoadCost = LOAD,
        chunk: int = 64,
    ) -> None:
        """Args: store: is put in front of what is stored; ranks: there are others (`peer`)."""
        self.pool = mha(slots, page=PAGE)
        scramble(self.pool, 1)
        self.allocator = allocator_of(self.pool, PAGE)
        self.size = slots
        self.kv = DeviceKV(self.pool, block_tokens=BLOCK)
        self.memory = MemoryStore()
        self.slow = SlowStore(self.memory)
        self.faulty = FaultyStore(self.slow)
        self.front: Any = self.faulty if store is None else store(self.memory)
        self.io = io or IoThread("test-io")
        self.peer: Callable[[torch.Tensor], None] | None = None
        self.counters = Counters()
        self.staging = BufferPool(staging, self.kv.new_buffer)
        loader = self.loader = Loader(
            self.front,
            self.staging,
            self.io,
            self.counters,
            queue_depth=load.depth,
            prior=load,
        )
        self.step_costs = StepCosts(loader, prefill, chunk_tokens=chunk, pipelined=False)
        self.device_slots = DeviceSlots(
            self.kv, self.allocator, lambda tokens: None, self.counters, loader.copied
        )
        self.cake = Coordinator(
            loader,
            self.device_slots,
            config=CakeConfig(
                mode=mode, block_tokens=BLOCK, min_load_tokens=BLOCK, priority=priority
            ),
            page_tokens=PAGE,
            step_costs=self.step_costs,
            adapter=self.digest,
            consensus=RankConsensus(self.reduce if ranks else None),
            counters=self.counters,
            reporter=RequestReporter(None, speaks=True, metrics=None),
        )
        self.cake.rebase(NAMESPACE, suspended=False)

    def reduce(self, numbers: torch.Tensor) -> None:
        """What another rank says, if a test has one."""
        if self.peer is not None:
            self.peer(numbers)

    def digest(self, lora_id: str) -> str | None:
        return None if lora_id == "unknown" else "digest of " + lora_id.split("@")[0]

    # ---- the store and its thread ----

    def fill(self, tokens: array, blocks: set[int]) -> list[BlockKey]:
        keys = KeyChain(KeySeed(NAMESPACE), BLOCK).of(tokens)

        async def put() -> None:
            for b in blocks:
                await self.memory.put(keys[b], memoryview(self.block(b)))

        self.io.run(put(), PATIENCE_S)
        return keys

    def block(self, number: int) -> bytes:
        generator = torch.Generator().manual_seed(number)
        size = (self.kv.layout.block_bytes,)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return bytes(raw.numpy())

    def settle_io(self) -> None:
        async def quiet() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.io.run(quiet(), PATIENCE_S)

    def open(self, *keys: BlockKey) -> None:
        async def release() -> None:
            self.slow.release(*keys)

        self.io.run(release(), PATIENCE_S)
        self.settle_io()

    # ---- SGLang's part ----

    def arrive(self, req: FakeReq, matched: int = 0) -> None:
        if matched:
            req.owned.append(self.allocator.alloc(matched))
        req.prefix_len = matched
        self.cake.arrive(req, lambda tokens, limit: matched)
        self.settle_io()

    def attach(self, req: FakeReq, slots: torch.Tensor, stop: int) -> None:
        assert stop - req.prefix_len == len(slots)
        want, have = b"", b""
        for token, slot in zip(range(req.prefix_len, stop), slots.tolist(), strict=True):
            data, at = self.block(token // BLOCK), 0
            for buffer, size in zip(
                buffers_of(self.pool), self.kv.layout.plane_token_bytes, strict=True
            ):
                start = at + token % BLOCK * size
                want += data[start : start + size]
                have += bytes(as_bytes(buffer)[slot].numpy())
                at += size * BLOCK
        assert want == have
        req.owned.append(slots)
        req.prefix_len = stop

    def step(self, req: FakeReq) -> bool:
        """One scheduling step of a request that is served. True: its prefill is over."""
        if self.cake.hold(req):
            return False
        self.cake.settle(req, self.attach)
        plan = self.cake.plan(req, CHUNK)
        if plan is not None and plan.wait:
            return False
        total = len(req.origin_input_ids)
        stop = min(total, req.prefix_len + CHUNK) if plan is None else plan.stop
        pages = -(-stop // PAGE) - -(-req.prefix_len // PAGE)
        slots = self.allocator.alloc(pages * PAGE)
        if slots is None:
            self.cake.reclaim(pages * PAGE - self.allocator.available_size())
            slots = self.allocator.alloc(pages * PAGE)
            if slots is None:
                return False
        if pages:
            req.owned.append(slots)
        self.cake.claimed(req, stop)
        req.prefix_len = stop
        return stop == total

    def leave(self, req: FakeReq) -> None:
        """Its slots go back, as when the tree is emptied."""
        self.cake.end(req.rid)
        for slots in req.owned:
            self.allocator.free(slots)
        req.owned.clear()

    def all_back(self) -> None:
        self.settle_io()
        self.cake.poll([])
        self.settle_io()
        self.cake.poll([])
        assert self.cake.held_tokens == 0
        assert self.allocator.available_size() == self.size
        assert self.staging.free == self.staging.capacity
        assert self.slow.waiting == []


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.io.close()


@pytest.fixture
def two() -> Iterator[Desk]:
    """One of two ranks."""
    made = Desk(ranks=True)
    yield made
    made.io.close()


def req_of(blocks: float, rid: str = "r") -> FakeReq:
    return FakeReq(rid, array("q", range(int(blocks * BLOCK))))


@pytest.mark.parametrize("blocks", [1, 4, 4.5, 0.5, 1.25])
@pytest.mark.parametrize("matched", [0, 4, 12])
def test_a_wholly_stored_prompt_is_loaded(desk: Desk, blocks: float, matched: int) -> None:
    req = req_of(blocks)
    if matched >= len(req.origin_input_ids):
        return
    full = int(blocks)
    desk.open(*desk.fill(req.origin_input_ids, set(range(full))))
    desk.arrive(req, matched)
    for _ in range(3):
        desk.cake.poll([req.rid])
        desk.settle_io()
    assert desk.step(req)
    limit = (len(req.origin_input_ids) - 1) // PAGE * PAGE
    loaded = max(0, min(full * BLOCK, limit) - matched)
    [story] = req.customized_info["cake"]
    assert story["loaded_tokens"] == loaded
    assert story["matched_tokens"] == matched
    assert story["computed_tokens"] == len(req.origin_input_ids) - matched - loaded
    sides = desk.counters.snapshot()
    assert sides["fallback", "load"] == (loaded >= BLOCK)
    assert sides["fallback", "compute"] == 0
    desk.leave(req)
    desk.all_back()


def test_a_prompt_whose_loads_do_not_come_is_left_to_computing(desk: Desk) -> None:
    req = req_of(4.5)
    keys = desk.fill(req.origin_input_ids, set(range(4)))
    desk.arrive(req)
    for _ in range(10):
        desk.cake.poll([req.rid])
        if desk.step(req):
            break
    sides = desk.counters.snapshot()
    assert (sides["fallback", "compute"], sides["fallback", "load"]) == (1, 0)
    desk.open(*keys)
    desk.leave(req)
    desk.all_back()


def test_compute_and_load_meet(desk: Desk) -> None:
    req = req_of(8.5)
    keys = desk.fill(req.origin_input_ids, set(range(8)))
    desk.arrive(req)
    desk.cake.poll([req.rid])
    assert not desk.step(req)
    assert req.prefix_len == 40  # the meet is far: a whole chunk
    desk.open(*keys)
    for _ in range(20):  # how far each side goes is decided by how quick it was
        desk.cake.poll([req.rid])
        desk.settle_io()
        if desk.step(req):
            break
    [story] = req.customized_info["cake"]
    assert story["computed_tokens"] + story["loaded_tokens"] == 136
    assert story["computed_tokens"] >= 40
    assert story["loaded_tokens"] >= BLOCK
    assert story["matched_tokens"] == 0
    assert story["meet_token"] == 136 - 8 - story["loaded_tokens"]
    sides = desk.counters.snapshot()
    assert sides["fallback", "compute"] == sides["fallback", "load"] == 0
    desk.leave(req)
    desk.all_back()


@pytest.fixture
def auto() -> Iterator[Desk]:
    """Four blocks and a half are computed in 0.072 s, before one is loaded."""
    load = LoadCost(0.08, 0.05, error=0.0, depth=2)
    made = Desk(mode="auto", load=load)
    yield made
    made.io.close()


def test_what_waits_is_loaded_when_the_link_turns_out_to_be_quick(
    auto: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = req_of(4.5)
    keys = auto.fill(req.origin_input_ids, set(range(4)))
    auto.arrive(req)
    auto.cake.poll([req.rid])
    assert auto.slow.waiting == []
    assert not auto.cake.racing(req.rid)
    monkeypatch.setattr(auto.loader, "cost_of", lambda ticket: LoadCost(0.0, 1e-4, error=0.0))
    auto.cake.poll([req.rid])
    auto.settle_io()
    assert auto.slow.waiting == [keys[3], keys[2]]
    auto.leave(req)
    auto.open(*keys)
    auto.all_back()


def test_what_waits_behind_others_is_loaded_until_they_are_gone(auto: Desk) -> None:
    ahead, req = FakeReq("ahead", array("q", range(1000, 3000))), req_of(4.5)
    keys = auto.fill(req.origin_input_ids, set(range(4)))
    auto.arrive(ahead)
    auto.arrive(req)
    assert auto.slow.waiting == [keys[3], keys[2]]  # at once, before the next poll
    auto.cake.poll(["ahead", req.rid])
    assert auto.cake.racing(req.rid)
    auto.leave(ahead)
    auto.cake.poll([req.rid])
    auto.settle_io()
    assert not auto.cake.racing(req.rid)
    assert auto.slow.waiting == []
    late = FakeReq("late", array("q", range(1000, 3000)))
    auto.arrive(late)
    auto.cake.poll(["late", req.rid])  # a policy puts it first
    auto.settle_io()
    assert auto.slow.waiting == [keys[3], keys[2]]
    for each in (late, req):
        auto.leave(each)
    auto.open(*keys)
    auto.all_back()


def test_of_many_that_wait_a_few_are_judged_anew_in_each_poll(
    auto: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    reqs = [req_of(4.5, str(i)) for i in range(3 * JUDGED)]
    auto.fill(reqs[0].origin_input_ids, set(range(4)))
    for req in reqs:
        auto.arrive(req)
    rids = [req.rid for req in reqs]
    auto.cake.poll(rids)
    asked: list[str] = []
    worth = auto.step_costs.worth

    def counted(restore: Any, *args: Any) -> bool:
        asked.append(restore.rid)
        return worth(restore, *args)

    monkeypatch.setattr(auto.step_costs, "worth", counted)
    for poll in range(1, 4):
        auto.cake.poll(rids)
        assert len(asked) == poll * JUDGED
    assert sorted(asked) == sorted(rids)
    for req in reqs:
        auto.leave(req)
    auto.open(*KeyChain(KeySeed(NAMESPACE), BLOCK).of(reqs[0].origin_input_ids))
    auto.all_back()


def test_what_is_left_is_predicted_at_every_step_news_or_not(desk: Desk) -> None:
    """Of an unknown link nothing may come for long: a first guess must not be the last."""
    req = req_of(8.5)
    keys = desk.fill(req.origin_input_ids, set(range(8)))
    desk.arrive(req)
    desk.cake.poll([req.rid])
    restore = desk.cake.restore(req.rid)
    assert restore is not None
    restore.remaining_s = 99.0
    assert not desk.step(req)
    assert restore.remaining_s < 1  # 136 tokens at a millisecond each, at most
    desk.open(*keys)
    desk.leave(req)
    desk.all_back()


def test_a_step_that_nobody_settled_claims_its_span(desk: Desk) -> None:
    req = req_of(4.5)
    keys = desk.fill(req.origin_input_ids, set(range(4)))
    desk.arrive(req)
    desk.cake.poll([req.rid])
    assert sorted(desk.slow.waiting) == sorted(keys[2:])
    req.prefix_len = 16
    desk.cake.claimed(req, 40)
    desk.settle_io()
    assert desk.slow.waiting == [keys[3]]  # compute has begun the third block
    req.prefix_len = 40
    desk.cake.claimed(req, 72)
    desk.settle_io()
    assert desk.slow.waiting == []
    desk.cake.end(req.rid)
    desk.all_back()


def test_a_slow_lookup_after_the_tree_forgot_the_prefix(desk: Desk) -> None:
    req = req_of(4.5)
    desk.fill(req.origin_input_ids, set(range(4)))
    desk.arrive(req, matched=32)
    restore = desk.cake.restore(req.rid)
    assert restore is not None
    req.prefix_len = 0
    desk.cake.settle(req, desk.attach)  # the patience is over before the answer is taken in
    desk.cake.poll([req.rid])
    assert restore.known
    desk.leave(req)
    desk.all_back()


def test_without_memory_the_island_is_computed() -> None:
    desk = Desk(slots=5 * BLOCK)
    try:
        req = req_of(4.5)
        desk.open(*desk.fill(req.origin_input_ids, set(range(4))))
        hog = desk.allocator.alloc(3 * BLOCK)
        desk.arrive(req)
        for _ in range(3):
            desk.cake.poll([req.rid])
            desk.settle_io()
        assert desk.cake.held_tokens == 2 * BLOCK
        assert desk.cake.reclaim(1) == BLOCK
        assert desk.cake.held_tokens == BLOCK
        desk.allocator.free(hog)
        while not desk.step(req):
            desk.cake.poll([req.rid])
        [story] = req.customized_info["cake"]
        assert story["computed_tokens"] + story["loaded_tokens"] == len(req.origin_input_ids)
        desk.leave(req)
        desk.all_back()
    finally:
        desk.io.close()


def test_a_block_that_lands_after_compute_took_it_goes_back(desk: Desk) -> None:
    req = req_of(4.5)
    keys = desk.fill(req.origin_input_ids, set(range(4)))
    desk.arrive(req)
    desk.cake.poll([])
    desk.open(*keys)  # landed, and the coordinator does not know yet
    restore = desk.cake.restore(req.rid)
    assert restore is not None
    restore.meet.claim(2 * BLOCK)
    desk.cake.poll([])
    assert sorted(restore.staged) == [2, 3]
    desk.settle_io()
    assert desk.counters.snapshot()["wasted_bytes", "overtaken"] == 2 * desk.kv.layout.block_bytes
    desk.leave(req)
    desk.all_back()


def test_the_part_of_an_island_without_memory_is_computed_and_the_rest_attached() -> None:
    desk = Desk(slots=8 * BLOCK, staging=10)
    try:
        req = req_of(6.5)
        desk.open(*desk.fill(req.origin_input_ids, set(range(6))))
        hog = desk.allocator.alloc(4 * BLOCK)
        desk.arrive(req)
        for _ in range(4):
            desk.cake.poll([])
            desk.settle_io()
        restore = desk.cake.restore(req.rid)
        assert restore is not None
        assert sorted(restore.staged) == list(range(6))
        desk.cake.settle(req, desk.attach)
        assert req.prefix_len == 0
        assert restore.staged == {}
        assert sorted(restore.slots) == [2, 3, 4, 5]
        assert desk.counters.snapshot()["wasted_bytes", "memory"] == (
            2 * desk.kv.layout.block_bytes
        )
        desk.allocator.free(hog)
        assert not desk.step(req)
        assert req.prefix_len == 32  # compute stops at what is left of the island
        assert desk.step(req)
        assert req.customized_info["cake"][0]["loaded_tokens"] == 64
        desk.leave(req)
        desk.all_back()
    finally:
        desk.io.close()


@pytest.mark.parametrize(
    "strange",
    [
        {"input_embeds": 1},
        {"multimodal_inputs": 1},
        {"session": 1},
        {"positional_embed_overrides": 1},
        {"lora_id": "unknown"},
    ],
)
def test_requests_whose_tokens_do_not_say_all_are_left_alone(desk: Desk, strange: dict) -> None:
    req = req_of(4.5)
    for name, value in strange.items():
        setattr(req, name, value)
    desk.arrive(req)
    assert desk.cake.restore(req.rid) is None
    assert not desk.cake.hold(req)
    assert desk.cake.plan(req, CHUNK) is None
    desk.cake.settle(req, desk.attach)
    desk.cake.claimed(req, 40)
    desk.all_back()


def test_who_a_request_belongs_to_seeds_its_keys(desk: Desk) -> None:
    def first_key(**who: Any) -> BlockKey:
        req = req_of(1.5)
        for name, value in who.items():
            setattr(req, name, value)
        desk.arrive(req)
        restore = desk.cake.restore(req.rid)
        assert restore is not None
        return restore.chain.of(restore.tokens)[0]

    alike = [
        first_key(lora_id="l1", extra_key="tenant" + "l1"),
        first_key(lora_id="l2", extra_key="tenant" + "l2"),
        first_key(extra_key="tenant"),
        first_key(cache_salt="tenant"),
        first_key(),
    ]
    assert len(set(alike)) == 5
    assert first_key(cache_salt="") == first_key()
    # The same adapter under another name and path is the same adapter.
    names = ("l1@a", "l1@b")
    assert len({first_key(lora_id=name, extra_key=name) for name in names}) == 1


def test_new_weights_make_new_keys_and_may_pause_everything(desk: Desk) -> None:
    req = req_of(2.5)
    desk.fill(req.origin_input_ids, {0, 1})
    desk.arrive(req)
    desk.cake.rebase(Digest(b"w" * 32), suspended=True)
    assert desk.cake.restore(req.rid) is None
    desk.arrive(req)
    assert desk.cake.restore(req.rid) is None
    desk.cake.emptied()
    desk.arrive(req)
    restore = desk.cake.restore(req.rid)
    assert restore is not None
    desk.cake.poll([req.rid])
    assert restore.stored == (False, False)
    desk.cake.end_all()
    desk.all_back()


def test_before_the_weights_are_known_no_request_is_looked_up_and_each_is_counted(
    desk: Desk,
) -> None:
    req = req_of(2.5)
    desk.fill(req.origin_input_ids, {0, 1})
    desk.cake.rebase(None, suspended=False)
    desk.arrive(req)
    desk.cake.poll([req.rid])
    assert desk.cake.restore(req.rid) is None
    assert desk.counters.snapshot()["unnamed_requests", ""] == 1
    desk.cake.rebase(NAMESPACE, suspended=False)
    desk.arrive(req)
    assert desk.cake.restore(req.rid) is not None
    desk.cake.end_all()
    desk.all_back()


# ---- the end at every stage ----

STAGES = ["asked", "found", "reading", "in the outbox", "staged", "placed", "attached"]


@pytest.mark.parametrize("way", ["end", "flush", "again"])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_behind_wherever_a_request_ends(desk: Desk, stage: str, way: str) -> None:
    req = req_of(4.5)
    keys = desk.fill(req.origin_input_ids, set(range(4)))
    desk.arrive(req)
    reached = STAGES.index(stage)
    if reached >= 1:
        desk.cake.poll([req.rid])
    if reached >= 3:
        desk.open(*keys)
    if reached >= 4:
        desk.cake.poll([])  # not served: stays on the host
        restore = desk.cake.restore(req.rid)
        assert restore is not None
        assert sorted(restore.staged) == [0, 1, 2, 3]
        assert desk.staging.free == desk.staging.capacity - 4
    if reached >= 5:
        desk.cake.poll([req.rid])
        assert desk.cake.held_tokens == 4 * BLOCK
    if reached >= 6:
        desk.cake.settle(req, desk.attach)
        assert req.prefix_len == 4 * BLOCK
    if way == "flush":
        desk.cake.emptied()
    elif way == "again":
        desk.arrive(req)  # retracted: comes back under its id
    desk.leave(req)
    desk.all_back()
    values = desk.counters.snapshot()
    wasted = {label: n for (name, label), n in values.items() if name == "wasted_bytes" and n}
    if stage in ("in the outbox", "staged", "placed"):
        # Who comes back in time finds the bytes that it left; else they are read again.
        whole = 4 * desk.kv.layout.block_bytes
        assert wasted["ended"] in ((whole, 2 * whole) if way == "again" else (whole,))


def test_a_prefix_that_the_tree_got_meanwhile_frees_what_landed_for_it(desk: Desk) -> None:
    req = req_of(4.5)
    desk.open(*desk.fill(req.origin_input_ids, set(range(4))))
    desk.arrive(req)
    desk.cake.poll([])
    desk.cake.poll([req.rid])
    assert desk.cake.held_tokens == 4 * BLOCK
    req.prefix_len = 40
    desk.cake.settle(req, desk.attach)
    assert req.prefix_len == 64
    assert desk.cake.held_tokens == 0
    assert sum(len(s) for s in req.owned) == 24
    assert desk.counters.snapshot()["wasted_bytes", "in_tree"] == 2 * desk.kv.layout.block_bytes
    desk.leave(req)
    desk.all_back()


# ---- another rank ----

LANDED_AT, KEPT_AT = 13, 17  # where the 4 blocks of the only request stand in what is reduced


def test_what_a_peer_does_not_have_waits_and_is_given_up_when_overtaken(two: Desk) -> None:
    req = req_of(4.5)
    two.open(*two.fill(req.origin_input_ids, set(range(4))))

    def lags(numbers: torch.Tensor) -> None:
        numbers[LANDED_AT : LANDED_AT + 4] = 0

    two.peer = lags
    two.arrive(req)
    for _ in range(3):
        two.cake.poll([req.rid])
    restore = two.cake.restore(req.rid)
    assert restore is not None
    assert sorted(restore.arrived) == [0, 1, 2, 3]
    assert two.cake.held_tokens == 0
    two.cake.settle(req, two.attach)
    two.cake.claimed(req, 32)
    req.prefix_len = 32
    assert sorted(restore.arrived) == [2, 3]
    assert two.counters.snapshot()["wasted_bytes", "overtaken"] == 2 * two.kv.layout.block_bytes
    two.peer = None
    two.cake.poll([req.rid])
    assert sorted(restore.slots) == [2, 3]
    two.peer = lags
    two.leave(req)
    two.all_back()


def test_what_a_peer_does_not_have_is_given_up_at_the_end(two: Desk) -> None:
    req = req_of(4.5)
    two.open(*two.fill(req.origin_input_ids, set(range(4))))

    def lags(numbers: torch.Tensor) -> None:
        numbers[LANDED_AT : LANDED_AT + 4] = 0

    two.peer = lags
    two.arrive(req)
    two.cake.poll([req.rid])
    two.cake.poll([req.rid])
    two.leave(req)
    two.all_back()
    assert two.counters.snapshot()["wasted_bytes", "ended"] == 4 * two.kv.layout.block_bytes


def test_what_a_peer_has_lost_is_computed_everywhere(two: Desk) -> None:
    req = req_of(4.5)
    two.open(*two.fill(req.origin_input_ids, set(range(4))))

    def has_lost_the_second(numbers: torch.Tensor) -> None:
        if len(numbers) > KEPT_AT:
            numbers[LANDED_AT + 1] = numbers[KEPT_AT + 1] = 0

    two.peer = has_lost_the_second
    two.arrive(req)
    for _ in range(3):
        two.cake.poll([req.rid])
    assert two.counters.snapshot()["wasted_bytes", "peer"] == two.kv.layout.block_bytes
    assert not two.step(req)  # block 0 is attached, block 1 computed
    assert req.prefix_len == 32
    assert two.step(req)
    assert req.customized_info["cake"][0]["loaded_tokens"] == 48
    two.leave(req)
    two.all_back()


# ---- anything in any order ----

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "step", "step", "poll", "open", "fail", "leave", "reclaim", "flush"]
        ),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=ACTIONS,
    mode=st.sampled_from(["auto", "both", "compute", "load"]),
    staging=st.integers(3, 6),
    tight=st.booleans(),
    stored=st.one_of(st.just(set(range(6))), st.sets(st.integers(0, 5))),
    quick=st.booleans(),
    blocks=st.tuples(*[st.sampled_from([0.5, 2, 4.25, 6])] * 3),
)
def test_everything_comes_back_and_every_token_is_got(
    actions: list,
    mode: str,
    staging: int,
    tight: bool,
    stored: set[int],
    quick: bool,
    blocks: tuple,
) -> None:
    desk = Desk(slots=(9 if tight else 24) * BLOCK, staging=staging, mode=mode)
    try:
        play(desk, actions, stored, quick, blocks)
    finally:
        desk.io.close()


def play(desk: Desk, actions: list, stored: set[int], quick: bool, blocks: tuple) -> None:
    reqs = [req_of(n, rid=str(i)) for i, n in enumerate(blocks)]
    longest = array("q", range(6 * BLOCK))
    keys = desk.fill(longest, stored)
    if quick:
        desk.open(*keys)
    live: list[FakeReq] = []
    running: FakeReq | None = None
    for action, who, number in actions:
        req = reqs[who]
        if action == "arrive" and req not in live:
            total = len(req.origin_input_ids)
            matched = min(number * PAGE, (total - 1) // PAGE * PAGE)
            if desk.allocator.available_size() < matched:
                continue
            req.customized_info = None
            live.append(req)
            desk.arrive(req, matched)
        elif action == "step" and live:
            # SGLang prefills one chunked request at a time.
            running = running if running in live else live[0]
            if running.customized_info is None and desk.step(running):
                check_story(running)
                live.remove(running)
                desk.leave(running)
        elif action == "poll":
            desk.cake.poll([r.rid for r in live])
        elif action == "open" and number < 6:
            desk.open(keys[number])
        elif action == "fail" and number < 6:
            desk.faulty.lose(keys[number])
        elif action == "leave" and req in live:
            live.remove(req)
            desk.leave(req)
        elif action == "reclaim":
            before = desk.allocator.available_size()
            freed = desk.cake.reclaim(number * PAGE)
            assert desk.allocator.available_size() == before + freed
        elif action == "flush" and number == 0:
            desk.cake.emptied()
            while live:
                desk.leave(live.pop())
        owned = sum(len(s) for r in reqs for s in r.owned)
        assert desk.allocator.available_size() + desk.cake.held_tokens + owned == desk.size
    desk.open(*keys)
    for req in list(live):
        for _ in range(200):
            desk.cake.poll([r.rid for r in live])
            if desk.step(req):
                check_story(req)
                break
            desk.settle_io()
        else:
            raise AssertionError("a request does not get on")
        live.remove(req)
        desk.leave(req)
    desk.all_back()


def check_story(req: FakeReq) -> None:
    [story] = (req.customized_info or {})["cake"]
    got = story["computed_tokens"] + story["loaded_tokens"] + story["matched_tokens"]
    assert got == len(req.origin_input_ids)


def test_tenants_take_turns_when_asked() -> None:
    desk = Desk(priority="fair")
    try:
        one, other = req_of(4.5, "one"), req_of(4.5, "other")
        one.cache_salt, other.cache_salt = "a", "b"
        for req in (one, other):
            desk.arrive(req)
        assert desk.cake.queue_entry(one).turn == desk.cake.queue_entry(other).turn
        one.prefix_len = 0
        desk.cake.claimed(one, TURN_TOKENS + 1)
        assert desk.cake.queue_entry(one).turn > desk.cake.queue_entry(other).turn
        for req in (one, other):
            desk.leave(req)
        desk.all_back()
    finally:
        desk.io.close()
