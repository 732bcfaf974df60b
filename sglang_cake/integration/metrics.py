"""Cake's counters on SGLang's own `/metrics`, prefix `sglang:cake_`."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from sglang_cake.core.counters import COUNTERS, Counters
from sglang_cake.loading.cost_model import PromptCosts
from sglang_cake.stores.base import Store, StoreStats, TierStats
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.tiers.tier import TierCounts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

PUBLISH_EVERY_S = 1.0
NEWEST_ERROR_WEIGHT = 0.1  # of the newest prediction error in the moving average
_HELP = {
    "loaded_tokens": "Prompt tokens whose KV came from the store.",
    "computed_tokens": "Prompt tokens whose KV was computed.",
    "overlapped_tokens": "Prompt tokens whose KV was loaded while the prompt's last step ran.",
    "overlap_failures": "Last steps that were repeated because KV did not arrive, by reason.",
    "wasted_bytes": "Bytes that crossed the link and were not used, by reason; of average blocks.",
    "load_failures": "Reads and lookups that failed, by reason.",
    "fallback": "Prompts whose stored KV was all computed or all loaded, by side.",
    "repeated_lookups": "Lookups repeated because the tree evicted KV of a waiting request.",
    "unnamed_requests": (
        "Requests left to SGLang because the digest of the weights or of the LoRA adapter was not "
        "known, or the tree had KV of another namespace."
    ),
    "differing_prompts": (
        "Requests of a decode server whose prompt differed from the one that the prefill server "
        "computed: nothing of them is stored."
    ),
    "unkeyed_requests": "Requests left to SGLang because keys do not cover their KV, by reason.",
    "read_blocks": "Blocks read from the store.",
    "read_bytes": "Bytes of blocks read from the store, encoded and with header.",
    "stored_bytes": "Bytes of blocks written to the store, encoded and with header.",
    "stored_blocks": "Blocks written to the store.",
    "encoded_blocks": "Encoded blocks that were written, by codec.",
    "auto_refused_blocks": "Codecs that auto did not use for a block, by codec and reason.",
    "unstored_blocks": "Computed blocks that were not stored, by reason.",
    "helped_tokens": "KV-Runahead: prompt tokens whose KV other members computed.",
    "runahead_hops": "KV-Runahead: spans of prompts that other members computed.",
    "runahead_bytes": "KV-Runahead: bytes of KV received from other members.",
    "runahead_sent_bytes": "KV-Runahead: bytes of KV sent to other members.",
    "runahead_failures": "KV-Runahead: prompts whose sharing failed, by reason.",
}
_EVICTION_HELP = {  # of EVICTION_COUNTS
    "evicted_bytes": "Bytes evicted by this process, by policy.",
    "evicted_blocks": "Blocks evicted by this process, by policy.",
    "evicting_us": "Microseconds that the policy took to choose victims.",
    "skipped_blocks": "Blocks that admission did not write, by policy.",
}
_LABELS = {
    "fallback": ("side",),
    "encoded_blocks": ("codec",),
    "auto_refused_blocks": ("codec", "reason"),
}


def _metric(
    kind: Any, name: str, text: str, labels: dict[str, str], *own: str, **options: Any
) -> Callable[..., Any]:
    """A metric with SGLang's labels and its own.

    Returns: a function from the values of its own labels to the child with them.
    """
    metric = kind(f"sglang:cake_{name}", text, [*labels, *own], **options)
    return lambda *values: metric.labels(*labels.values(), *values)


_counter = partial(_metric, Counter)
_gauge = partial(_metric, Gauge, multiprocess_mode="mostrecent")


class Metrics:
    """Publishes the counters of a scheduler process. Scheduler thread.

    Args:
        labels: the labels of SGLang's own cache metrics, with their values.
    """

    def __init__(self, counters: Counters, labels: dict[str, str]) -> None:
        self._counters = counters
        self._published: dict[tuple[str, str], int] = {}
        self._next_s = 0.0
        self._metrics = {
            name: _counter(f"{name}_total", _HELP[name], labels, *_labels(name))
            for name in COUNTERS
        }
        for name, values in COUNTERS.items():  # every label exists from the start, at zero
            for value in values:
                self._metrics[name](*value.split())
        self._meet = _metric(
            Histogram,
            "meet_fraction",
            "Where in the prompt computing met loading (0: all loaded, 1: all computed).",
            labels,
            buckets=[i / 10 for i in range(11)],
        )()
        self._bandwidth = _gauge(
            "read_bandwidth_bytes_per_s",
            "Bandwidth of recent reads from the store, encoded and with header.",
            labels,
        )()
        self._costs = _gauge(
            "cost_seconds",
            "Measured costs: of a prefill step (fixed, per token, per pair of query and key, per "
            "decoding request, per token of the prefix with MLA) and of a load (latency, per "
            "block, per copy to the device).",
            labels,
            "what",
        )
        self._error = _gauge(
            "prediction_error", "Mean relative error of recent predictions.", labels, "of"
        )
        self._ttft_error = 0.0
        self._overhead = _metric(
            Histogram,
            "step_overhead_seconds",
            "Time that cake added to a scheduling step.",
            labels,
            buckets=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        )()

    def publish(self, *, costs: PromptCosts, step_overhead_s: float | None) -> None:
        """Called once a step. Counters and gauges are published every PUBLISH_EVERY_S.

        Args: step_overhead_s: what cake added to the step; None if it had nothing to do.
        """
        if step_overhead_s is not None:
            self._overhead.observe(step_overhead_s)
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PUBLISH_EVERY_S
        self._publish_costs(costs)
        counts = self._counters.snapshot()
        more = {key: count - self._published.get(key, 0) for key, count in counts.items()}
        self._published = counts
        if blocks := more["read_blocks", ""]:
            self._bandwidth.set(more["read_bytes", ""] / blocks / costs.load.block_s)
        for (name, value), count in more.items():
            self._metrics[name](*value.split()).inc(count)

    def publish_next_step(self) -> None:
        """Publish with the next step. Called when a request ends: an idle server
        (`--sleep-on-idle`) may have no later step for a long time."""
        self._next_s = 0.0

    def observe_meet(self, fraction: float) -> None:
        """The prefill of a prompt has ended; `fraction` of the prompt lies before the meet."""
        self._meet.observe(fraction)

    def observe_prediction(self, predicted_s: float, took_s: float) -> None:
        """The prefill of a prompt was predicted to take `predicted_s`, and took `took_s`."""
        error = min(1.0, abs(took_s - predicted_s) / took_s)
        self._ttft_error += NEWEST_ERROR_WEIGHT * (error - self._ttft_error)

    def _publish_costs(self, costs: PromptCosts) -> None:
        prefill, load = costs.prefill, costs.load
        found = {
            "step": prefill.fixed_s,
            "token": prefill.token_s,
            "pair": prefill.pair_s,
            "decode": prefill.decode_s,
            "prefix": prefill.prefix_s,
            "latency": load.latency_s,
            "block": load.block_s,
            "copy": load.copy_s,
        }
        for what, value_s in found.items():
            self._costs(what).set(value_s)
        errors = {"step": prefill.error, "load": load.error, "ttft": self._ttft_error}
        for of, error in errors.items():
            self._error(of).set(error)


def _labels(name: str) -> tuple[str, ...]:
    """The labels of a counter of COUNTERS."""
    return () if COUNTERS[name] == ("",) else _LABELS.get(name, ("reason",))


class FailureMetrics:
    """Failures that the boundary to SGLang has handled, and whether cake is on. Any thread.

    Args:
        labels: the labels of the scheduler; empty in a process without a scheduler. Such a process
            does not publish whether cake is on.
        hooks: every hook that can fail; its counter exists from the start, at zero.
    """

    def __init__(self, labels: dict[str, str], hooks: Iterable[str]) -> None:
        self._failures = _counter(
            "hook_failures_total",
            "Exceptions of cake that were kept from SGLang, by hook.",
            labels,
            "hook",
        )
        self._on: Gauge | None = None
        if labels:
            self._on = _gauge(
                "on",
                "1 while cake is on; 0 after it switched itself off because of failures.",
                labels,
            )()
            self._on.set(1)
        for hook in hooks:
            self._failures(hook)

    def failed(self, hook: str) -> None:
        """A hook has failed."""
        self._failures(hook).inc()

    def switched_off(self) -> None:
        """Cake is off for the life of the process."""
        if self._on is not None:
            self._on.set(0)


class StoreMetrics:
    """Publishes the use, the evictions and the tiers of the store. Tier 1 is the fastest. A store
    without tiers publishes nothing about them. I/O thread."""

    def __init__(self, labels: dict[str, str], tiers: int) -> None:
        """Args: tiers: number of tiers of the first store; 1 is a store without tiers."""
        self._store: Store | None = None
        self._counts: dict[object, int] = {}  # of that store, as published
        self._known_tiers = 0
        self._used = _gauge(
            "store_used_bytes",
            "Bytes that the store holds, of all processes that share it.",
            labels,
        )()
        self._capacity = _gauge(
            "store_capacity_bytes",
            "Bytes that the store may hold; 0 if it has no bound of its own.",
            labels,
        )()
        self._evicted = {
            name: _counter(f"store_{name}_total", text, labels, "policy")
            for name, text in _EVICTION_HELP.items()
        }
        for counter in self._evicted.values():
            for policy in POLICIES:
                counter(policy)
        self._events = _counter(
            "store_events_total",
            "What happened between this process and its stores, by name.",
            labels,
            "event",
        )
        self._tier_blocks = _counter(
            "tier_blocks_total", "Blocks of a tier, by what happened.", labels, "tier", "event"
        )
        self._tier_bytes = _counter(
            "tier_bytes_total", "Bytes read from and put into a tier.", labels, "tier", "way"
        )
        self._tier_failures = _counter(
            "tier_failures_total",
            "Calls that failed, lookups answered too late, times that a tier was left out.",
            labels,
            "tier",
            "reason",
        )
        self._tier_up = _gauge(
            "tier_up",
            "Whether a tier is used; 0 while it is left out, NaN if there is none any more.",
            labels,
            "tier",
            "use",
        )
        if tiers > 1:  # every label exists from the start
            self._publish_tiers([TierStats(None, True, True, asdict(TierCounts()))] * tiers)

    def publish(self, store: Store | None, stats: StoreStats | None) -> None:
        """Publish `stats`, and what the store's own counters say.

        Args:
            store: the source of `stats`; None: no store is in use. The counts of another store
                begin at zero, and the tiers of the last one are no more.
            stats: asked for before this call, since that opens the store: names of its events exist
                from then on, at zero. None if the store does not answer.
        """
        if store is not self._store:
            if self._store is not None:
                self._publish_tiers(())
            self._store = store
            self._counts = {}
            self._used.set(0)
            self._capacity.set(0)
        if store is None:
            return
        for name, count in store.events().items():
            self._count(self._events(name), count)
        if stats is None:
            return
        if stats.used_bytes is not None:  # else a folder may be building its index again
            self._used.set(stats.used_bytes)
        self._capacity.set(stats.capacity_bytes or 0)
        for name, count in asdict(stats.evictions).items():
            if count:
                # Without its first tier, a tiered store names the policy of another one.
                self._count(self._evicted[name](stats.policy), count, key=name)
        self._publish_tiers(stats.tiers)

    def _publish_tiers(self, tiers: Sequence[TierStats]) -> None:
        for number, tier in enumerate(tiers, 1):
            for name, count in tier.counts.items():
                self._count(self._of_tier(number, name), count)
        self._known_tiers = max(self._known_tiers, len(tiers))
        for number in range(1, self._known_tiers + 1):
            known = tiers[number - 1] if number <= len(tiers) else None
            # Files that several processes share keep a label for ever, so NaN stands for no tier.
            self._tier_up(number, "read").set(math.nan if known is None else known.reading)
            self._tier_up(number, "put").set(math.nan if known is None else known.writing)

    def _of_tier(self, number: int, name: str) -> Counter:
        """The counter that publishes a field of `TierCounts`."""
        found: Counter
        if name.endswith("_bytes"):
            found = self._tier_bytes(number, name.removesuffix("_bytes"))
        elif name.endswith("_blocks"):
            found = self._tier_blocks(number, name.removesuffix("_blocks"))
        else:
            found = self._tier_failures(number, name)
        return found

    def _count(self, counter: Counter, count: int, key: object = None) -> None:
        """Add what the store has counted since the last call. Args: key: of the count; None: it is
        always published in this counter."""
        key = key or counter
        published = self._counts.get(key, 0)
        if count > published:  # else a tier does not answer, whose counts come back with it
            counter.inc(count - published)
            self._counts[key] = count


def scheduler_labels(ctx: "TreeCacheBuildContext") -> dict[str, str] | None:
    """The labels of SGLang's own cache metrics, with values that no other scheduler of the server
    has; None if metrics are off."""
    if not ctx.params.enable_metrics:
        return None
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.observability.metrics_collector import radix_cache_metric_labels
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    labels = radix_cache_metric_labels("CakeRadixCache", parallel, is_dp_attention_enabled())
    # That is 0 on all replicas of the model. SGLang's metrics of schedulers have their number.
    replica = getattr(parallel, "dp_rank", None)
    if replica is not None:
        labels["dp_rank"] = replica
    return {name: str(value) for name, value in labels.items()}
