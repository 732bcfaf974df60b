"""The lookup table of searched partitions (KVR-P, paper 4.2), interpolated between lengths.

There is one JSON file per machine and namespace, since measurements hold for one of them only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from sglang_cake.core import untrusted
from sglang_cake.core.keys import Digest, Span
from sglang_cake.core.local_files import atomic_write
from sglang_cake.runahead.partition import Partition, scaled

_MAX_FILE_BYTES = 2**20
LOOK_S = 0.5  # between two reads of the file

_Workers = Annotated[int, Meta(ge=1, le=1024)]
_Share = Annotated[float, Meta(gt=0, le=1)]


class PartitionTable(Struct):
    """Shares of each worker by number of workers and length of the prompt in tokens."""

    version: Literal[1] = 1
    entries: dict[_Workers, dict[int, tuple[_Share, ...]]] = msgspec.field(
        default_factory=dict, name="shares"
    )

    def __post_init__(self) -> None:
        for workers, lengths in self.entries.items():
            for shares in lengths.values():
                if len(shares) != workers or abs(sum(shares) - 1) > 1e-6:
                    raise ValueError(f"{shares} are no shares of {workers} workers")

    def put(self, tokens: int, partition: Partition) -> None:
        """Set the best partition of a prompt of `tokens` tokens."""
        self.entries.setdefault(partition.workers, {})[tokens] = partition.fractions

    def predict(self, span: Span, workers: int, *, page_tokens: int = 1) -> Partition | None:
        """A partition with shares interpolated between the two nearest lengths; outside of all
        lengths, the shares of the nearest one.

        None if the table has no entry for so many workers, or the span does not start the prompt:
        only whole prompts are searched.
        """
        known = self.entries.get(workers)
        if not known or span.start != 0 or span.tokens < workers * page_tokens:
            return None
        return scaled(span, _interpolated(known, span.tokens), page_tokens=page_tokens)


_TABLE = msgspec.json.Decoder(PartitionTable)


class WatchedTable:
    """The table in a file that a search may replace at any time. One thread owns it.

    Args: path: None: the table stays empty.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._table = PartitionTable()
        self._next_s = 0.0

    def read(self, now_s: float) -> PartitionTable:
        """The table as it was at most LOOK_S ago; empty if there is none.

        Args: now_s: seconds, monotonic.
        """
        if self.path is not None and now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self._table = load_table(self.path)
        return self._table


def _interpolated(known: Mapping[int, tuple[float, ...]], tokens: int) -> tuple[float, ...]:
    lengths = sorted(known)
    shares = zip(*(known[length] for length in lengths), strict=True)
    return tuple(float(np.interp(tokens, lengths, each)) for each in shares)


def table_path(folder: Path, machine: str, namespace: Digest) -> Path:
    """The file of the table of this machine and namespace."""
    plain = "".join(c if c.isalnum() else "-" for c in machine)[:64] or "machine"
    return folder / f"{plain}-{namespace.hex()[:16]}.json"


def load_table(path: Path) -> PartitionTable:
    """The table at `path`; an empty one if there is none, or it cannot be read."""
    try:
        if path.stat().st_size <= _MAX_FILE_BYTES:
            return untrusted.decode(_TABLE, path.read_bytes())
    except (OSError, ValueError):
        pass
    return PartitionTable()


def save_table(path: Path, table: PartitionTable) -> None:
    """Replace the table at `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(path, msgspec.json.format(msgspec.json.encode(table), indent=1), durable=True)
