"""Which turn of a conversation a request is, told from what it begins with."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

MOST_BLOCKS: Final = 262_144


class Ancestry:
    """Remembers of recent blocks which turn last touched them, and how long that prompt was.

    A request continues a conversation if it begins with all full blocks of an earlier prompt, and
    goes on from there. One that leaves an earlier prompt in the middle shares something with it, a
    system prompt say, and is a first turn.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()  # ident -> turn, reach

    def turn(self, idents: Sequence[int]) -> int:
        """Of a request whose blocks are these."""
        last = None
        for position, ident in enumerate(idents):
            known = self._known.get(ident)
            if known is None:
                break
            last = position, *known
        if last is None:
            return 1
        position, turn, reach = last
        return turn + 1 if position + 1 >= reach - 1 else 1

    def touched(self, idents: Sequence[int], turn: int) -> None:
        """A request of that turn had these blocks."""
        reach = len(idents)
        for ident in idents:
            self.remember(ident, turn, reach)

    def remember(self, ident: int, turn: int, reach: int) -> None:
        """One block's last touch."""
        self._known[ident] = turn, reach
        self._known.move_to_end(ident)
        if len(self._known) > self._most_blocks:
            self._known.popitem(last=False)
