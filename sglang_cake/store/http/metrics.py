"""The server's numbers in Prometheus' text format."""

from collections.abc import Mapping

from sglang_cake.store.base import StoreStats

PREFIX = "sglang_cake_store"


def metrics_text(
    stats: StoreStats,
    *,
    answers: Mapping[tuple[str, int], int],
    sent_bytes: int,
    received_bytes: int,
    puts: int,
    refused_connections: int,
    bad_requests: int,
) -> str:
    """One line a number. Args: answers: requests by method and status."""
    lines: list[str] = []

    def say(name: str, kind: str, values: Mapping[str, float]) -> None:
        lines.append(f"# TYPE {PREFIX}_{name} {kind}")
        lines.extend(f"{PREFIX}_{name}{labels} {value}" for labels, value in values.items())

    by_label = {
        f'{{method="{method}",status="{status}"}}': count
        for (method, status), count in sorted(answers.items())
    }
    say("requests_total", "counter", by_label)
    say("sent_bytes_total", "counter", {"": sent_bytes})
    say("received_bytes_total", "counter", {"": received_bytes})
    say("refused_connections_total", "counter", {"": refused_connections})
    say("bad_requests_total", "counter", {"": bad_requests})
    say("puts_in_progress", "gauge", {"": puts})
    say("evicted_bytes_total", "counter", {"": stats.evicted_bytes})
    known = {
        "blocks": stats.blocks,
        "used_bytes": stats.used_bytes,
        "capacity_bytes": stats.capacity_bytes,
    }
    for name, value in known.items():
        if value is not None:
            say(name, "gauge", {"": value})
    return "\n".join(lines) + "\n"
