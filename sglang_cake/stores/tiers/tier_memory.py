"""What a tiered store remembers of blocks. Bounded; forgetting only costs a question more."""

from collections import OrderedDict
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey

MAX_KEYS = 1 << 16  # about 20 MB
REREAD_S = 600.0


class Known(NamedTuple):
    """Sets of tiers, tier `i` as bit `i`. A tier in neither was not asked, or did not answer."""

    having: int
    lacking: int


_NOTHING = Known(0, 0)


class TierLocations:
    """Which tiers have which block, as far as they said lately; blocks that none has are not
    remembered."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._known: OrderedDict[BlockKey, Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, key: BlockKey) -> Known:
        """What is known; of a block nobody asked for, nothing."""
        return self._known.get(key, _NOTHING)

    def learn(self, key: BlockKey, *, asked: int, having: int) -> None:
        """The tiers of the set `asked` said of the block that those of `having` have it."""
        before = self._known.pop(key, _NOTHING)
        now_having = before.having & ~asked | having
        if now_having:
            self._known[key] = Known(now_having, before.lacking & ~asked | asked & ~having)
            if len(self._known) > self._max_keys:
                self._known.popitem(last=False)

    def forget(self, key: BlockKey) -> None:
        """Nothing is known any more."""
        self._known.pop(key, None)


class PromoteOnSecondRead:
    """The rule for promotion: a block moves up when it is read for the second time in REREAD_S.

    A long prompt that is read once thus pushes nothing out of the fast tier, however often such
    prompts come; what is in use is there from its third read on.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._read_s: OrderedDict[BlockKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._read_s)

    def read(self, key: BlockKey, now_s: float) -> bool:
        """The block was read from a lower tier. True if it should move up now."""
        before_s = self._read_s.pop(key, None)
        if before_s is not None and now_s - before_s <= REREAD_S:
            return True
        self._read_s[key] = now_s
        if len(self._read_s) > self._max_keys:
            self._read_s.popitem(last=False)
        return False
