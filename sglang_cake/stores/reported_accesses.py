"""The accesses that requests reported: blocks, times, and the turn of the conversation, which is
found from the first blocks of the prompt."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_cake.core.keys import BlockKey, Digest
from sglang_cake.stores.base import RequestFacts
from sglang_cake.stores.eviction.policy import (
    UNKNOWN_CONTEXT,
    UNKNOWN_TENANT,
    AccessContext,
    Benefit,
    ident_of,
)

MOST_REQUESTS = 4096
MOST_NAMESPACES = 128  # of one request
MOST_ANNOUNCED = 65_536  # blocks that may be put or read soon
ORDER_S = 1e-6  # between two blocks of a request; a float of seconds since 1970 resolves 2.4e-7
CLOCK_BACK_S = 60.0  # smaller steps back of the clock do not change the order of requests
READ_SOON_S = 60.0  # a read so soon after the report of its request is not counted again


@dataclass(slots=True)
class KnownPrompt:
    """A prompt; it may become longer after its blocks were recorded."""

    turn: int
    blocks: int


class ConversationTracker:
    """Holds, for recently accessed blocks, the last prompt with them.

    Only full blocks count. A request continues a conversation if its prompt begins with all blocks
    of an earlier prompt; a repeated prompt does, too. A prompt that diverges inside an earlier
    prompt shares only a prefix with it, such as a system prompt. It is a first turn.

    Attributes:
        max_blocks: how many blocks are held; the least recently accessed are dropped.
    """

    max_blocks = 262_144

    def __init__(self) -> None:
        self._last_prompt: OrderedDict[int, KnownPrompt] = OrderedDict()  # by ident

    def turn_of(self, idents: Sequence[int]) -> int:
        """Turn of a request whose prompt has these blocks, counted from 1."""
        known_blocks = 0
        last = None
        for ident in idents:
            known = self._last_prompt.get(ident)
            if known is None:
                break
            last = known
            known_blocks += 1
        if last is None or known_blocks < last.blocks:
            return 1
        return last.turn + 1

    def record(self, idents: Sequence[int], prompt: KnownPrompt) -> None:
        """Record blocks of a prompt."""
        last_prompt = self._last_prompt
        for ident in idents:
            last_prompt[ident] = prompt
            last_prompt.move_to_end(ident)
        while len(last_prompt) > self.max_blocks:
            last_prompt.popitem(last=False)


class Access(NamedTuple):
    key: BlockKey
    context: AccessContext
    at_s: float  # seconds since 1970
    benefit: Benefit | None = None  # costs that the request reported


class _Request(NamedTuple):
    prompt: KnownPrompt
    blocks: dict[Digest, int]  # number of keys that were reported, by namespace
    at_s: float  # access time of the first block


class ReportedAccesses:
    """Assigns access times, so that sorting by time gives the LRU order. Thread-safe, bounded.

    Within a request the first block is the newest, and each following block is ORDER_S older. A
    request is newer than all earlier ones. That holds in whatever order the blocks are written, and
    across restarts.

    Namespaces may have equal keys (`HeadSliceStore`). A request that reports the same blocks of
    several namespaces has one turn and one time in all of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations = ConversationTracker()
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by id
        self._announced: OrderedDict[tuple[Digest, BlockKey], Access] = OrderedDict()
        self._last_s = float("-inf")  # access time of the last request's first block
        # Requests are reported here, so a read does not count as a further access.
        self.has_reports = False

    def report(
        self, digest: Digest, keys: Sequence[BlockKey], facts: RequestFacts, now_s: float
    ) -> list[Access]:
        """Accesses to the blocks of a request that were not reported before, last block first."""
        with self._lock:
            self.has_reports = True
            request = self._requests.get(facts.id)
            reported = 0 if request is None else request.blocks.get(digest, 0)
            idents = [ident_of(key) for key in keys[reported:]]
            if request is None:
                after_s = self._last_s + len(keys) * ORDER_S
                # A larger step back of the clock is accepted.
                self._last_s = now_s if after_s - now_s > CLOCK_BACK_S else max(now_s, after_s)
                prompt = KnownPrompt(self._conversations.turn_of(idents), 0)
                request = _Request(prompt, {}, self._last_s)
            elif request.at_s - now_s > CLOCK_BACK_S:
                request = request._replace(at_s=now_s)
            request.prompt.blocks = max(request.prompt.blocks, len(keys))
            self._conversations.record(idents, request.prompt)
            if digest in request.blocks or len(request.blocks) < MOST_NAMESPACES:
                request.blocks[digest] = max(reported, len(keys))
            self._requests[facts.id] = request
            self._requests.move_to_end(facts.id)
            if len(self._requests) > MOST_REQUESTS:
                self._requests.popitem(last=False)
            # No client can claim the tenant that quotas exempt.
            tenant = 0 if facts.tenant == UNKNOWN_TENANT else facts.tenant
            turn = request.prompt.turn
            accesses = [
                Access(
                    keys[at],
                    AccessContext(facts.workload, turn, at, len(keys), tenant),
                    request.at_s - at * ORDER_S,
                    facts.benefit,
                )
                for at in range(len(keys) - 1, reported - 1, -1)
            ]
            for access in accesses:
                place = (digest, access.key)
                self._announced[place] = access
                self._announced.move_to_end(place)
            while len(self._announced) > MOST_ANNOUNCED:
                self._announced.popitem(last=False)
            return accesses

    def access_for_put(self, digest: Digest, key: BlockKey, now_s: float) -> Access:
        """The reported access to a block that is being put; without a report, one at `now_s`."""
        with self._lock:
            access = self._announced.pop((digest, key), Access(key, UNKNOWN_CONTEXT, now_s))
            is_ahead = access.at_s - now_s > CLOCK_BACK_S  # the clock was set back since
            return access._replace(at_s=now_s) if is_ahead else access

    def is_announced(self, digest: Digest, key: BlockKey, now_s: float) -> bool:
        """Whether a read at `now_s` belongs to a request that reported the block."""
        # Without the lock: an event loop would wait for a long report in a thread.
        access = self._announced.get((digest, key))
        return access is not None and abs(now_s - access.at_s) < READ_SOON_S

    def restore(self, ident: int, context: AccessContext) -> None:
        """Add the last access to a block before a restart."""
        with self._lock:
            self._conversations.record([ident], KnownPrompt(context.turn, context.reach))
