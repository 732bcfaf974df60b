"""Metrics of `sglang-cake store serve`, over all of its processes.

`prometheus_client` keeps the counters of each process in files of the folder that the variable
PROMETHEUS_MULTIPROC_DIR names, and reads the files of all processes for `/metrics`. It looks for
the variable when it is imported. So the variable has to be set before this module is imported;
without it, the metrics are those of this process alone.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.base import EVICTION_COUNTS, EvictionCounts

PREFIX = "sglang_cake_store"
# Of each process. All counts of requests take a third of it.
FILES = ("counter", "gauge_livesum")
FILE_BYTES = 1 << 16
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


class ServerMetrics:
    """The metrics of one process. Belongs to one thread."""

    def __init__(self) -> None:
        """Raises: StoreUnavailable if there is no room for the files."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder is not None:
            _take_room(Path(folder))
        self._registry = CollectorRegistry()
        self.sent_bytes = self._counter("sent_bytes", "Bytes of blocks sent")
        self.received_bytes = self._counter("received_bytes", "Bytes of blocks received")
        self.refused_connections = self._counter(
            "refused_connections", "New connections closed while all others had requests"
        )
        self.dropped_connections = self._counter(
            "dropped_connections", "Idle connections closed in favour of new ones"
        )
        self.bad_requests = self._counter("bad_requests", "Requests that were not valid HTTP")
        self.puts = self._gauge("puts_in_progress", "PUT requests of blocks in progress")
        self.connections = self._gauge("connections", "Open connections")
        self._requests = Counter(
            f"{PREFIX}_requests",
            "Requests answered",
            ("method", "status"),
            registry=self._registry,
        )
        # The folder counts these, from 0 when it is opened.
        self._of_folder = {
            "corrupt_blocks": self._counter("corrupt_blocks", "Corrupt blocks found"),
            "evicted_blocks": self._counter("evicted_blocks", "Blocks evicted"),
            "evicted_bytes": self._counter("evicted_bytes", "Bytes evicted"),
            "evicting_us": self._counter("evicting_us", "Microseconds spent on eviction"),
            "skipped_blocks": self._counter("skipped_blocks", "Blocks not worth storing"),
            "unreadable_files": self._counter(
                "unreadable_files", "Files and folders that an index leaves out"
            ),
        }
        self._so_far = dict.fromkeys(self._of_folder, 0)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        """Summed over the processes that run."""
        return Gauge(f"{PREFIX}_{name}", text, registry=self._registry, multiprocess_mode="livesum")

    def answered(self, method: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(method if method in METHODS else "other", status).inc()

    def count_blocks(self, counts: Mapping[str, int]) -> None:
        """Take over the counts of the folder since it was opened, by name."""
        for name, count in counts.items():
            self._of_folder[name].inc(count - self._so_far[name])
            self._so_far[name] = count

    def collect(self) -> Iterable[Metric]:
        """The metrics of all processes."""
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder is not None:
            # As `MultiProcessCollector.collect`, which fails on the file of a process that starts.
            files = [str(file) for file in Path(folder).glob("*.db") if _has_begun(file)]
            merged: Iterable[Metric] = MultiProcessCollector.merge(files)
            return merged
        return self._registry.collect()

    def evictions(self) -> EvictionCounts:
        """The sums over all processes."""
        totals = {
            sample.name: int(sample.value) for metric in self.collect() for sample in metric.samples
        }
        return EvictionCounts(*(totals[f"{PREFIX}_{name}_total"] for name in EVICTION_COUNTS))

    def text(self, gauges: Mapping[str, int | None]) -> bytes:
        """All metrics in Prometheus' text format. Args: gauges: further ones; None is left out."""
        return generate_latest(_WithGauges(self, gauges))


def _take_room(folder: Path) -> None:
    """Make the files of this process. `prometheus_client` maps files without blocks on the disk,
    so the first write to a page would kill the process if the disk is full.

    Raises: StoreUnavailable.
    """
    paths = [folder / f"{kind}_{os.getpid()}.db" for kind in FILES]
    try:
        for path in paths:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        raise StoreUnavailable(f"no room for metrics in {folder}: {error.strerror}") from error


def _has_begun(file: Path) -> bool:
    """Whether a process has written to its file. It makes the file empty at first."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # that of a process that has ended
        return False


class _WithGauges(Collector):
    def __init__(self, metrics: ServerMetrics, gauges: Mapping[str, int | None]) -> None:
        self._metrics = metrics
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.collect()
        for name, value in self._gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", name.replace("_", " "), value)
