"""Cake's counters on SGLang's own `/metrics`, prefix `sglang:cake_`."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from sglang_cake.core.counters import COUNTERS, Counters
from sglang_cake.loading.cost_model import PromptCosts
from sglang_cake.stores.base import Store, StoreStats, TierStats
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.tiers.tier import TierCounts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

M = TypeVar("M", Counter, Gauge)

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
    "unnamed_requests": "Requests left to SGLang because the digest of the weights was not known.",
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


class Metrics:
    """Publishes the counters of a scheduler process. Scheduler thread.

    Args:
        labels: the labels of SGLang's own cache metrics, with their values.
    """

    def __init__(self, counters: Counters, labels: dict[str, str]) -> None:
        self._counters = counters
        self._labels = labels
        self._seen = dict.fromkeys(counters.snapshot(), 0)
        self._next_s = 0.0
        names = list(labels)
        self._metrics = {
            name: Counter(
                f"sglang:cake_{name}_total",
                _HELP[name],
                [*names, *_labels(name)],
            )
            for name in COUNTERS
        }
        for name, values in COUNTERS.items():  # every label exists from the start, at zero
            for value in values:
                self._child(name, value)
        self._meet = Histogram(
            "sglang:cake_meet_fraction",
            "Where in the prompt computing met loading (0: all loaded, 1: all computed).",
            names,
            buckets=[i / 10 for i in range(11)],
        ).labels(**labels)
        self._bandwidth = Gauge(
            "sglang:cake_read_bandwidth_bytes_per_s",
            "Bandwidth of recent reads from the store, encoded and with header.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._costs = Gauge(
            "sglang:cake_cost_seconds",
            "Measured costs: of a prefill step (fixed, per token, per pair of query and key, per "
            "decoding request, per token of the prefix with MLA) and of a load (latency, per "
            "block, per copy to the device).",
            [*names, "what"],
            multiprocess_mode="mostrecent",
        )
        self._error = Gauge(
            "sglang:cake_prediction_error",
            "Mean relative error of recent predictions.",
            [*names, "of"],
            multiprocess_mode="mostrecent",
        )
        self._ttft_error = 0.0
        self._overhead = Histogram(
            "sglang:cake_step_overhead_seconds",
            "Time that cake added to a scheduling step.",
            names,
            buckets=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        ).labels(**labels)

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
        read_blocks = counts["read_blocks", ""] - self._seen["read_blocks", ""]
        read_bytes = counts["read_bytes", ""] - self._seen["read_bytes", ""]
        if read_blocks:
            self._bandwidth.set(read_bytes / read_blocks / costs.load.block_s)
        for (name, value), total in counts.items():
            self._child(name, value).inc(total - self._seen.get((name, value), 0))
            self._seen[name, value] = total

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
            self._costs.labels(**self._labels, what=what).set(value_s)
        errors = {"step": prefill.error, "load": load.error, "ttft": self._ttft_error}
        for of, error in errors.items():
            self._error.labels(**self._labels, of=of).set(error)

    def _child(self, name: str, value: str) -> Counter:
        own = dict(zip(_labels(name), value.split(), strict=True))
        return self._metrics[name].labels(**self._labels, **own)


def _labels(name: str) -> tuple[str, ...]:
    """The labels of a counter of COUNTERS."""
    return () if COUNTERS[name] == ("",) else _LABELS.get(name, ("reason",))


class FailureMetrics:
    """Failures that the boundary to SGLang has handled, and whether cake is on. Any thread.

    Args:
        labels: of the scheduler; empty in a process without a scheduler. Such a process does not
            publish whether cake is on.
        hooks: every hook that can fail; its counter exists from the start, at zero.
    """

    def __init__(self, labels: dict[str, str], hooks: Iterable[str]) -> None:
        self._labels = labels
        names = list(labels)
        self._failures = Counter(
            "sglang:cake_hook_failures_total",
            "Exceptions of cake that were kept from SGLang, by hook.",
            [*names, "hook"],
        )
        self._on: Gauge | None = None
        if labels:
            self._on = Gauge(
                "sglang:cake_on",
                "1 while cake is on; 0 after it switched itself off because of failures.",
                names,
                multiprocess_mode="mostrecent",
            ).labels(**labels)
            self._on.set(1)
        for hook in hooks:
            self._failures.labels(**labels, hook=hook)

    def failed(self, hook: str) -> None:
        """A hook has failed."""
        self._failures.labels(**self._labels, hook=hook).inc()

    def switched_off(self) -> None:
        """Cake is off for the life of the process."""
        if self._on is not None:
            self._on.set(0)


class StoreMetrics:
    """Publishes the use, the evictions and the tiers of the store. I/O thread."""

    def __init__(self, labels: dict[str, str], tiers: int) -> None:
        """Args: tiers: number of tiers of the first store; 1 is a store without tiers."""
        self._tiers = TierMetrics(labels, tiers)
        self._labels = labels
        names = list(labels)
        self._used = Gauge(
            "sglang:cake_store_used_bytes",
            "Bytes that the store holds, of all processes that share it.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._capacity = Gauge(
            "sglang:cake_store_capacity_bytes",
            "Bytes that the store may hold; 0 if it has no bound of its own.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._evicted = {
            name: Counter(f"sglang:cake_store_{name}_total", text, [*names, "policy"])
            for name, text in _EVICTION_HELP.items()
        }
        for counter in self._evicted.values():
            for policy in POLICIES:
                counter.labels(**labels, policy=policy)
        self._seen: tuple[Store | None, dict[str, int]] = (None, {})
        self._events = Counter(
            "sglang:cake_store_events_total",
            "What happened between this process and its remote stores, by name.",
            [*names, "event"],
        )
        self._seen_events: tuple[Store | None, dict[str, int]] = (None, {})

    def publish(self, store: Store, stats: StoreStats | None) -> None:
        """Publish `stats`, and what the store's own counters say.

        Args:
            store: the source of `stats`. The counts of another store begin at zero.
            stats: asked for before this call, since that opens the store: names of its events exist
                from then on, at zero. None if the store does not answer.
        """
        self._publish_events(store)
        if stats is not None:
            self._publish_stats(store, stats)

    def _publish_events(self, store: Store) -> None:
        before = self._seen_events[1] if self._seen_events[0] is store else {}
        self._seen_events = (store, dict(store.events()))
        for name, count in self._seen_events[1].items():
            self._events.labels(**self._labels, event=name).inc(count - before.get(name, 0))

    def _publish_stats(self, store: Store, stats: StoreStats) -> None:
        self._tiers.publish(store, stats.tiers)
        self._used.set(stats.used_bytes or 0)
        self._capacity.set(stats.capacity_bytes or 0)
        before = self._seen[1] if self._seen[0] is store else {}
        self._seen = (store, asdict(stats.evictions))
        for name, counter in self._evicted.items():
            more = self._seen[1][name] - before.get(name, 0)
            if more > 0:
                counter.labels(**self._labels, policy=stats.policy).inc(more)


class TierMetrics:
    """Publishes what happened in each tier of a tiered store. Tier 1 is the fastest. A store
    without tiers publishes nothing here. I/O thread."""

    def __init__(self, labels: dict[str, str], tiers: int) -> None:
        self._labels = labels
        names = [*labels, "tier"]
        self._blocks = Counter(
            "sglang:cake_tier_blocks_total",
            "Blocks of a tier, by what happened.",
            [*names, "event"],
        )
        self._bytes = Counter(
            "sglang:cake_tier_bytes_total", "Bytes read from and put into a tier.", [*names, "way"]
        )
        self._failures = Counter(
            "sglang:cake_tier_failures_total",
            "Calls that failed, lookups answered too late, times that a tier was left out.",
            [*names, "reason"],
        )
        self._up = Gauge(
            "sglang:cake_tier_up",
            "Whether a tier is used; 0 while it is left out, NaN if there is none any more.",
            [*names, "use"],
            multiprocess_mode="mostrecent",
        )
        self._seen: tuple[Store | None, list[dict[str, int]]] = (None, [])
        self._known = 0
        if tiers > 1:
            self._make_known(tiers)

    def publish(self, store: Store, tiers: Sequence[TierStats]) -> None:
        """Args: store: the source of `tiers`. The counts of another store begin at zero."""
        self._make_known(len(tiers))
        before = self._seen[1] if self._seen[0] is store else [{} for _ in tiers]
        for number, (each, seen) in enumerate(zip(tiers, before, strict=True), 1):
            for name, count in each.counts.items():
                self._counter(number, name).inc(count - seen.get(name, 0))
        self._seen = (store, [dict(tier.counts) for tier in tiers])
        for number in range(1, self._known + 1):
            tier = tiers[number - 1] if number <= len(tiers) else None
            # Files that several processes share keep a label for ever, so NaN stands for no tier.
            self._of(self._up, number, use="read").set(math.nan if tier is None else tier.reading)
            self._of(self._up, number, use="put").set(math.nan if tier is None else tier.writing)

    def _make_known(self, tiers: int) -> None:
        """Create every label of new tiers, at zero."""
        for number in range(self._known + 1, tiers + 1):
            for field in fields(TierCounts):
                self._counter(number, field.name)
            for use in ("read", "put"):
                self._of(self._up, number, use=use).set(1)
        self._known = max(self._known, tiers)

    def _counter(self, number: int, name: str) -> Counter:
        """The counter that publishes a field of `TierCounts`."""
        if name.endswith("_bytes"):
            return self._of(self._bytes, number, way=name.removesuffix("_bytes"))
        if name.endswith("_blocks"):
            return self._of(self._blocks, number, event=name.removesuffix("_blocks"))
        return self._of(self._failures, number, reason=name)

    def _of(self, metric: M, number: int, **label: str) -> M:
        child: M = metric.labels(**self._labels, tier=str(number), **label)
        return child


def scheduler_labels(ctx: "TreeCacheBuildContext") -> dict[str, str] | None:
    """The labels of SGLang's own cache metrics, with their values; None if metrics are off."""
    if not ctx.params.enable_metrics:
        return None
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.observability.metrics_collector import radix_cache_metric_labels
    from sglang.srt.runtime_context import get_parallel

    labels = radix_cache_metric_labels("CakeRadixCache", get_parallel(), is_dp_attention_enabled())
    return {name: str(value) for name, value in labels.items()}
