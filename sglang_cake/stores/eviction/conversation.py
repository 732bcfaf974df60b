"""The turn of its conversation in which a request is, found from the first blocks of its prompt."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_BLOCKS: Final = 262_144


class _LastAccess(NamedTuple):
    turn: int
    prompt_blocks: int


class ConversationTracker:
    """Holds, for recently accessed blocks, the turn and the length of the last prompt with them.

    A request continues a conversation if its prompt begins with all full blocks of an earlier
    prompt and is longer. A prompt that diverges inside an earlier prompt shares only a prefix with
    it, such as a system prompt. It is a first turn.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """Args:
        max_blocks: how many blocks are held; the least recently accessed are dropped.
        """
        self._max_blocks = max_blocks
        self._last_access: OrderedDict[int, _LastAccess] = OrderedDict()  # by ident

    def turn_of(self, idents: Sequence[int]) -> int:
        """Turn of a request whose prompt has these blocks, counted from 1."""
        known_blocks = 0
        last = None
        for ident in idents:
            known = self._last_access.get(ident)
            if known is None:
                break
            last = known
            known_blocks += 1
        # The last block of the earlier prompt may not have been full: it has another ident now.
        if last is None or known_blocks < last.prompt_blocks - 1:
            return 1
        return last.turn + 1

    def record(self, idents: Sequence[int], turn: int) -> None:
        """Record a request of that turn, whose prompt has these blocks."""
        for ident in idents:
            self.record_block(ident, turn, len(idents))

    def record_block(self, ident: int, turn: int, prompt_blocks: int) -> None:
        """Record the last access to one block."""
        self._last_access[ident] = _LastAccess(turn, prompt_blocks)
        self._last_access.move_to_end(ident)
        if len(self._last_access) > self._max_blocks:
            self._last_access.popitem(last=False)
