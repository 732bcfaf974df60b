"""`memory://`: blocks in host memory, alone and in front of another tier."""

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from faulty_stores import OutageStore, RecordingStore
from filestore import closing
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import PATIENCE_S, async_until
from storetools import ALICE, BOB, refusal_of
from tiering import BLOCK

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import BlockMissing, ConfigError, StoreFull, StoreUnavailable
from sglang_cake.stores.base import CountedStore, RequestFacts, WrapperStore
from sglang_cake.stores.circuit_breaker import FIRST_S
from sglang_cake.stores.eviction import POLICIES, reuse_model
from sglang_cake.stores.eviction.reuse_model import ReuseModel
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.memory import block_memory
from sglang_cake.stores.memory.block_memory import MOST_PASSED, TOUCHED_AT_ONCE, BlockMemory
from sglang_cake.stores.memory.host_memory_store import HostMemoryStore
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.stores.tiers import tier
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

DIGEST = FRAME.digest
PAGE = 4096  # a block of the tests takes one


def opened(url, frame=FRAME, *, sharers=1, policy="lru"):
    (source,) = parse_sources(url, policy, sharers=sharers)
    return source.open(frame, depth=2)


def memory_of(blocks, policy="lru", rules=NO_TENANT_RULES, pin=None):
    return BlockMemory(
        capacity_bytes=blocks * PAGE, block_bytes=BLOCK, policy=policy, tenant_rules=rules, pin=pin
    )


def stored(memory, name, *, must_earn_place=False):
    """Store a block; whether the memory took it."""
    block = memory.add(DIGEST, key_of(name), BLOCK, must_earn_place=must_earn_place)
    if block is None:
        return False
    block.data[:] = block_of(name)
    return memory.commit(block)


def memory_with(names, policy="lru"):
    """A memory that is full with these blocks."""
    memory = memory_of(len(names), policy)
    for name in names:
        assert stored(memory, name)
    return memory


def names_in(memory, names):
    found = memory.has(DIGEST, [key_of(name) for name in names])
    return [name for name, there in zip(names, found, strict=True) if there]


def touch(memory, names, request, tenant=0):
    facts = RequestFacts(id=str(request), tokens=len(names), tenant=tenant)
    memory.on_access(DIGEST, [key_of(name) for name in names], facts)


class Held:
    """A memory of some blocks before a second tier that a test can stop, and look into."""

    def __init__(self, blocks, policy="lru", **options):
        (source,) = parse_sources(f"memory://{blocks * PAGE}", policy)
        self.memory = source.open(FRAME, depth=2)
        self.below = MemoryStore()
        self.outage = OutageStore(self.below)
        self.gate = asyncio.Event()
        self.gate.set()
        self.refused = set()  # keys
        self.calls = RecordingStore(Gated(self.outage, self.gate, self.refused))
        self.store = TieredStore(
            [self.memory, self.calls], block_bytes=BLOCK, copy_bytes=0, **options
        )

    async def put(self, *names):
        for name in names:
            assert await self.store.put(key_of(name), block_of(name))

    async def in_memory(self, names):
        found = await self.memory.contains([key_of(name) for name in names])
        return [name for name, there in zip(names, found, strict=True) if there]

    def is_below(self, name):
        return key_of(name) in self.below.blocks

    async def counts(self, tier):
        return (await self.store.stats()).tiers[tier].counts

    async def quiet(self):
        await async_until(lambda: not any(tier.copies.pending for tier in self.store.tiers))


class Gated(WrapperStore):
    """Puts wait for the gate."""

    def __init__(self, inner, gate, refused):
        super().__init__(inner)
        self.gate = gate
        self.refused = refused

    async def put(self, key, data):
        await self.gate.wait()
        if key in self.refused:
            raise StoreFull("refused")
        return await super().put(key, data)


@contextlib.asynccontextmanager
async def opened_memory(blocks=4, **options):
    held = Held(blocks, **options)
    try:
        yield held
    finally:
        held.gate.set()
        await held.store.close()


# ---- the URL ----


def test_memory_url_without_a_size_is_refused():
    assert "memory://64GB" in refusal_of("memory://")
    assert "memory://64GB" in refusal_of("memory:///nvme/kv?capacity=1GB")
    assert "unknown key" in refusal_of("memory://1GB?min_free=1GB")
    assert "named twice" in refusal_of("memory://1GB,memory://2GB")


def test_memory_larger_than_the_machine_gives_is_one_line():
    (source,) = parse_sources("memory://999PB")
    with pytest.raises(ConfigError, match="lower it"):
        source.check()
    with pytest.raises(ConfigError, match="lower it"):
        source.open(FRAME, depth=1)
    parse_sources("memory://1MB")[0].check()


def test_memory_smaller_than_a_block_is_one_line():
    (source,) = parse_sources("memory://8KiB", sharers=3)
    with pytest.raises(ConfigError, match="raise it"):
        source.open(FRAME, depth=1)
    for limits in ("", "?bandwidth=1GB/s"):  # as soon as the size of blocks is known
        with pytest.raises(ConfigError, match="raise it"):
            parse_sources(f"memory://8KiB{limits}", sharers=3, block_bytes=FRAME.payload_bytes)
    parse_sources("memory://1MB", sharers=3, block_bytes=FRAME.payload_bytes)


async def test_memory_capacity_is_divided_among_the_processes_of_the_machine():
    async with closing(opened("memory://1MB", sharers=4)) as store:
        assert (await store.stats()).capacity_bytes == 250_000


# ---- one memory ----


async def test_memory_namespaces_share_the_capacity_and_no_block():
    async with closing(opened("memory://16KiB", ALICE)) as alice:
        bob = opened("memory://16KiB", BOB)
        for name in range(3):
            assert await alice.put(key_of(name), block_of(name))
        assert await bob.contains([key_of(0)]) == [False]
        for name in range(3):
            assert await bob.put(key_of(name), block_of(("bob", name)))
        assert (await alice.stats()).blocks == (await bob.stats()).blocks == 4
        assert [await read(bob, key_of(n)) for n in range(3)] == [
            block_of(("bob", n)) for n in range(3)
        ]
        assert await alice.contains([key_of(n) for n in range(3)]) == [False, False, True]
        await bob.close()


async def test_memory_is_freed_with_its_last_store():
    first, second = opened("memory://64KiB"), opened("memory://64KiB")
    await first.put(key_of("a"), block_of("a"))
    await first.close()
    assert await read(second, key_of("a")) == block_of("a")
    await second.close()
    third = opened("memory://64KiB")
    assert await third.contains([key_of("a")]) == [False]
    assert (await third.stats()).used_bytes == 0
    await third.close()


async def test_memory_closed_while_another_one_is_pinned_holds_no_other_call():
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def pin(arena):
        begun.set()
        ended.append(may_end.wait(60.0))  # False: the event loop was held
        return len(arena.buffers)

    (source,) = parse_sources("memory://64KiB", pin=pin)
    old = opened("memory://32KiB")
    opening = asyncio.create_task(asyncio.to_thread(source.open, FRAME, depth=1))
    assert await asyncio.to_thread(begun.wait)
    closing_old = asyncio.create_task(old.close())
    await asyncio.sleep(0)
    may_end.set()
    await closing_old
    await (await opening).close()
    assert ended == [True]


async def test_memory_that_is_opened_again_counts_evictions_from_then_on():
    """As for new weights, before the store of the old ones is closed."""

    async def evicted_blocks(store, names):
        for name in names:
            await store.put(key_of(name), block_of(name))
        return (await store.stats()).evictions.evicted_blocks

    async with closing(opened("memory://32KiB")) as old, closing(opened("memory://32KiB")) as held:
        assert await evicted_blocks(old, range(20)) == 12
        assert await evicted_blocks(held, ()) == 0
        async with closing(opened("memory://32KiB")) as new:
            assert await evicted_blocks(new, range(20, 25)) == 5


@pytest.mark.parametrize("policy", POLICIES)
async def test_memory_of_any_policy_keeps_its_capacity_and_its_bytes(policy):
    async with closing(opened(f"memory://32KiB?policy={policy}")) as store:
        for name in range(40):
            await store.put(key_of(name), block_of(name))
        stats = await store.stats()
        assert (stats.policy, stats.blocks, stats.used_bytes) == (policy, 8, 8 * PAGE)
        assert stats.evictions.evicted_blocks == 32
        for name in range(40):
            if (await store.contains([key_of(name)]))[0]:
                assert await read(store, key_of(name)) == block_of(name)


def test_memory_evicts_what_requests_used_least_recently():
    memory = memory_with("abc")
    touch(memory, "a", 1)
    assert stored(memory, "d")
    assert names_in(memory, "abcd") == ["a", "c", "d"]


class CountedLock:
    """Attributes: taken: how often one of this kind was."""

    taken = 0
    real = staticmethod(threading.Lock)

    def __init__(self):
        self._lock = self.real()

    def __enter__(self):
        CountedLock.taken += 1
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


def test_memory_lookup_does_not_wait_while_the_reuse_of_blocks_is_fitted(monkeypatch):
    found = []

    def refit(model, now_s, present, unlocked):
        looking = threading.Thread(target=lambda: found.extend(names_in(memory, "abc")))
        looking.start()
        looking.join(5)
        found.append("fitted")
        return False

    memory = memory_with("ab", "cake-prefix")
    monkeypatch.setattr(ReuseModel, "refit", refit)
    monkeypatch.setattr(block_memory, "REFRESH_S", 0.0)
    touch(memory, "ab", 1)
    assert found == ["a", "b", "fitted"]


def test_memory_lends_a_block_while_the_reuse_of_blocks_is_fitted(monkeypatch):
    lent = []

    def fit(gaps, ages):
        lending = threading.Thread(
            target=lambda: lent.append(memory.lend(DIGEST, key_of("a"), counts=True))
        )
        lending.start()
        lending.join(PATIENCE_S)
        assert lent, "it waits for the fit"
        return reuse_model.PRIOR_FIT

    monkeypatch.setattr(reuse_model, "_SAMPLE_ONE_IN", 1)
    monkeypatch.setattr(ReuseModel, "min_samples", 1)
    memory = memory_with("abcd", "cake-prefix")
    monkeypatch.setattr(reuse_model, "fit_exponential", fit)
    monkeypatch.setattr(block_memory, "REFRESH_S", 0.0)
    touch(memory, "ab", 1)
    assert lent
    for each in lent:
        if each is not None:
            each.release()


def test_memory_other_calls_come_between_the_touches_of_a_long_prompt(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", CountedLock)
        memory = memory_of(4)
    keys = [key_of(name) for name in range(20 * TOUCHED_AT_ONCE)]
    before = CountedLock.taken
    memory.on_access(DIGEST, keys, RequestFacts("a request", 1000))
    assert CountedLock.taken - before >= 20


@pytest.mark.parametrize("policy", ["lru", "cake-prefix"])
def test_memory_after_the_clock_was_set_back_evicts_blocks_used_before(monkeypatch, policy):
    now_s = 2e9
    monkeypatch.setattr("time.time", lambda: now_s)
    memory = memory_with("abc", policy)
    now_s -= 3600.0
    for name in "de":
        assert stored(memory, name)
    touch(memory, "d", 1)
    assert names_in(memory, "abcde") == ["c", "d", "e"]
    assert stored(memory, "f")
    assert names_in(memory, "cdef") == ["d", "e", "f"]


def read_in(memory, name, *, counts=False):
    """The bytes of a block that is being read, and what ends that."""
    block = memory.use(DIGEST, key_of(name), counts=counts)
    return block.data, lambda: memory.release(block)


def lent_from(memory, name, *, counts=False):
    """The same of a block that is lent."""
    lent = memory.lend(DIGEST, key_of(name), counts=counts)
    return lent.buffer.view, lent.release


in_use = pytest.mark.parametrize("use", [read_in, lent_from])


@in_use
def test_memory_block_that_is_read_or_lent_is_not_evicted(use):
    memory = memory_with("ab")
    data, end_use = use(memory, "a")
    stored(memory, "c")
    assert names_in(memory, "abc") == ["a", "c"]
    memory.delete(DIGEST, key_of("a"))
    assert stored(memory, "d")
    assert names_in(memory, "acd") == ["d"], "the buffer of a is in use"
    assert data == block_of("a")
    end_use()
    assert stored(memory, "e")
    assert names_in(memory, "de") == ["d", "e"]


def test_memory_lends_half_of_its_blocks_at_most():
    memory = memory_with("abcd")
    assert memory.lend(DIGEST, key_of("missing"), counts=True) is None
    lent = [memory.lend(DIGEST, key_of(name), counts=True) for name in "abc"]
    assert [each is not None for each in lent] == [True, True, False]
    lent[0].release()
    assert memory.lend(DIGEST, key_of("c"), counts=True) is not None
    assert memory.lend(DIGEST, key_of("d"), counts=True) is None


def test_memory_pinned_in_part_lends_half_of_the_pinned_blocks_alone():
    memory = memory_of(5, pin=lambda arena: 4)
    for name in "abcde":
        assert stored(memory, name)
    assert memory.lend(DIGEST, key_of("e"), counts=True) is None, "it is pageable"
    lent = [memory.lend(DIGEST, key_of(name), counts=True) for name in "abc"]
    assert [each is not None for each in lent] == [True, True, False]
    for each in lent[:2]:
        each.release()
    assert memory.use(DIGEST, key_of("e"), counts=True) is not None


@in_use
def test_memory_block_that_is_read_or_lent_counts_as_accessed_if_nobody_reports_it(use):
    memory = memory_with("ab")
    _, end_use = use(memory, "a", counts=True)
    end_use()
    stored(memory, "c")
    assert names_in(memory, "abc") == ["a", "c"]


def test_memory_payload_smaller_than_a_block_is_not_lent():
    memory = memory_of(2)
    block = memory.add(DIGEST, key_of("a"), BLOCK - 1, must_earn_place=False)
    assert memory.lend(DIGEST, key_of("a"), counts=True, least_bytes=BLOCK) is None, (
        "it is being filled"
    )
    memory.commit(block)
    for _ in range(3):
        assert memory.lend(DIGEST, key_of("a"), counts=True, least_bytes=BLOCK) is None
    stored(memory, "b")
    assert memory.lend(DIGEST, key_of("b"), counts=True, least_bytes=BLOCK) is not None
    stored(memory, "c")
    assert names_in(memory, "abc") == ["b", "c"], "a is not in use"


def test_memory_full_of_blocks_in_use_is_full():
    memory = memory_of(1)
    stored(memory, "a")
    block = memory.use(DIGEST, key_of("a"), counts=False)
    with pytest.raises(StoreFull):
        memory.add(DIGEST, key_of("b"), BLOCK, must_earn_place=False)
    memory.release(block)
    assert stored(memory, "b")


def test_memory_many_oldest_blocks_in_use_are_passed_over():
    count = 2 * MOST_PASSED + 2
    memory = memory_of(count, policy="fifo")
    for name in range(count):
        stored(memory, name)
    lent = [
        memory.lend(DIGEST, key_of(name), counts=True, least_bytes=BLOCK)
        for name in range(MOST_PASSED)
    ]
    assert stored(memory, "new")
    assert not names_in(memory, [MOST_PASSED]), "the oldest one that is not in use"
    more = [memory.use(DIGEST, key_of(name), counts=True) for name in range(MOST_PASSED + 1, count)]
    assert stored(memory, "newer"), "in place of `new`, behind all that are in use"
    assert names_in(memory, ["new", "newer"]) == ["newer"]
    for each in more:
        memory.release(each)
    for each in lent:
        each.release()


def test_memory_block_deleted_while_it_is_filled_is_not_stored():
    memory = memory_of(1)
    block = memory.add(DIGEST, key_of("a"), BLOCK, must_earn_place=False)
    assert names_in(memory, "a") == []
    assert memory.use(DIGEST, key_of("a"), counts=True) is None
    memory.delete(DIGEST, key_of("a"))
    assert not memory.commit(block)
    assert names_in(memory, "a") == []
    assert stored(memory, "a")


def test_memory_stats_while_a_block_is_filled_count_its_buffer_alone():
    memory = memory_of(2)
    stored(memory, "a")
    block = memory.add(DIGEST, key_of("b"), BLOCK, must_earn_place=False)
    stats = memory.stats()
    assert (stats.blocks, stats.block_bytes, stats.used_bytes) == (1, PAGE, 2 * PAGE)
    memory.commit(block)
    assert memory.stats().blocks == 2
    memory.delete(DIGEST, key_of("b"))
    block = memory.add(DIGEST, key_of("b"), BLOCK, must_earn_place=False)
    memory.delete(DIGEST, key_of("b"))
    memory.commit(block)
    assert memory.stats().blocks == 1
    stored(memory, "c")
    stored(memory, "d")
    assert memory.stats().blocks == 2


def test_memory_block_that_is_not_written_below_is_evicted_last():
    memory = memory_with("abc")
    kept = [memory.keep(DIGEST, key_of(name)) for name in "ab"]
    stored(memory, "d")
    assert names_in(memory, "abcd") == ["a", "b", "d"]
    kept[0].release()
    stored(memory, "e")
    assert names_in(memory, "abde") == ["b", "d", "e"]
    kept.append(memory.keep(DIGEST, key_of("d")))
    kept.append(memory.keep(DIGEST, key_of("e")))
    stored(memory, "f")
    assert names_in(memory, "bdef") == ["d", "e", "f"], "none is written: in the policy's order"
    assert kept[1].pin() is None
    assert kept[2].pin() == block_of("d")
    for each in kept[1:]:
        each.release()


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_block_that_was_passed_over_keeps_its_place_in_the_order(policy):
    memory = memory_of(4, policy)
    names = list("abcd")
    for name in names:
        assert stored(memory, name)
    unwritten = memory.keep(DIGEST, key_of("a"))
    left = []
    for number in range(4):
        assert stored(memory, f"new {number}")
        if not number:
            unwritten.release()
        left.append("".join(names_in(memory, names)))
    assert left == ["acd", "cd", "d", ""]


def test_memory_passes_over_a_bounded_number_of_unwritten_blocks():
    memory = memory_of(MOST_PASSED + 2)
    for name in range(MOST_PASSED + 2):
        stored(memory, name)
    kept = [memory.keep(DIGEST, key_of(name)) for name in range(MOST_PASSED)]
    stored(memory, "new")
    assert names_in(memory, [0, MOST_PASSED, MOST_PASSED + 1]) == [MOST_PASSED, MOST_PASSED + 1]
    for each in kept:
        each.release()


def test_memory_tenant_above_its_quota_loses_its_own_blocks():
    memory = memory_of(8, rules=TenantRules(quota_bytes=3 * PAGE))
    touch(memory, "ab", 1, tenant=1)
    for name in "ab":
        stored(memory, name)
    names = "cdefgh"
    touch(memory, names, 2, tenant=2)
    kept = []
    for name in names:
        stored(memory, name)
        kept.append(memory.keep(DIGEST, key_of(name)))  # none is ever written
    assert len(names_in(memory, names)) == 3
    assert names_in(memory, "ab") == ["a", "b"]


def test_memory_tenant_that_floods_with_unwritten_blocks_costs_others_nothing():
    memory = memory_of(6, rules=TenantRules(fair=True))
    touch(memory, "ab", 1, tenant=1)
    for name in "ab":
        stored(memory, name)
    touch(memory, range(20), 2, tenant=2)
    kept = []
    for name in range(20):
        stored(memory, name)
        kept.append(memory.keep(DIGEST, key_of(name)))
    assert names_in(memory, "ab") == ["a", "b"]


def test_memory_blocks_without_a_report_count_for_no_quota():
    memory = memory_of(8, rules=TenantRules(quota_bytes=2 * PAGE))
    for name in "abcd":
        stored(memory, name)
    assert names_in(memory, "abcd") == ["a", "b", "c", "d"]
    touch(memory, "abc", 1)  # names no tenant
    assert stored(memory, "e")
    assert names_in(memory, "abcde") == ["a", "b", "d", "e"]


def test_memory_tenant_above_its_share_costs_no_unwritten_block_of_an_unknown_tenant():
    memory = memory_of(5, rules=TenantRules(fair=True))
    assert stored(memory, "unknown")
    kept = memory.keep(DIGEST, key_of("unknown"))
    touch(memory, "abc", 2, tenant=2)
    touch(memory, "de", 1, tenant=1)
    for name in "abcd":
        assert stored(memory, name)
    assert stored(memory, "e")
    assert names_in(memory, ["unknown", *"abcde"]) == ["unknown", "a", "b", "d", "e"]
    kept.release()


def test_memory_promoted_block_takes_the_place_of_a_less_valuable_one():
    memory = memory_with("ab")
    assert stored(memory, "c", must_earn_place=True)
    assert names_in(memory, "abc") == ["b", "c"]
    assert not stored(memory, "c", must_earn_place=True)


def test_memory_promoted_block_that_the_policy_values_least_stays_outside():
    memory = memory_with("ab", "lfu")
    for name in "ab":
        for request in range(3):
            touch(memory, name, (name, request))
    assert not stored(memory, "c", must_earn_place=True)
    assert names_in(memory, "abc") == ["a", "b"]


def test_memory_promoted_block_counts_the_read_that_promoted_it():
    memory = memory_with("ab", "lfu")
    for name in "ab":
        touch(memory, name, name)
    assert stored(memory, "c", must_earn_place=True)
    assert names_in(memory, "abc") == ["b", "c"]


def test_memory_closed_frees_its_pages_with_the_last_use():
    memory = memory_with("ab")
    block = memory.use(DIGEST, key_of("a"), counts=False)
    pages = weakref.ref(block.data.obj)
    memory.close()
    assert not stored(memory, "c")
    assert block.data == block_of("a")
    memory.release(block)
    del block
    gc.collect()
    assert pages() is None


def test_memory_promoted_block_displaces_none_that_is_not_written():
    memory = memory_with("ab")
    kept = [memory.keep(DIGEST, key_of(name)) for name in "ab"]
    assert not stored(memory, "c", must_earn_place=True)
    assert names_in(memory, "abc") == ["a", "b"]
    kept[1].release()
    assert stored(memory, "c", must_earn_place=True)
    assert names_in(memory, "abc") == ["a", "c"]


def test_memory_tenant_evicts_its_own_block_if_those_of_a_larger_tenant_are_in_use():
    memory = memory_of(3, rules=TenantRules(fair=True))
    touch(memory, ["mine", "mine too"], 0, tenant=1)
    touch(memory, ["theirs", "theirs too", "one more of theirs"], 1, tenant=2)
    assert stored(memory, "mine")
    for name in ("theirs", "theirs too"):  # being filled
        memory.add(DIGEST, key_of(name), BLOCK, must_earn_place=False)
    with pytest.raises(StoreFull):  # the larger tenant gets no block of another one
        memory.add(DIGEST, key_of("one more of theirs"), BLOCK, must_earn_place=False)
    assert stored(memory, "mine too")
    assert names_in(memory, ["mine", "mine too"]) == ["mine too"]


def test_memory_block_in_use_of_a_tenant_within_its_share_is_passed_over():
    memory = memory_of(3, rules=TenantRules(fair=True))
    for tenant, name in enumerate("abc"):
        touch(memory, [name], tenant, tenant=tenant)
        assert stored(memory, name)
    block = memory.use(DIGEST, key_of("a"), counts=False)
    touch(memory, ["d"], 3, tenant=3)
    assert stored(memory, "d")
    assert names_in(memory, "abcd") == ["a", "c", "d"]
    memory.release(block)


@pytest.mark.parametrize("rules", [TenantRules(fair=True), TenantRules(quota_bytes=100 * PAGE)])
def test_memory_put_finds_a_block_if_the_first_ones_of_the_tenant_above_its_share_are_in_use(rules):
    memory = memory_of(200, rules=rules)
    for tenant, count in ((1, 99), (2, 101)):
        for number in range(count):
            touch(memory, [(tenant, number)], (tenant, number), tenant)
            assert stored(memory, (tenant, number))
            if tenant == 2 and number < 2:
                memory.use(DIGEST, key_of((tenant, number)), counts=False)
    touch(memory, ["c"], "c", tenant=3)
    assert stored(memory, "c")
    assert len(names_in(memory, [(1, number) for number in range(99)])) >= 98


NAMES = st.integers(0, 5)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "promote", "use", "lend", "keep", "delete", "touch", "end", "drop"]
        ),
        NAMES,
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([*POLICIES]), st.booleans())
@settings(max_examples=150)
def test_memory_after_any_steps_has_right_bytes_within_its_capacity(steps, policy, fair):
    memory = memory_of(3, policy=policy, rules=TenantRules(fair=fair))
    fillings, uses, loans, kept, requests = [], [], [], [], itertools.count()
    for what, name, place in steps:
        if what in ("add", "promote"):
            try:
                block = memory.add(DIGEST, key_of(name), BLOCK, must_earn_place=what == "promote")
            except StoreFull:  # with fair shares, a tenant cannot evict the blocks of others
                assert len(fillings) + len(uses) + len(loans) >= (2 if fair else 3)
            else:
                if block is not None:
                    block.data[:] = block_of(name)
                    fillings.append(block)
        elif what == "use":
            block = memory.use(DIGEST, key_of(name), counts=True)
            if block is not None:
                uses.append((name, block))
        elif what == "lend":
            lent = memory.lend(DIGEST, key_of(name), counts=True)
            if lent is not None:
                loans.append((name, lent))
        elif what == "keep":
            each = memory.keep(DIGEST, key_of(name))
            if each is not None:
                kept.append((name, each))
        elif what == "delete":
            memory.delete(DIGEST, key_of(name))
            assert names_in(memory, [name]) == []
        elif what == "touch":
            touch(memory, [name, name + 1], next(requests), tenant=place)
        elif what == "end" and fillings:
            memory.commit(fillings.pop())
        elif what == "drop" and (fillings or uses or loans or kept):
            if loans:
                loans.pop()[1].release()
            elif uses:
                memory.release(uses.pop()[1])
            elif kept:
                name, each = kept.pop()
                data = each.pin()
                assert data is None or data == block_of(name)
                each.release()
            else:
                memory.release(fillings.pop())
        assert all(block.data == block_of(name) for name, block in uses)
        assert all(lent.buffer.view == block_of(name) for name, lent in loans)
        assert len(loans) <= 1, "half of three"
        stats = memory.stats()
        assert stats.blocks <= 3
        assert stats.used_bytes <= 3 * PAGE
    for block in fillings:
        memory.release(block)
    for _, block in uses:
        memory.release(block)
    for _, lent in loans:
        lent.release()
    for _, each in kept:
        each.release()
    for name in range(6):
        memory.delete(DIGEST, key_of(name))
    for name in range(10, 13):
        assert stored(memory, name)
    assert names_in(memory, range(13)) == [10, 11, 12], "no buffer is lost"


# ---- in front of another tier ----


async def test_memory_tier_acknowledges_before_the_tier_below_has_the_block():
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("a", "b")
        assert not held.below.blocks
        assert await read(held.store, key_of("a")) == block_of("a")
        held.gate.set()
        await held.quiet()
        assert held.is_below("a")
        assert held.is_below("b")


async def test_memory_tier_queues_more_blocks_than_there_are_copy_buffers():
    async with opened_memory(blocks=16) as held:
        held.gate.clear()
        await held.put(*range(16))
        held.gate.set()
        await held.quiet()
        assert len(held.below.blocks) == 16
        assert (await held.counts(1))["queue_full_blocks"] == 0


async def test_memory_tier_block_put_again_while_it_is_written_is_not_refused(monkeypatch):
    monkeypatch.setattr(tier, "MOST_KEPT", 1)
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("a")
        await async_until(lambda: held.calls.keys_of("put"))
        await held.memory.delete(key_of("a"))
        await held.put("a")
        assert (await held.counts(1))["queue_full_blocks"] == 0
        await held.put("b")
        assert (await held.counts(1))["queue_full_blocks"] == 1
        held.gate.set()
        await held.quiet()
        assert set(held.below.blocks) == {key_of("a")}


async def test_memory_tier_block_evicted_before_its_turn_is_counted():
    async with opened_memory(blocks=4) as held:
        held.gate.clear()
        await held.put(*range(7))
        held.gate.set()
        await held.quiet()
        lost = [n for n in range(7) if not held.is_below(n)]
        assert len(lost) == 3
        assert (await held.counts(1))["evicted_blocks"] == 3
        assert (await held.counts(1))["put_blocks"] == 4
        assert await held.store.contains([key_of(n) for n in lost]) == [False] * 3


async def test_memory_tier_block_put_again_after_its_eviction_is_written_once():
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("p", "q", "a", "b")  # p and q are being written, a and b wait
        await held.put("c")  # in the place of a
        assert await held.in_memory("abc") == ["b", "c"]
        await held.put("a")
        held.gate.set()
        await held.quiet()
        assert held.is_below("a")
        assert held.calls.keys_of("put").count(key_of("a")) == 1
        await held.put("d", "e", "f", "g")
        assert await held.in_memory("a") == [], "it waits for no write any more"


async def test_memory_tier_evicts_written_blocks_before_others():
    async with opened_memory() as held:
        await held.put("a", "b")
        await held.quiet()
        held.gate.clear()
        await held.put("c", "d", "e", "f")
        assert await held.in_memory("abcdef") == ["c", "d", "e", "f"]
        await held.store.on_access([key_of("c")], RequestFacts(id="1", tokens=1))
        held.gate.set()
        await held.quiet()
        assert all(held.is_below(name) for name in "abcdef")
        assert (await held.counts(1))["evicted_blocks"] == 0


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("down"), OSError("a bug")])
async def test_memory_tier_keeps_a_block_that_the_tier_below_refuses(error):
    async with opened_memory() as held:
        held.outage.error = error
        await held.put("a")
        await held.quiet()
        assert not held.below.blocks
        assert await read(held.store, key_of("a")) == block_of("a")
        await held.put("b", "c", "d", "e")
        assert await held.in_memory("a") == [], "it waits for no write any more"


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("down"), OSError("a bug")])
async def test_memory_tier_block_that_the_tier_below_refused_is_written_once_that_works(error):
    async with opened_memory() as held:
        held.outage.error = error
        await held.put("a", "b")
        await held.quiet()
        held.outage.error = None
        await held.put("c")
        await held.quiet()
        assert set(held.below.blocks) == {key_of(name) for name in "abc"}
        assert held.calls.keys_of("put").count(key_of("a")) == 2
        await held.put("d", "e")
        assert await held.in_memory("a") == [], "it waits for no write any more"


async def test_memory_tier_blocks_put_while_the_tier_below_is_left_out_are_written_later():
    now_s = 0.0
    async with opened_memory(blocks=8, clock=lambda: now_s) as held:
        held.outage.error = StoreUnavailable("down")
        for name in range(tier.FAILURES_IN_A_ROW):
            await held.put(name)
            await held.quiet()
        await held.put("while out")
        assert (await held.counts(1))["left_out_blocks"] == 1
        held.outage.error = None
        now_s += FIRST_S
        await held.put("after")
        await held.quiet()
        assert len(held.below.blocks) == tier.FAILURES_IN_A_ROW + 2


async def test_memory_tier_block_that_found_the_queue_full_is_written_later(monkeypatch):
    monkeypatch.setattr(tier, "MOST_KEPT", 2)
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("a", "b", "c")
        assert (await held.counts(1))["queue_full_blocks"] == 1
        held.gate.set()
        await held.quiet()
        await held.put("d")
        await held.quiet()
        assert set(held.below.blocks) == {key_of(name) for name in "abcd"}


async def test_memory_tier_missed_block_that_was_deleted_stays_deleted():
    async with opened_memory() as held:
        held.outage.error = StoreFull("full")
        await held.put("a", "b")
        await held.quiet()
        held.outage.error = None
        await held.store.delete(key_of("a"))
        await held.put("c")
        await held.quiet()
        assert set(held.below.blocks) == {key_of("b"), key_of("c")}


async def test_memory_tier_block_that_the_tier_below_always_refuses_delays_no_other():
    async with opened_memory(blocks=8) as held:
        held.outage.error = StoreFull("full")
        await held.put("a")
        await held.quiet()
        held.outage.error = None
        held.refused.add(key_of("a"))
        for name in "bcd":
            await held.put(name)
            await held.quiet()
        assert set(held.below.blocks) == {key_of(name) for name in "bcd"}
        assert held.calls.keys_of("put").count(key_of("a")) <= 1 + len("bcd")


async def test_memory_tier_put_of_a_block_that_the_tier_below_lacks_is_written_there_once():
    async with opened_memory() as held:
        held.outage.error = StoreUnavailable("down")
        await held.put("a")
        await held.quiet()
        held.outage.error = None
        for _ in range(3):  # with MLA, another rank does not find the block
            assert await held.store.contains([key_of("a")]) == [True]
            assert not await held.store.put(key_of("a"), block_of("a")), "memory has it"
            await held.quiet()
            assert held.is_below("a")
        assert held.calls.keys_of("put").count(key_of("a")) == 2, "one of them failed"
        await held.put("b", "c", "d", "e")
        assert await held.in_memory("a") == [], "it waits for no write any more"


async def test_memory_tier_put_of_a_block_that_is_being_written_below_waits_once():
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("a")
        assert await held.store.contains([key_of("a")]) == [True]
        assert not await held.store.put(key_of("a"), block_of("a"))
        held.gate.set()
        await held.quiet()
        assert held.calls.keys_of("put") == [key_of("a")]


async def test_memory_tier_deleted_block_is_not_written_later():
    async with opened_memory() as held:
        held.gate.clear()
        await held.put("a", "b", "c")
        deleting = [asyncio.ensure_future(held.store.delete(key_of(name))) for name in "ac"]
        held.gate.set()
        await asyncio.gather(*deleting)
        await held.quiet()
        assert set(held.below.blocks) == {key_of("b")}
        assert await held.store.contains([key_of("a")]) == [False]


class LateMemory(BlockMemory):
    """A block is added when the test sets `go`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.begun, self.go = threading.Event(), threading.Event()

    def add(self, *args, **options):
        self.begun.set()
        self.go.wait()
        return super().add(*args, **options)


async def test_memory_block_deleted_while_it_is_promoted_stays_deleted():
    memory = LateMemory(
        capacity_bytes=PAGE, block_bytes=BLOCK, policy="lru", tenant_rules=NO_TENANT_RULES
    )
    async with closing(HostMemoryStore(memory, memory.close, FRAME, threads=1)) as store:
        promoting = asyncio.create_task(store.promote(key_of("a"), block_of("a")))
        await asyncio.to_thread(memory.begun.wait)
        await store.delete(key_of("a"))
        memory.go.set()
        assert not await promoting
        assert await store.contains([key_of("a")]) == [False]
        assert await store.promote(key_of("a"), block_of("a")), "after it, and the memory is free"


async def test_memory_tier_block_read_from_below_moves_up_at_once():
    async with opened_memory() as held:
        await held.below.put(key_of("a"), block_of("a"))
        assert await held.store.contains([key_of("a")]) == [True]
        assert held.store.sources([key_of("a")]) == [1]
        assert await read(held.store, key_of("a")) == block_of("a")
        assert held.store.sources([key_of("a")]) == [0]
        await read(held.store, key_of("a"))
        assert len(held.calls.keys_of("get")) == 1
        counts = await held.counts(0)
        assert (counts["moved_up_blocks"], counts["put_blocks"], counts["read_blocks"]) == (1, 1, 1)


async def test_memory_tier_lends_what_is_in_memory_and_nothing_else():
    async with opened_memory() as held:
        await held.below.put(key_of("a"), block_of("a"))
        assert await held.store.contains([key_of("a")]) == [True]
        assert held.store.lend(key_of("a")) is None
        await read(held.store, key_of("a"))
        lent = held.store.lend(key_of("a"))
        assert lent.buffer.view == block_of("a")
        lent.release()
        counts = await held.counts(0)
        assert (counts["read_blocks"], counts["read_bytes"]) == (1, BLOCK)
        await held.store.delete(key_of("a"))
        assert held.store.lend(key_of("a")) is None


async def test_memory_tier_busy_is_read_before_a_tier_below_that_has_the_block():
    async with opened_memory() as held:
        await held.put("a", "b")
        await held.quiet()
        keys = [key_of(name) for name in "ab"] * 8
        assert (
            await asyncio.gather(*(read(held.store, key) for key in keys))
            == [block_of(name) for name in "ab"] * 8
        )
        assert held.calls.keys_of("get") == []


async def test_memory_tier_behind_other_layers_lends_or_reads():
    held = Held(4)
    await held.put("a")
    counters = Counters()
    lent = CountedStore(held.store, counters).lend(key_of("a"))
    assert lent.buffer.view == block_of("a")
    assert counters.snapshot()["read_blocks", ""] == 1
    assert WrapperStore(held.store).lend(key_of("a")) is None
    lent.release()
    await held.store.close()


async def test_memory_tier_corrupt_block_below_never_moves_up():
    class Corrupt(WrapperStore):
        async def get_into(self, key, out, progress=None):
            from sglang_cake.core.errors import BlockCorrupt

            await super().get_into(key, out)
            out[0] ^= 1
            raise BlockCorrupt("a bit")

    async with opened_memory() as held:
        await held.below.put(key_of("a"), block_of("a"))
        held.store.tiers[1].store = Corrupt(held.below)
        with pytest.raises(Exception, match="a bit"):
            await read(held.store, key_of("a"))
        assert await held.in_memory("a") == []


async def test_memory_tier_block_evicted_behind_the_locations_is_read_below():
    async with opened_memory() as held:
        await held.put("a")
        await held.quiet()
        await held.memory.delete(key_of("a"))
        assert held.store.sources([key_of("a")]) == [0]
        assert await read(held.store, key_of("a")) == block_of("a")


async def test_memory_tier_closed_releases_what_was_not_written():
    held = Held(4)
    held.store.drain_s = 0.01
    held.gate.clear()
    await held.put("a", "b")
    await held.store.close()
    assert held.store.tiers[1].counts.dropped_blocks == 2


async def test_memory_tier_before_a_file_store_survives_a_restart_through_the_file(tmp_path):
    urls = f"memory://64KiB,file://{tmp_path}/kv?min_free=0"

    def opened_tiers():
        return open_store(parse_sources(urls), FRAME, depth=2)

    async with closing(opened_tiers()) as store:
        for name in range(5):
            await store.put(key_of(name), block_of(name))
    async with closing(opened_tiers()) as store:
        assert all(await store.contains([key_of(name) for name in range(5)]))
        for name in range(5):
            assert await read(store, key_of(name)) == block_of(name)


KILLED = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from sglang_cake.stores.open_store import open_store, parse_sources
from sglang_cake.testing.store_contract import FRAME, block_of, key_of

async def main():
    store = open_store(parse_sources({urls!r}), FRAME, depth=2)
    for name in range(10**6):
        await store.put(key_of(name), block_of(name))
        print(name, flush=True)

asyncio.run(main())
"""


async def test_memory_tier_killed_leaves_whole_blocks_below_and_nothing_else(tmp_path):
    urls = f"memory://64KiB,file://{tmp_path}/kv?min_free=0"
    program = KILLED.format(tests=os.path.dirname(__file__), urls=urls)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
        last = -1
        while last < 200 or not any((tmp_path / "kv").glob("*/??/??/[0-9a-f]*")):
            last = int(writer.stdout.readline())
        for _ in range(50):  # the block below that was seen may not be in the index yet
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
    shared = {name for name in os.listdir("/dev/shm") if "cake" in name}
    assert not shared

    async with closing(open_store(parse_sources(urls), FRAME, depth=2)) as store:
        found = await store.contains([key_of(name) for name in range(last + 1)])
        for name in range(last + 1):
            if found[name]:
                try:
                    assert await read(store, key_of(name)) == block_of(name)
                except BlockMissing:
                    continue
    assert any(found)


async def test_memory_store_cancelled_read_does_not_write_later():
    store = opened("memory://1MB")
    await store.put(key_of("a"), block_of("a"))
    started, go = threading.Event(), threading.Event()

    def progress(count):
        started.set()
        go.wait(60)

    out = bytearray(BLOCK)
    reading = asyncio.ensure_future(store.get_into(key_of("a"), memoryview(out), progress))
    await asyncio.to_thread(started.wait)
    reading.cancel()
    await asyncio.sleep(0)
    assert not reading.done(), "the thread still uses the buffer"
    go.set()
    await asyncio.wait([reading])
    assert reading.cancelled()
    await store.close()
