"""Cake's counters on SGLang's own `/metrics`, prefix `sglang:cake_`."""

import time

from prometheus_client import Counter, Gauge, Histogram

from sglang_cake.counters import COUNTERS, Counters

PUBLISH_EVERY_S = 1.0
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
        self._overhead = Histogram(
            "sglang:cake_step_overhead_seconds",
            "Time that cake took of a scheduling step.",
            names,
            buckets=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        ).labels(**labels)

    def publish(self, *, bandwidth_bytes_per_s: float, step_overhead_s: float | None) -> None:
        """Once a step; counters go out once a second."""
        if step_overhead_s is not None:
            self._overhead.observe(step_overhead_s)
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PUBLISH_EVERY_S
        self._bandwidth.set(bandwidth_bytes_per_s)
        for (name, value), total in self._counters.snapshot().items():
            self._child(name, value).inc(total - self._seen[name, value])
            self._seen[name, value] = total

    def met(self, fraction: float) -> None:
        """A prompt's prefill is over; `fraction` of it lies before the meet."""
        self._meet.observe(fraction)

    def _child(self, name: str, value: str) -> Counter:
        label = {} if value == "" else {_LABEL.get(name, "reason"): value}
        return self._metrics[name].labels(**self._labels, **label)
