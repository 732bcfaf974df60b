"""The meet: which side owns which block of one prompt. A state machine without I/O.

One prompt is a row of blocks. Compute owns a growing prefix that ends at the *front* (a token
position); the loader lands blocks from the end leftwards. A maximal run of landed blocks is an
*island*; when the front touches an island, the island is attached and the front jumps to its end.

    front: end of the scheduled prefix          islands: landed, right of the front
    |=========|. . . . . . . . . . . |###|. .|##########|
    0         front                   island      island  limit

Each block is in exactly one state, and TRANSITIONS has every change of state:

    ABSENT    not stored, as far as is known: compute it
    WANTED    stored, and not loaded yet
    LANDED    its checked bytes are on every rank, waiting for the front
    GONE      it could not be loaded, or its bytes were given up: compute it
    CLAIMED   it is computed, or the step being scheduled computes it
    ATTACHED  its landed bytes have joined the tree

Three rules follow from the table: computing never enters a LANDED block, no CLAIMED block is ever
attached, and no block is attached twice. Progress is certain, since every state but LANDED can be
claimed, and a LANDED block can be attached or dropped.

This is Algorithm 1 of Cake (arXiv 2410.03065) with `io_ptr` replaced by a state per block, so that
a lost block costs one block and not the rest of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from sglang_cake.core.token_span import Span


class BlockState(IntEnum):
    """State of one block; see the module docstring."""

    ABSENT = 0
    WANTED = 1
    LANDED = 2
    GONE = 3
    CLAIMED = 4
    ATTACHED = 5


class Event(IntEnum):
    """What may happen to a block."""

    FIND = 0  # the lookup answers that it is stored
    LAND = 1  # its checked bytes are in host memory on every rank
    LOSE = 2  # it could not be loaded
    DROP = 3  # its landed bytes were given up, for want of memory
    CLAIM = 4  # the step being scheduled computes it
    PASS = 5  # the tree holds it already: the front moved over it
    ATTACH = 6  # its landed bytes joined the tree
    EVICT = 7  # the tree has evicted it: the front moved back over it


_S, _E = BlockState, Event

# (state, event) -> next state. A pair that is not here is a bug of this package.
# Self-loops on CLAIMED and GONE repeat what is known, or come too late: bytes that come with them
# are discarded. The loader reads no block that the front has passed, so a block stays GONE until it
# is claimed.
TRANSITIONS: dict[tuple[BlockState, Event], BlockState] = {
    (_S.ABSENT, _E.FIND): _S.WANTED,
    (_S.CLAIMED, _E.FIND): _S.CLAIMED,
    (_S.GONE, _E.FIND): _S.GONE,
    (_S.WANTED, _E.LAND): _S.LANDED,
    (_S.CLAIMED, _E.LAND): _S.CLAIMED,
    (_S.GONE, _E.LAND): _S.GONE,
    (_S.WANTED, _E.LOSE): _S.GONE,
    (_S.CLAIMED, _E.LOSE): _S.CLAIMED,
    (_S.GONE, _E.LOSE): _S.GONE,
    (_S.LANDED, _E.DROP): _S.GONE,
    (_S.ABSENT, _E.CLAIM): _S.CLAIMED,
    (_S.WANTED, _E.CLAIM): _S.CLAIMED,
    (_S.GONE, _E.CLAIM): _S.CLAIMED,
    (_S.CLAIMED, _E.CLAIM): _S.CLAIMED,  # a block that the previous step began and did not finish
    (_S.ABSENT, _E.PASS): _S.CLAIMED,
    (_S.WANTED, _E.PASS): _S.CLAIMED,
    (_S.LANDED, _E.PASS): _S.CLAIMED,
    (_S.GONE, _E.PASS): _S.CLAIMED,
    (_S.CLAIMED, _E.PASS): _S.CLAIMED,
    (_S.ATTACHED, _E.PASS): _S.ATTACHED,
    (_S.LANDED, _E.ATTACH): _S.ATTACHED,
    (_S.CLAIMED, _E.EVICT): _S.GONE,
    (_S.ATTACHED, _E.EVICT): _S.GONE,
    (_S.LANDED, _E.EVICT): _S.LANDED,  # the front stood inside it
    (_S.WANTED, _E.EVICT): _S.WANTED,
    (_S.ABSENT, _E.EVICT): _S.ABSENT,
    (_S.GONE, _E.EVICT): _S.GONE,
}


@dataclass(frozen=True, slots=True)
class View:
    """A prompt as `planner` sees it.

    Attributes:
        front: end of the computed prefix, in tokens.
        first: block at the front.
        limit: no stored token is used from here on.
        states: one byte (`BlockState`) for each block from `first` on.
    """

    front: int
    first: int
    states: bytes
    block_tokens: int
    prompt_tokens: int
    limit: int

    def found(self, stored: Sequence[bool]) -> "View":
        """The view after the lookup's answer: which of the prompt's blocks are stored."""
        states = (BlockState.WANTED if yes else BlockState.ABSENT for yes in stored[self.first :])
        return replace(self, states=bytes(states)[: len(self.states)])


class Meet:
    """Ownership of the blocks of one prompt, from its arrival to the end of its prefill.

    Not thread-safe: the scheduler thread owns it.

    Args:
        block_tokens: tokens of a block.
        page_tokens: the tree's page size; divides `block_tokens`. Only whole pages attach.
        limit_tokens: leading tokens of the prompt that may come from a cache; the last token never
            may, since its logits are wanted. Rounded down to a page here.
        prompt_tokens: length of the prompt; blocks are its full blocks.
        front: first token that the tree does not hold.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        page_tokens: int,
        limit_tokens: int,
        prompt_tokens: int,
        front: int = 0,
    ) -> None:
        assert block_tokens % page_tokens == 0
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens
        self.limit = limit_tokens // page_tokens * page_tokens
        count = min(prompt_tokens // block_tokens, -(-self.limit // block_tokens))
        self._prompt_tokens = prompt_tokens
        self._states = bytearray([BlockState.ABSENT]) * count
        self.front = 0
        self.advance(front)

    # ---- events ----

    def found(self, stored: Sequence[bool]) -> None:
        """The lookup's answer; entries past the last block are ignored."""
        for block, yes in zip(range(len(self._states)), stored, strict=False):
            if yes:
                self._apply(block, Event.FIND)

    def landed(self, block: int) -> bool:
        """The block is in host memory on every rank. False: too late, discard its bytes."""
        return self._apply(block, Event.LAND) is BlockState.LANDED

    def lost(self, block: int) -> None:
        """The block could not be loaded."""
        self._apply(block, Event.LOSE)

    def dropped(self, block: int) -> None:
        """The landed bytes of the block were given up."""
        self._apply(block, Event.DROP)

    def give_up(self) -> None:
        """Blocks that have not landed are computed."""
        for block in range(len(self._states)):
            if self._states[block] == BlockState.WANTED:
                self._apply(block, Event.LOSE)

    def advance(self, front: int) -> list[int]:
        """The tree holds `[0, front)`. Returns the blocks whose landed bytes are not needed now.

        The front moves back if the tree has evicted a part of a waiting prompt. That part is
        computed then.
        """
        surplus = []
        if front < self.front:
            last = min(self._block_of(self.front) + 1, self.blocks)
            for block in range(self._block_of(front), last):
                self._apply(block, Event.EVICT)
            self.front = front
        if front > self.front:
            for block in range(self._block_of(self.front), self._blocks_below(front)):
                if self._states[block] == BlockState.LANDED:
                    surplus.append(block)
                self._apply(block, Event.PASS)
            self.front = front
        return surplus

    # ---- what the scheduler does ----

    def island(self) -> Span | None:
        """The span to attach now, `[front, end of the island that the front touches)`, or None."""
        first = self._block_of(self.front)
        stop = first
        while stop < len(self._states) and self._states[stop] == BlockState.LANDED:
            stop += 1
        end = min(stop * self.block_tokens, self.limit)
        if stop == first or end <= self.front:
            return None
        assert self.front % self.page_tokens == 0, "the front entered a landed block"
        return Span(self.front, end)

    def attach(self, span: Span) -> None:
        """`span` (as `island()` gave it) joins the tree."""
        assert span == self.island()
        for block in self.blocks_of(span):
            self._apply(block, Event.ATTACH)
        self.front = span.stop

    def claim(self, stop: int) -> int:
        """The step being scheduled computes `[front, stop)`. Returns the new `fence`."""
        last = min(-(-stop // self.block_tokens), len(self._states))
        # Not from `_block_of`: past the limit the front stands in a block that may be attached.
        for block in range(self._blocks_below(self.front), last):
            self._apply(block, Event.CLAIM)
        self.front = stop
        return self.fence

    # ---- questions ----

    def blocks_of(self, span: Span) -> range:
        """The blocks that `span` touches."""
        return range(span.start // self.block_tokens, -(-span.stop // self.block_tokens))

    def state(self, block: int) -> BlockState:
        """State of one block."""
        return BlockState(self._states[block])

    def view(self) -> View:
        """The front and the blocks right of it, for `planner`."""
        first = self._block_of(self.front)
        return View(
            front=self.front,
            first=first,
            states=bytes(self._states[first:]),
            block_tokens=self.block_tokens,
            prompt_tokens=self._prompt_tokens,
            limit=self.limit,
        )

    @property
    def blocks(self) -> int:
        """How many blocks may be loaded at all."""
        return len(self._states)

    @property
    def fence(self) -> int:
        """Blocks below this one are computed: the loader must not read them."""
        first = self._block_of(self.front)
        taken = first < len(self._states) and self._states[first] == BlockState.CLAIMED
        return first + 1 if taken else first

    @property
    def pending(self) -> bool:
        """Whether a block right of the front is still to come or to be attached."""
        first = self._block_of(self.front)
        return any(
            self._states.find(state, first) >= 0 for state in (BlockState.WANTED, BlockState.LANDED)
        )

    def _apply(self, block: int, event: Event) -> BlockState:
        state = TRANSITIONS[BlockState(self._states[block]), event]
        self._states[block] = state
        return state

    def _block_of(self, token: int) -> int:
        return min(token // self.block_tokens, len(self._states))

    def _blocks_below(self, front: int) -> int:
        """The number of blocks of which no token right of `front` could be attached."""
        if front >= self.limit:
            return len(self._states)
        return self._block_of(front)
