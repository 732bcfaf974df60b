"""Counts of events: written by every thread, read by metrics and logs."""

import threading
from collections import defaultdict

from sglang_cake.core.codec_names import CODECS, REFUSALS

# Every counter with its label values, so that each is visible from the start, at zero. A counter
# with two labels has both values in one text, with a space between. `encoded_blocks` may also have
# the name of another package's codec.
LATE = "late"
FAILURE_REASONS = ("missing", "corrupt", "unavailable", LATE, "lookup", "internal")
UNSTORED_REASONS = ("queue_full", "full", "unavailable", "internal")
COUNTERS: dict[str, tuple[str, ...]] = {
    "loaded_tokens": ("",),
    "computed_tokens": ("",),
    "overlapped_tokens": ("",),
    "overlap_failures": ("lost", "late", "layers"),
    "wasted_bytes": ("overtaken", "cancelled", "in_tree", "peer", "memory", "ended"),
    "load_failures": FAILURE_REASONS,
    "fallback": ("compute", "load"),
    "repeated_lookups": ("",),
    "unnamed_requests": ("",),
    "differing_prompts": ("",),
    "unkeyed_requests": ("media", "embeddings", "session", "id"),
    "read_blocks": ("",),
    "read_bytes": ("",),
    "stored_bytes": ("",),
    "stored_blocks": ("",),
    "encoded_blocks": CODECS,
    "auto_refused_blocks": tuple(f"{codec} {why}" for codec in CODECS for why in REFUSALS),
    "unstored_blocks": UNSTORED_REASONS,
    "helped_tokens": ("",),
    "runahead_hops": ("",),
    "runahead_bytes": ("",),
    "runahead_sent_bytes": ("",),
    "runahead_failures": ("error", "broken", "late", "peer", "protocol", "refused", "aborted"),
}


class Counters:
    """Monotonic counters by name and label. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], int] = defaultdict(int)
        for name, labels in COUNTERS.items():
            for label in labels:
                self._values[name, label] = 0

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Add `amount` to one counter of COUNTERS."""
        assert label in COUNTERS[name] or name == "encoded_blocks", (name, label)
        with self._lock:
            self._values[name, label] += amount

    def link_bytes(self, block_bytes: int) -> int:
        """The mean bytes of a block that was read from the store, as they crossed the link;
        `block_bytes` if none was read."""
        with self._lock:
            blocks = self._values["read_blocks", ""]
            return self._values["read_bytes", ""] // blocks if blocks else block_bytes

    def snapshot(self) -> dict[tuple[str, str], int]:
        """A copy of all values."""
        with self._lock:
            return dict(self._values)
