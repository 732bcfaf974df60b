"""What requests have told: whose turn of which conversation touches which blocks, and when."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.eviction import UNKNOWN_CONTEXT, AccessContext, ident_of
from sglang_cake.stores.eviction.conversation import ConversationTracker
from sglang_cake.stores.request_info import RequestFacts

MOST_REQUESTS = 4096
MOST_EXPECTED = 65_536  # blocks that were asked for and may be put or read soon
# Between two blocks of one request. Seconds since 1970 are told apart down to 2.4e-7.
ORDER_S = 1e-6
CLOCK_BACK_S = 60.0  # steps of a clock up to this do not change the order of requests
READ_SOON_S = 60.0  # who told of a block reads it within this time: that is no further use


class Told(NamedTuple):
    """A block that a request has."""

    key: BlockKey
    context: AccessContext
    at_s: float  # when it was used, seconds since 1970


class _Request(NamedTuple):
    turn: int
    known: int  # how many keys it has told
    at_s: float  # of its head


class AccessLog:
    """Thread-safe; everything in it is bounded and may be forgotten.

    The blocks of a request are used in turn, the last one first and the head last, ORDER_S apart,
    and after those of all earlier requests. So their times alone say who is the less recent,
    whenever and in whatever order the blocks are stored, and after a restart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations = ConversationTracker()
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by id
        self._expected: OrderedDict[BlockKey, Told] = OrderedDict()
        self._last_s = float("-inf")  # of the last request's head
        self.listening = False  # a request has told something: reads are no uses any more

    def told(self, keys: Sequence[BlockKey], facts: RequestFacts, now_s: float) -> list[Told]:
        """What the blocks that are news are used for, last block first."""
        with self._lock:
            self.listening = True
            idents = [ident_of(key) for key in keys]
            known = self._requests.get(facts.id)
            if known is None:
                after_s = self._last_s + len(keys) * ORDER_S
                # A clock that was put back is believed.
                self._last_s = now_s if after_s - now_s > CLOCK_BACK_S else max(now_s, after_s)
                known = _Request(self._conversations.turn_of(idents), 0, self._last_s)
            self._conversations.record(idents, known.turn)
            self._requests[facts.id] = known._replace(known=max(known.known, len(keys)))
            self._requests.move_to_end(facts.id)
            if len(self._requests) > MOST_REQUESTS:
                self._requests.popitem(last=False)
            news = [
                Told(
                    keys[at],
                    AccessContext(facts.workload, known.turn, at, len(keys), facts.tenant),
                    known.at_s - at * ORDER_S,
                )
                for at in range(len(keys) - 1, known.known - 1, -1)
            ]
            for told in news:
                self._expected[told.key] = told
                self._expected.move_to_end(told.key)
            while len(self._expected) > MOST_EXPECTED:
                self._expected.popitem(last=False)
            return news

    def use_of(self, key: BlockKey, now_s: float) -> Told:
        """What a block that is being put was asked for, and when; now, if nobody told."""
        with self._lock:
            return self._expected.pop(key, Told(key, UNKNOWN_CONTEXT, now_s))

    def foretold(self, key: BlockKey, now_s: float) -> bool:
        """Whether a read now is that of a request which has told of the block."""
        with self._lock:
            told = self._expected.get(key)
            return told is not None and abs(now_s - told.at_s) < READ_SOON_S

    def remember(self, ident: int, context: AccessContext) -> None:
        """What was told before a restart."""
        with self._lock:
            self._conversations.record_block(ident, context.turn, context.reach)
