"""The turn of its conversation in which a request is, found from the first blocks of its prompt."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Prompt:
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
        self._last_prompt: OrderedDict[int, Prompt] = OrderedDict()  # by ident

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

    def record(self, idents: Sequence[int], prompt: Prompt) -> None:
        """Record blocks of a prompt."""
        last_prompt = self._last_prompt
        for ident in idents:
            last_prompt[ident] = prompt
            last_prompt.move_to_end(ident)
        while len(last_prompt) > self.max_blocks:
            last_prompt.popitem(last=False)
