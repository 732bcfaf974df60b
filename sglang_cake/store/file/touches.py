"""What requests have told: whose turn of which conversation touches which blocks."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from sglang_cake.keys import BlockKey
from sglang_cake.store.eviction import UNKNOWN_USE, Use, ident_of
from sglang_cake.store.eviction.ancestry import Ancestry
from sglang_cake.store.request import RequestFacts

MOST_REQUESTS = 4096
MOST_EXPECTED = 65_536  # blocks that were asked for and may be put soon


class Touches:
    """Thread-safe; everything in it is bounded and may be forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ancestry = Ancestry()
        self._requests: OrderedDict[str, tuple[int, int]] = OrderedDict()  # id -> turn, keys told
        self._expected: OrderedDict[BlockKey, Use] = OrderedDict()
        self.listening = False  # a request has told something: reads say nothing new any more

    def told(self, keys: Sequence[BlockKey], facts: RequestFacts) -> list[tuple[BlockKey, Use]]:
        """What the blocks that are news are used for, last block first."""
        with self._lock:
            self.listening = True
            idents = [ident_of(key) for key in keys]
            turn, known = self._requests.get(facts.id, (0, 0))
            turn = turn or self._ancestry.turn(idents)
            self._ancestry.touched(idents, turn)
            self._requests[facts.id] = turn, max(known, len(keys))
            self._requests.move_to_end(facts.id)
            if len(self._requests) > MOST_REQUESTS:
                self._requests.popitem(last=False)
            news = [
                (keys[at], Use(facts.workload, turn, at, len(keys), facts.tenant))
                for at in range(len(keys) - 1, known - 1, -1)
            ]
            for key, use in news:
                self._expected[key] = use
                self._expected.move_to_end(key)
            while len(self._expected) > MOST_EXPECTED:
                self._expected.popitem(last=False)
            return news

    def use_of(self, key: BlockKey) -> Use:
        """What a block that is being put was asked for."""
        with self._lock:
            return self._expected.pop(key, UNKNOWN_USE)

    def remember(self, ident: int, use: Use) -> None:
        """What was told before a restart."""
        with self._lock:
            self._ancestry.remember(ident, use.turn, use.reach)
