"""Metrics of the store, its tiers and its codecs in SGLang's `/metrics`."""

import asyncio
import contextlib
import math
from types import SimpleNamespace

import pytest
from private_files import write_private

from sglang_cake.core.codec_names import CODECS, REFUSALS
from sglang_cake.core.counters import COUNTERS, Counters
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.integration.build import STATS_EVERY_S, close_later, publish_stats
from sglang_cake.integration.metrics import Metrics, StoreMetrics, scheduler_labels
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.stores.base import EvictionCounts, StoreStats, TierStats, WrapperStore
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.open_store import open_blocks, parse_sources
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.memory_store import MemoryStore
from sglang_cake.testing.store_contract import FRAME, LAYOUT, block_of, key_of, read
from sglang_cake.testing.virtual_time import in_virtual_time

LABELS = {"model": "m"}
COSTS = PromptCosts(PrefillCost(0.01, 1e-4, 1e-9), LoadCost(0.0, 0.005, depth=1))


class Unwritable(WrapperStore):
    async def put(self, key, data):
        raise StoreUnavailable("down")


@pytest.fixture(scope="module")
def metrics():
    prometheus = pytest.importorskip("prometheus_client")
    return StoreMetrics(LABELS, 2), prometheus.REGISTRY


def sample(registry, name, **labels):
    return registry.get_sample_value(f"sglang:cake_{name}", LABELS | labels)


async def test_store_metrics_each_tier_is_published_from_the_start_and_over_a_swap(metrics):
    store_metrics, registry = metrics

    def of(name, tier, **labels):
        return sample(registry, f"tier_{name}", tier=str(tier), **labels)

    for tier in (1, 2):
        for event in ("read", "missing", "corrupt", "put", "moved_up", "full"):
            assert of("blocks_total", tier, event=event) == 0
        for way in ("read", "put"):
            assert of("bytes_total", tier, way=way) == 0
            assert of("up", tier, use=way) == 1
        for reason in ("failed_calls", "late_answers", "left_out"):
            assert of("failures_total", tier, reason=reason) == 0
    assert of("up", 3, use="read") is None

    async def use(store):
        await store.put(key_of("a"), block_of("a"))
        assert await read(store, key_of("a")) == block_of("a")
        store_metrics.publish(store, await store.stats())
        store_metrics.publish(store, await store.stats())  # nothing is counted twice
        await store.close()

    def tiered(*stores):
        return TieredStore(stores, block_bytes=LAYOUT.block_bytes)

    await use(tiered(MemoryStore(), MemoryStore()))
    assert of("blocks_total", 1, event="put") == of("blocks_total", 1, event="read") == 1
    assert of("bytes_total", 1, way="read") == LAYOUT.block_bytes
    assert of("bytes_total", 1, way="put") == LAYOUT.block_bytes
    broken = Unwritable(MemoryStore())
    await use(tiered(broken, MemoryStore(), MemoryStore()))
    assert of("failures_total", 1, reason="failed_calls") >= 1
    assert of("blocks_total", 2, event="read") == 1
    assert of("up", 3, use="read") == 1
    plain = MemoryStore()
    await use(plain)
    # No tier is down, so no alert fires.
    assert math.isnan(of("up", 3, use="read"))
    assert math.isnan(of("up", 1, use="put"))
    assert of("blocks_total", 1, event="read") == 1  # a counter never goes back
    left_out = TierStats(None, reading=False, writing=False, counts={})
    for following in (None, MemoryStore()):  # detached; another one, which does not answer
        last = StoreStats(used_bytes=5, capacity_bytes=10, tiers=(left_out, left_out))
        store_metrics.publish(MemoryStore(), last)
        assert of("up", 2, use="put") == 0
        store_metrics.publish(following, None)
        assert math.isnan(of("up", 2, use="put"))
        assert sample(registry, "store_used_bytes") == 0
        assert sample(registry, "store_capacity_bytes") == 0


def test_store_metrics_used_bytes_that_are_unknown_for_a_while_stay(metrics):
    store_metrics, registry = metrics
    store = MemoryStore()
    for of, stats, used_bytes in (
        (store, StoreStats(used_bytes=4096), 4096),
        (store, StoreStats(), 4096),
        (MemoryStore(), StoreStats(), 0),
    ):
        store_metrics.publish(of, stats)
        assert sample(registry, "store_used_bytes") == used_bytes


def test_store_metrics_evictions_are_counted_once_by_policy(metrics):
    store_metrics, registry = metrics
    stats = StoreStats(policy="workload", evictions=EvictionCounts(4096, 2, 17, 3))

    def of(name, policy):
        return sample(registry, f"store_{name}_total", policy=policy)

    names = ("evicted_bytes", "evicted_blocks", "evicting_us", "skipped_blocks")
    store = MemoryStore()
    for _ in range(2):  # nothing is counted twice
        store_metrics.publish(store, stats)
    assert [of(name, "workload") for name in names] == [4096, 2, 17, 3]
    assert [of(name, "lru") for name in names] == [0, 0, 0, 0]


def test_store_metrics_evictions_are_counted_once_when_the_policy_changes(metrics):
    """As of a tiered store while its first tier is left out."""
    store_metrics, registry = metrics

    def all_blocks():
        found = [sample(registry, "store_evicted_blocks_total", policy=each) for each in POLICIES]
        return sum(found)

    before = all_blocks()
    store = MemoryStore()
    for policy in ("workload", "lru", "workload"):
        stats = StoreStats(policy=policy, evictions=EvictionCounts(4096, 2, 17, 3))
        store_metrics.publish(store, stats)
    assert all_blocks() - before == 2


def test_store_metrics_evictions_of_a_tier_that_answers_again_are_counted_once(metrics):
    """The statistics of a tiered store have the evictions of the tiers that answer."""
    store_metrics, registry = metrics

    def evicted_blocks():
        return sample(registry, "store_evicted_blocks_total", policy="lru")

    before = evicted_blocks()
    store = MemoryStore()
    for answering in (10 + 5, 5, 6, 12 + 7):
        stats = StoreStats(policy="lru", evictions=EvictionCounts(evicted_blocks=answering))
        store_metrics.publish(store, stats)
    assert evicted_blocks() - before == 12 + 7


def test_counters_all_exist_from_the_start_and_are_published():
    registry = pytest.importorskip("prometheus_client").REGISTRY
    counters = Counters()
    metrics = Metrics(counters, LABELS)
    assert {name for name, values in COUNTERS.items() if " " in values[0]} == {
        "auto_refused_blocks"
    }
    for codec in CODECS:
        assert sample(registry, "encoded_blocks_total", codec=codec) == 0
        for reason in REFUSALS:
            found = sample(registry, "auto_refused_blocks_total", codec=codec, reason=reason)
            assert found == 0
    assert sample(registry, "stored_bytes_total") == 0
    counters.add("auto_refused_blocks", 3, label="int8 block_error")
    counters.add("fallback", label="load")
    counters.add("unstored_blocks", label="full")
    counters.add("read_blocks", 2)
    counters.add("read_bytes", 600)
    metrics.publish(costs=COSTS, step_overhead_s=None)
    assert sample(registry, "read_bandwidth_bytes_per_s") == 300 / COSTS.load.block_s
    refused = {"codec": "int8", "reason": "block_error"}
    assert sample(registry, "auto_refused_blocks_total", **refused) == 3
    assert sample(registry, "fallback_total", side="load") == 1
    assert sample(registry, "unstored_blocks_total", reason="full") == 1
    assert sample(registry, "unstored_blocks_total", reason="queue_full") == 0


async def test_events_of_an_http_store_are_counted_also_while_it_is_down(metrics, tmp_path):
    """Also through all wrappers: tiers, a link of limited bandwidth, encryption, a codec."""
    store_metrics, registry = metrics

    def of(event):
        return sample(registry, "store_events_total", event=event)

    async def stats_of(store):
        with contextlib.suppress(StoreUnavailable):
            return await store.stats()

    key = write_private(tmp_path / "key", "ab" * 32)
    down = f"http://127.0.0.1:{free_port()}?bandwidth=1GB/s&key_file={key}"
    near = f"file://{tmp_path}/near?min_free=0"

    async def use(url):
        sources = parse_sources(url)
        store = open_blocks(sources, [FRAME.namespace], LAYOUT, codec="zstd", depth=2)
        store_metrics.publish(store, await stats_of(store))
        assert of("hedges") == of("timeouts") == 0  # from the start
        before = of("retries"), of("breaker_openings")
        for _ in range(4):
            with contextlib.suppress(StoreUnavailable):
                await store.contains([key_of("a")])
        store_metrics.publish(store, None)
        after = of("retries"), of("breaker_openings")
        assert after[0] > before[0]
        assert after[1] > before[1]
        store_metrics.publish(store, None)  # nothing is counted twice
        assert (of("retries"), of("breaker_openings")) == after
        await store.close()

    await use(down)
    await use(f"{near},{down}")
    openings = of("breaker_openings")
    store_metrics.publish(MemoryStore(), None)  # counts nothing
    assert of("breaker_openings") == openings  # a counter never goes back


class Careless(MemoryStore):
    """A store of another package, with a bug."""

    closed = False

    async def contains(self, keys):
        raise ValueError("a bug")

    async def stats(self):
        raise ValueError("a bug")

    async def close(self):
        self.closed = True


def test_metrics_go_on_after_a_store_with_a_bug(caplog):
    published, in_use = [], [Careless()]
    metrics = SimpleNamespace(publish=lambda store, stats: published.append(store))

    async def watched():
        watching = asyncio.ensure_future(publish_stats(metrics, lambda: in_use[-1]))
        await asyncio.sleep(3 * STATS_EVERY_S)
        in_use.append(MemoryStore())
        await asyncio.sleep(3 * STATS_EVERY_S)
        watching.cancel()

    in_virtual_time(watched())
    assert published
    assert {*published} == {in_use[-1]}
    assert caplog.text.count("broke its contract") == 1


def test_metrics_of_the_next_store_do_not_wait_for_one_that_hangs():
    published, calls = [], []

    class Hung(MemoryStore):
        async def stats(self):
            calls.append(self)
            await asyncio.Event().wait()

    metrics = SimpleNamespace(publish=lambda *each: published.append(each))
    hung, other = Hung(), MemoryStore()
    in_use = [hung]

    async def watched():
        watching = asyncio.ensure_future(publish_stats(metrics, lambda: in_use[-1]))
        await asyncio.sleep(5 * STATS_EVERY_S)
        assert len(published) > 1, "its events, which need no answer"
        assert set(published) == {(hung, None)}
        assert calls == [hung]
        in_use.append(other)
        await asyncio.sleep(3 * STATS_EVERY_S)
        watching.cancel()

    in_virtual_time(watched())
    store, stats = published[-1]
    assert store is other
    assert stats is not None


class Hanging(MemoryStore):
    async def contains(self, keys):
        await asyncio.Event().wait()


@pytest.mark.parametrize("following", [Careless, Hanging])
def test_swapped_store_is_closed_if_the_next_one_hangs_or_has_a_bug(following):
    async def drained(patience_s):
        pass

    old, new = Careless(), following()
    in_virtual_time(close_later(old, SimpleNamespace(drained=drained), lambda: new))
    assert old.closed


@pytest.mark.parametrize(
    ("replica", "in_groups", "expected"),
    [
        (None, False, ("3", "0")),
        (0, False, ("3", "0")),
        (2, False, ("3", "2")),  # replicas of the model, each with ranks of its own
        (1, True, ("1", "1")),  # attention groups among the ranks
    ],
)
def test_scheduler_labels_of_each_replica_and_rank_are_its_own(
    replica, in_groups, expected, monkeypatch
):
    """Two processes with one label would overwrite each other's gauges."""
    runtime_context = pytest.importorskip("sglang.srt.runtime_context")
    ranks = SimpleNamespace(
        tp_rank=3, pp_rank=0, dp_rank=replica, attn_tp_rank=1, attn_dp_rank=1 if in_groups else 0
    )
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: ranks)
    monkeypatch.setattr(runtime_context.get_flags().dp, "enabled", in_groups)
    labels = scheduler_labels(SimpleNamespace(params=SimpleNamespace(enable_metrics=True)))
    assert (labels["tp_rank"], labels["dp_rank"]) == expected
