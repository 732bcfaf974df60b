"""The server's numbers in Prometheus' text format."""

from collections.abc import Mapping

from sglang_cake.stores.base import EVICTION_COUNTS, StoreStats
from sglang_cake.stores.http.shared_counters import SharedCounters

PREFIX = "sglang_cake_store"


def metrics_text(stats: StoreStats, tally: SharedCounters, workers: int) -> str:
    """One line a number, over all workers. Args: workers: how many there should be."""
    lines: list[str] = []

    def say(name: str, kind: str, values: Mapping[str, float]) -> None:
        lines.append(f"# TYPE {PREFIX}_{name} {kind}")
        lines.extend(f"{PREFIX}_{name}{labels} {value}" for labels, value in values.items())

    by_label = {
        f'{{method="{method}",status="{status or "other"}"}}': count
        for method, status, count in tally.answers()
    }
    say("requests_total", "counter", by_label)
    for name in (
        *("sent_bytes", "received_bytes", "bad_requests"),
        *("refused_connections", "dropped_connections"),
        *EVICTION_COUNTS,
        "corrupt_blocks",
    ):
        say(f"{name}_total", "counter", {"": tally.total(name)})
    say("puts_in_progress", "gauge", {"": tally.total("puts")})
    closed = tally.total("closed_connections")  # first: what is closed was dealt before
    say("connections", "gauge", {"": tally.total("dealt_connections") - closed})
    say("workers", "gauge", {"": workers})
    known = {
        "blocks": stats.blocks,
        "used_bytes": stats.used_bytes,
        "capacity_bytes": stats.capacity_bytes,
    }
    for name, value in known.items():
        if value is not None:
            say(name, "gauge", {"": value})
    return "\n".join(lines) + "\n"
