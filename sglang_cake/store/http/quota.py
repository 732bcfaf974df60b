"""How many bytes one namespace may hold. Blocking and thread-safe."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_cake.errors import StoreFull
from sglang_cake.keys import Digest

RECOUNT_S = 5.0  # how soon a full namespace is counted again; what was deleted is seen then


@dataclass(slots=True)
class _Account:
    lock: threading.Lock = field(default_factory=threading.Lock)
    counted_s: float | None = None
    used_bytes: int = 0  # at the last count, and all that was reserved since
    reserved_bytes: int = 0  # of that, what is still being written


class Quotas:
    """One bound for every namespace.

    Blocks are deleted and evicted without word to this, so the books only ever say too much. When
    they say full, the namespace is counted anew.
    """

    def __init__(
        self,
        limit_bytes: int,
        count: Callable[[Digest], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: count: the bytes that a namespace holds now; may take long."""
        self._limit_bytes, self._count, self._clock = limit_bytes, count, clock
        self._lock = threading.Lock()
        self._accounts: dict[Digest, _Account] = {}

    def reserve(self, digest: Digest, size_bytes: int) -> None:
        """Before a block is written; `settle` follows. Raises: StoreFull; what `count` raises."""
        with self._lock:
            account = self._accounts.setdefault(digest, _Account())
        with account.lock:
            if account.used_bytes + size_bytes > self._limit_bytes or account.counted_s is None:
                self._recount(digest, account)
            if account.used_bytes + size_bytes > self._limit_bytes:
                raise StoreFull(f"the namespace's quota of {self._limit_bytes} bytes is used up")
            account.used_bytes += size_bytes
            account.reserved_bytes += size_bytes

    def settle(self, digest: Digest, size_bytes: int, *, stored: bool) -> None:
        """What was reserved was stored, or was not."""
        account = self._accounts[digest]
        with account.lock:
            account.reserved_bytes -= size_bytes
            if not stored:
                account.used_bytes -= size_bytes

    def _recount(self, digest: Digest, account: _Account) -> None:
        now_s = self._clock()
        if account.counted_s is None or now_s - account.counted_s >= RECOUNT_S:
            # A block that becomes visible meanwhile is counted twice, until the next time.
            account.used_bytes = self._count(digest) + account.reserved_bytes
            account.counted_s = now_s
