"""A coordinator with its loader, device slots and a store whose reads a test releases; the test
drives it as SGLang's scheduler does."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from faults import FaultyCopier
from held_reads import HeldReads
from kv_pools import allocator_of, as_bytes, buffers_for, buffers_of, mha, scramble
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import Buffer, BufferPool
from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import BlockKey, Digest, KeyChain, KeySeed, Span, end_keys
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV, Fence
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.integration.request.request_keys import RequestKeys
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.loading.cost_model import MOST_TIERS, LoadCost, PrefillCost
from sglang_cake.loading.loader import Loader
from sglang_cake.stores.base import Store
from sglang_cake.testing.scheduler_loop import LoopRequest

BLOCK, PAGE, CHUNK = 16, 4, 40
NAMESPACE = Digest(b"n" * 32)
PREFILL = PrefillCost(0.0, 1e-3, 1e-9, error=0.0)
LOAD = LoadCost(0.0, 0.05, error=0.0, depth=2)
NO_MEMORY = torch.OutOfMemoryError("no device memory")


@dataclass(eq=False)
class FakeReq(LoopRequest):
    """A request, and every slot that it owns, for the audit."""

    sampling_params: Any = field(
        default_factory=lambda: SimpleNamespace(custom_params=None, max_new_tokens=8)
    )
    owned: list[torch.Tensor] = field(default_factory=list)
    beam_group: Any = None


class KnownLoader(Loader):
    """
    Attributes:
        known_cost: of loads from now on; None: what was measured.
        ordered: the prompts that the link serves, in order.
    """

    known_cost: LoadCost | None = None
    ordered: Sequence[str] = ()

    def order(self, load_ids: Sequence[str], **rest: Any) -> None:
        self.ordered = load_ids
        super().order(load_ids, **rest)

    @property
    def tier_costs(self) -> tuple[LoadCost, ...]:
        return super().tier_costs if self.known_cost is None else (self.known_cost,) * MOST_TIERS


class CountedStepCosts(StepCosts):
    """Attributes: judged: the requests of which it was asked whether they should load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judged: list[str] = []

    def should_load(self, record: PromptRecord, *args: Any) -> bool:
        self.judged.append(record.rid)
        return super().should_load(record, *args)


class CoordinatorHarness(HeldReads):
    """One rank's coordinator over a small KV pool on a CPU.

    As a context manager: all requests leave at its end, and nothing of theirs may be left.
    """

    def __init__(
        self,
        *,
        slots: int = 20 * BLOCK,
        staging: int = 6,
        mode: Any = "both",
        priority: Any = "adaptive",
        min_load_tokens: int | None = None,
        prefill: PrefillCost = PREFILL,
        store: Callable[[Store], Store] | None = None,
        ranks: bool = False,
        io: Any = None,
        load: LoadCost = LOAD,
        chunk: int = 64,
        end_blocks: int = 0,
        tail_tokens: int = 0,
        next_tokens: int = 0,
        tree: Any = None,
        metrics: Any = None,
    ) -> None:
        """Args:
        store: is put in front of what is stored.
        ranks: there are others (`peer`).
        tree: a `HybridTree`, whose pools are used; `slots`, `end_blocks` and `tail_tokens` are its
            own.
        """
        super().__init__(io)
        self.arrived: list[FakeReq] = []
        self.end_blocks = end_blocks
        self.next_tokens = next_tokens
        self.no_end_memory = False
        if tree is None:
            self.pool = mha(slots, page=PAGE)
            scramble(self.pool, 1)
            self.allocator = allocator_of(self.pool, PAGE)
            self.kv = DeviceKV(self.pool, block_tokens=BLOCK)
        else:
            self.allocator, self.kv = tree.full_allocator, tree.kv
        self.size = self.allocator.size
        block = self.kv.layout.block_tokens
        self.front: Any = self.faulty if store is None else store(self.memory)
        self.peer: Callable[[torch.Tensor], None] | None = None
        self.adapter_error: Exception | None = None  # raised where an adapter's files are read
        self.counters = Counters()
        self.staging = BufferPool(buffers_for(self.kv, staging))
        loader = self.loader = KnownLoader(
            self.front,
            self.staging,
            self.io,
            self.counters,
            depths=[load.depth],
            prior=load,
            least_limit_s=60.0,
        )
        self.step_costs = CountedStepCosts(
            loader, prefill, chunk_tokens=chunk, pipelined=False, alone=not ranks
        )
        self.copier = FaultyCopier(self.kv)
        self.device_slots = DeviceSlots(
            self.kv,
            self.copier,
            self.allocator,
            (lambda tokens: None) if tree is None else tree.tree.evict_own,
            self.counters,
            cast(Any, self) if tree is None else tree.ends,
        )
        self.coordinator = Coordinator(
            loader,
            self.device_slots,
            config=CakeConfig(
                mode=mode,
                block_tokens=block,
                min_load_tokens=min_load_tokens or block,
                priority=priority,
            ),
            page_tokens=PAGE if tree is None else tree.cfg.page_size,
            step_costs=self.step_costs,
            keys=RequestKeys(block, self.digest, self.counters, next_tokens=next_tokens),
            consensus=RankConsensus(self.reduce if ranks else None),
            counters=self.counters,
            reporter=RequestReporter(None, writes=True, metrics=metrics),
            end_blocks=end_blocks,
            tail_tokens=tail_tokens if tree is None else tree.tail_tokens,
        )
        self.coordinator.rebase(NAMESPACE, suspended=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        try:
            if failure is None:
                self.all_back()
        finally:
            self.close()

    def close(self) -> None:
        """As at the end of the process: reads that end with the thread start no others."""
        self.loader.close()
        self.io.close()

    def reduce(self, numbers: torch.Tensor) -> None:
        """What another rank says, if a test has one."""
        if self.peer is not None:
            self.peer(numbers)

    def digest(self, lora_id: str) -> str | None:
        """Of a LoRA adapter's files."""
        if self.adapter_error is not None:
            raise self.adapter_error
        return None if lora_id == "unknown" else "digest of " + lora_id.split("@")[0]

    # ---- what is stored ----

    def fill(self, tokens: array, blocks: set[int]) -> list[BlockKey]:
        keys = KeyChain(KeySeed(NAMESPACE), BLOCK, next_tokens=self.next_tokens).of(tokens)
        self.store({keys[b]: self.block(b) for b in blocks})
        return keys

    def stored(self, blocks: float, rid: str = "r") -> tuple[FakeReq, list[BlockKey]]:
        """A request whose whole blocks are stored, and their keys."""
        req = req_of(blocks, rid)
        return req, self.fill(req.origin_input_ids, set(range(int(blocks))))

    def readable(self, blocks: float, rid: str = "r") -> FakeReq:
        """A request whose whole blocks are stored, and are read at once."""
        req, keys = self.stored(blocks, rid)
        self.open(*keys)
        return req

    def fill_end(self, tokens: array, stop: int) -> list[BlockKey]:
        """Store the end state behind token `stop`."""
        keys = end_keys(KeyChain(KeySeed(NAMESPACE), BLOCK).of(tokens[:stop])[-1], self.end_blocks)
        self.store({key: self.end_block(stop, number) for number, key in enumerate(keys)})
        return keys

    def end_block(self, stop: int, number: int) -> bytes:
        return self.block(1_000_000 + stop * 100 + number)

    def block(self, number: int) -> bytes:
        generator = torch.Generator().manual_seed(number)
        size = (self.kv.layout.block_bytes,)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return bytes(raw.numpy())

    # ---- SGLang's part ----

    def arrive(self, req: FakeReq, matched: int = 0) -> None:
        if matched:
            req.owned.append(self.allocator.alloc(matched))
        req.prefix_len = matched
        self.arrived.append(req)
        self.coordinator.arrive(req, lambda tokens, limit: min(limit, req.prefix_len))
        self.settle()

    def poll(self, *reqs: FakeReq, times: int = 1) -> None:
        """Polls of these requests, all of which wait, and the I/O thread's work after each."""
        for _ in range(times):
            self.coordinator.poll([req.rid for req in reqs])
            self.settle()

    def evict(self, req: FakeReq, kept: int = 0) -> None:
        """The tree evicts what it has of a waiting request, but for `kept` tokens."""
        slots = torch.cat([*req.owned, torch.empty(0, dtype=torch.int64)])
        self.allocator.free(slots[kept:])
        req.owned = [slots[:kept]]
        req.prefix_len = kept
        self.coordinator.tree_evicts = True

    def grow(self, req: FakeReq, tokens: int) -> None:
        """Another request brings the first `tokens` tokens of a waiting one into the tree."""
        if (slots := self.allocator.alloc(tokens - req.prefix_len)) is not None:
            req.owned.append(slots)
        req.prefix_len = tokens
        self.coordinator.inserted(RadixKey(req.origin_input_ids[:tokens], req.extra_key))

    # As `CakeRadixCache` and `EndStates`: an end state is what was copied into it.

    def allocate_end(self, req: FakeReq, span: Span) -> dict[int, bytes] | None:
        return None if self.no_end_memory else {}

    def free_end(self, req: FakeReq, end: dict[int, bytes]) -> None:
        end.clear()

    def prepare(self, end: dict[int, bytes]) -> dict[int, bytes]:
        return end

    def blocks_of(self, end: dict[int, bytes]) -> list[tuple[Any, int]]:
        def load(buffer: Buffer, index: int, after: Fence) -> Copy:
            end[index] = bytes(buffer.view)
            return Copy()

        return [(SimpleNamespace(load=load), index) for index in range(self.end_blocks)]

    def attach(
        self,
        req: FakeReq,
        slots: torch.Tensor,
        stop: int,
        end: dict[int, bytes] | None,
        taken: Callable[[], object],
    ) -> None:
        assert len(end or {}) == self.end_blocks
        for number, data in (end or {}).items():
            assert data == self.end_block(stop, number)
        assert stop - req.prefix_len == len(slots)
        want, have = b"", b""
        for token, slot in zip(range(req.prefix_len, stop), slots.tolist(), strict=True):
            data = self.block(token // BLOCK)
            for buffer, plane in zip(buffers_of(self.pool), self.kv.layout.planes, strict=True):
                start = plane.start + token % BLOCK * plane.row_bytes
                want += data[start : start + plane.row_bytes]
                have += bytes(as_bytes(buffer)[slot].numpy())
        assert want == have
        taken()
        req.owned.append(slots)
        req.prefix_len = stop

    def step(self, req: FakeReq) -> bool:
        """One scheduling step of a request that is served. True: its prefill is over."""
        if self.coordinator.awaits_lookup(req):
            return False
        self.coordinator.attach_islands(req, self.attach, self)
        plan = self.coordinator.plan(req, CHUNK)
        if plan is not None and plan.wait:
            return False
        total = len(req.origin_input_ids)
        stop = min(total, req.prefix_len + CHUNK) if plan is None else plan.stop
        pages = -(-stop // PAGE) - -(-req.prefix_len // PAGE)
        slots = self.allocator.alloc(pages * PAGE)
        if slots is None:
            self.coordinator.reclaim(pages * PAGE - self.allocator.available_size())
            slots = self.allocator.alloc(pages * PAGE)
            if slots is None:
                return False
        if pages:
            req.owned.append(slots)
        self.coordinator.claimed(req, stop)
        req.prefix_len = stop
        return stop == total

    def leave(self, req: FakeReq) -> None:
        """Its slots go back, as when the tree is emptied."""
        self.coordinator.release(req.rid)
        for slots in req.owned:
            self.allocator.free(slots)
        req.owned.clear()

    def all_back(self) -> None:
        """Every request leaves, and everything that they had is free again."""
        for req in self.arrived:
            self.leave(req)
        self.settle()
        self.poll()
        self.coordinator.poll([])
        assert self.coordinator.reclaimable_tokens == 0
        assert self.allocator.available_size() == self.size
        assert self.staging.free == self.staging.capacity
        assert self.slow.waiting == []


def req_of(blocks: float, rid: str = "r") -> FakeReq:
    return FakeReq(rid, array("q", range(int(blocks * BLOCK))))
