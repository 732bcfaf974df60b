"""Cake's counters on SGLang's own `/metrics`, prefix `sglang:cake_`."""

import time

from prometheus_client import Counter, Gauge, Histogram

from sglang_cake.counters import COUNTERS, Counters
from sglang_cake.read.cost import Costs
from sglang_cake.store.base import Store, StoreStats
from sglang_cake.store.eviction import RANKS

PUBLISH_EVERY_S = 1.0
NEWEST_ERROR = 0.1  # weight of the newest miss in the mean miss
_HELP = {
    "loaded_tokens": "Prompt tokens whose KV came from the store.",
    "computed_tokens": "Prompt tokens whose KV was computed.",
    "wasted_bytes": "Bytes loaded in vain, by reason.",
    "load_failures": "Blocks or lookups that the store failed, by reason.",
    "fallback": "Prompts that were left to one side alone.",
    "read_bytes": "Bytes read from the store.",
    "stored_bytes": "Bytes written to the store.",
    "stored_blocks": "Blocks written to the store.",
    "unstored_blocks": "Blocks that were not written, by reason.",
}
_LABEL = {"fallback": "side"}


class Metrics:
    """Publishes a scheduler process's counters. Scheduler thread.

    Args:
        labels: the label values that SGLang puts on its own cache metrics.
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
                names + ([] if values == ("",) else [_LABEL.get(name, "reason")]),
            )
            for name, values in COUNTERS.items()
        }
        for name, values in COUNTERS.items():  # every label is there from the start, at zero
            for value in values:
                self._child(name, value)
        self._meet = Histogram(
            "sglang:cake_meet_fraction",
            "Where in the prompt compute met load (0: all loaded, 1: all computed).",
            names,
            buckets=[i / 10 for i in range(11)],
        ).labels(**labels)
        self._bandwidth = Gauge(
            "sglang:cake_read_bandwidth_bytes_per_s",
            "Bandwidth of recent reads from the store.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._costs = Gauge(
            "sglang:cake_cost_seconds",
            "Measured costs: of a prefill step (fixed, per token, per pair of query and key, per "
            "decoding request) and of a load (latency, per block, per copy to the device).",
            [*names, "what"],
            multiprocess_mode="mostrecent",
        )
        self._error = Gauge(
            "sglang:cake_prediction_error",
            "Mean share by which recent predictions missed.",
            [*names, "of"],
            multiprocess_mode="mostrecent",
        )
        self._ttft_error = 0.0
        self._overhead = Histogram(
            "sglang:cake_step_overhead_seconds",
            "Time that cake took of a scheduling step.",
            names,
            buckets=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        ).labels(**labels)

    def publish(self, *, block_bytes: int, costs: Costs, step_overhead_s: float | None) -> None:
        """Once a step; counters go out once a second."""
        if step_overhead_s is not None:
            self._overhead.observe(step_overhead_s)
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PUBLISH_EVERY_S
        self._bandwidth.set(block_bytes / costs.load.block_s)
        self._publish_costs(costs)
        for (name, value), total in self._counters.snapshot().items():
            self._child(name, value).inc(total - self._seen[name, value])
            self._seen[name, value] = total

    def met(self, fraction: float) -> None:
        """A prompt's prefill is over; `fraction` of it lies before the meet."""
        self._meet.observe(fraction)

    def predicted(self, predicted_s: float, took_s: float) -> None:
        """A prompt was predicted to be ready after `predicted_s`, and was after `took_s`."""
        miss = min(1.0, abs(took_s - predicted_s) / took_s)
        self._ttft_error += NEWEST_ERROR * (miss - self._ttft_error)

    def _publish_costs(self, costs: Costs) -> None:
        prefill, load = costs.prefill, costs.load
        found = {
            "step": prefill.fixed_s,
            "token": prefill.token_s,
            "pair": prefill.pair_s,
            "decode": prefill.decode_s,
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
        label = {} if value == "" else {_LABEL.get(name, "reason"): value}
        return self._metrics[name].labels(**self._labels, **label)


class StoreMetrics:
    """How full the store is, asked of the store now and then. I/O thread."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels, names = labels, list(labels)
        self._used = Gauge(
            "sglang:cake_store_used_bytes",
            "What the store holds, over all who share it.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._capacity = Gauge(
            "sglang:cake_store_capacity_bytes",
            "What the store may hold; 0 when it has no bound of its own.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._evicted = Counter(
            "sglang:cake_store_evicted_bytes_total",
            "Bytes that made way for others, evicted by this process.",
            [*names, "policy"],
        )
        for policy in RANKS:
            self._evicted.labels(**labels, policy=policy)
        self._seen: tuple[Store | None, int] = (None, 0)

    def publish(self, store: Store, stats: StoreStats) -> None:
        """Args: store: who said so; another one counts from zero."""
        self._used.set(stats.used_bytes or 0)
        self._capacity.set(stats.capacity_bytes or 0)
        before = self._seen[1] if self._seen[0] is store else 0
        self._seen = (store, stats.evicted_bytes)
        if stats.evicted_bytes > before:
            counter = self._evicted.labels(**self._labels, policy=stats.policy)
            counter.inc(stats.evicted_bytes - before)
