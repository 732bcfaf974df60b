"""What several processes count together: each in a row of its own, and all can read the sums."""

import mmap
from collections.abc import Iterator

from sglang_cake.stores.base import EVICTION_COUNTS

METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "other")
STATUSES = (
    *(200, 201, 204, 206, 400, 401, 403, 404, 405, 408, 409, 411, 413, 416, 417),
    *(500, 503, 507, 0),  # 0: any other
)
ANSWERS = tuple((method, status) for method in METHODS for status in STATUSES)
# Of a process that has ended, these say nothing any more.
GAUGES = ("puts", "dealt_connections", "closed_connections", "beats")
COUNTS = (
    *GAUGES,
    "sent_bytes",
    "received_bytes",
    *EVICTION_COUNTS,
    "corrupt_blocks",  # set aside or removed
    "refused_connections",  # while all places had requests
    "dropped_connections",  # to make room for others
    "bad_requests",  # that were no HTTP
)
_COLUMNS: dict[object, int] = {name: at for at, name in enumerate((*COUNTS, *ANSWERS))}
_CELL_BYTES = 8


class Row:
    """One process's counts. Only that process writes in it, from one thread; but what it was dealt
    is written by its parent."""

    def __init__(self, tally: "SharedCounters", index: int) -> None:
        self.tally, self._start = tally, index * len(_COLUMNS)

    def __getitem__(self, name: str) -> int:
        return self.tally.cells[self._start + _COLUMNS[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self.tally.cells[self._start + _COLUMNS[name]] = value

    def answered(self, method: str, status: int) -> None:
        """A request was answered."""
        known = (
            method if method in METHODS else "other",
            status if status in STATUSES else 0,
        )
        self.tally.cells[self._start + _COLUMNS[known]] += 1

    def begin_anew(self) -> None:
        """The process has ended, another may write here: what was counted stays counted."""
        for name in GAUGES:
            self[name] = 0


class SharedCounters:
    """Shared with every process that is forked after it was made."""

    def __init__(self, rows: int) -> None:
        self.cells = memoryview(mmap.mmap(-1, rows * len(_COLUMNS) * _CELL_BYTES)).cast("q")
        self.rows = [Row(self, index) for index in range(rows)]

    def total(self, name: str) -> int:
        """One of COUNTS, over all processes."""
        return sum(self.cells[_COLUMNS[name] :: len(_COLUMNS)])

    def answers(self) -> Iterator[tuple[str, int, int]]:
        """(method, status, how often), where it happened at all."""
        for method, status in ANSWERS:
            count = sum(self.cells[_COLUMNS[method, status] :: len(_COLUMNS)])
            if count:
                yield method, status, count
