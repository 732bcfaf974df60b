"""The meet: which side owns which block of one prompt. A state machine without I/O.

One prompt is a row of blocks. Compute owns a growing prefix that ends at the *front* (a token
position); the loader lands blocks from the end leftwards. A maximal run of landed blocks is an
*island*; when the front touches an island, the island is attached and the front jumps to its end.

    front: end of the scheduled prefix          islands: landed, right of the front
    |=========|. . . . . . . . . . . |###|. .|##########|
    0         front                   island      island  limit

Each block is in exactly one state (docs/glossary.md#the-states-of-a-block-of-a-prompt), and
TRANSITIONS has every change of state.

Three rules follow from the table (docs/architecture.md#the-meet). Progress is certain: a LANDED
block can be attached or dropped, an ATTACHED one is before the front, and a block in any other
state can be claimed.

This is Algorithm 1 of Cake (arXiv 2410.03065) with `io_ptr` replaced by a state per block, so that
a lost block costs one block and not the rest of the prompt.

Models with a recurrent state or with sliding windows have `end_blocks` above 0. The front of their
prompts jumps to the *target* or nowhere (docs/end-states.md):

    |=========|. . . . . .|#################|. . . . .|      ###
    0         front       blocks up to the   target   limit  end blocks of the target
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum

from sglang_cake.core.keys import Span


class BlockState(IntEnum):
    """State of one block."""

    ABSENT = 0  # not stored, as far as is known: compute it
    WANTED = 1  # stored, and not loaded yet
    LANDED = 2  # its checked bytes are on every rank, waiting for the front
    GONE = 3  # it could not be loaded, or its bytes were given up: a step has to compute it
    # It did not come from the loader: the tree held it, it was computed, or the step being
    # scheduled computes it.
    CLAIMED = 4
    ATTACHED = 5  # its landed bytes have joined the tree


class Event(IntEnum):
    """What may happen to a block."""

    FIND = 0  # the lookup answers that it is stored
    LAND = 1  # every rank has fetched and checked its bytes
    LOSE = 2  # it could not be loaded, or loading it is not worth while any more
    DROP = 3  # its landed bytes were given up
    CLAIM = 4  # the step being scheduled computes it
    PASS = 5  # the tree holds it already, so the front moved over it
    ATTACH = 6  # its landed bytes joined the tree
    EVICT = 7  # the tree has evicted it: the front moved back over it


_S, _E = BlockState, Event

# (state, event) -> next state. A pair that is not here is a bug of this package.
# An event that changes nothing in CLAIMED or GONE is out of date, or repeats what is known. Its
# bytes are discarded. The loader reads no block that the front has passed, so a block stays GONE
# until it is claimed.
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


_TO_COME = bytes(s in (_S.WANTED, _S.LANDED) for s in _S).ljust(256, b"\0")


def run_lengths(stored: Sequence[bool] | bytes | bytearray, first: int = 0) -> list[int]:
    """For each block, the length of the unbroken run of stored blocks that ends with it, and begins
    at block `first` or later."""
    lengths = []
    length = 0
    for block, yes in enumerate(stored):
        length = length + 1 if yes and block >= first else 0
        lengths.append(length)
    return lengths


def possible_runs(stored: Sequence[bool], first: int) -> list[range]:
    """For each block after which a stored prefix could end, the unbroken run of stored blocks up to
    it: the longest run first; of equal ones, the last first. Args: first: blocks before it are in
    the tree."""
    lengths = run_lengths(stored, first)
    runs = [range(stop - length, stop) for stop, length in enumerate(lengths, 1) if length]
    return sorted(runs, key=lambda run: (-len(run), -run.stop))


def best_run(stored: Sequence[bool], ends: Sequence[bool], first: int) -> range:
    """The longest unbroken run of stored blocks up to a stored end; empty if there is none.

    Args:
        ends: by block, whether the end after it is stored.
    """
    runs = possible_runs(stored, first)
    return next((run for run in runs if ends[run.stop - 1]), range(0))


def end_indices(block_count: int, end_blocks: int, target: int) -> range:
    """The indices of the end blocks of one end of a prompt. They follow the indices of its blocks,
    and every end has its own.

    Args:
        block_count: number of blocks of the prompt.
        target: blocks before the end; 0: there is no end.
    """
    start = block_count + (target - 1) * end_blocks
    return range(start, start + end_blocks) if target else range(0)


@dataclass(frozen=True, slots=True)
class View:
    """A prompt as `planner` sees it.

    Attributes:
        front: end of the computed prefix, in tokens.
        first: block at the front.
        limit: no stored token is used from here on.
        states: one byte (`BlockState`) for each block from `first` on.
        end_blocks: number of blocks of one end state; 0: the front may jump to any block boundary.
        end_wanted: end blocks of the target that have not landed.
        wanted: how many blocks are still to land, those of the end included.
        attachable: how many landed blocks can be attached when the front reaches them. An end needs
            all of its blocks.
        pending: a block right of the front is still to come or to be attached.
    """

    front: int
    first: int
    states: bytes
    block_tokens: int
    prompt_tokens: int
    limit: int
    end_blocks: int = 0
    end_wanted: int = 0
    # Counted once: a step asks for them many times, of each prompt that waits.
    wanted: int = field(init=False, repr=False, compare=False)
    attachable: int = field(init=False, repr=False, compare=False)
    pending: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        wanted = self.states.count(_S.WANTED)
        landed = self.states.count(_S.LANDED)
        object.__setattr__(self, "wanted", wanted + self.end_wanted)
        attachable = 0 if self.end_blocks and self.wanted else landed
        object.__setattr__(self, "attachable", attachable)
        object.__setattr__(self, "pending", bool(wanted or landed))

    def found(self, usable: Sequence[bool]) -> "View":
        """The view after the lookup's answer: which of the prompt's blocks are stored and of
        use."""
        states = bytes(_S.WANTED if yes else _S.ABSENT for yes in usable[self.first :])
        states = states[: len(self.states)]
        return replace(
            self, states=states, end_wanted=self.end_blocks if _S.WANTED in states else 0
        )


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
        end_blocks: blocks of one end state; 0: the model has none.

    Attributes:
        limit: the last position that the front may jump to.
        front: end of the scheduled prefix, in tokens.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        page_tokens: int,
        limit_tokens: int,
        prompt_tokens: int,
        front: int = 0,
        end_blocks: int = 0,
    ) -> None:
        assert block_tokens % page_tokens == 0
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens
        self.end_blocks = end_blocks
        unit = block_tokens if end_blocks else page_tokens
        self.limit = limit_tokens // unit * unit
        count = min(prompt_tokens // block_tokens, -(-self.limit // block_tokens))
        self._prompt_tokens = prompt_tokens
        self._states = bytearray([BlockState.ABSENT]) * count
        self._ends: Set[int] = set()  # blocks after which an end is stored
        self._target = 0  # blocks before the target; 0: there is none
        self._end_block_states = bytearray()  # states of the target's end blocks
        self.front = 0
        self._view: View | None = None  # None: something has changed since the last one
        self.advance(front)
        # At arrival: the loader's choice of a target starts from it, too.
        self._first = self.first_loadable

    def anew(self, front: int) -> "Meet":
        """A new table for the same prompt, before its lookup, when the tree holds `[0, front)`."""
        return Meet(
            block_tokens=self.block_tokens,
            page_tokens=self.page_tokens,
            limit_tokens=self.limit,
            prompt_tokens=self._prompt_tokens,
            front=front,
            end_blocks=self.end_blocks,
        )

    # ---- events; those that return a list say which landed blocks are given up ----

    def found(self, stored: Sequence[bool], ends: Sequence[bool] = ()) -> None:
        """The lookup's answer: by block, whether it is stored, and whether the end after it is.
        Entries past the last block are ignored."""
        for block, yes in zip(range(len(self._states)), stored, strict=False):
            if yes:
                self._apply(block, Event.FIND)
        if not self.end_blocks:
            return
        usable = self.usable(stored, ends)
        # The loader of this rank may have chosen another target.
        for block in range(self.block_count):
            if not usable[block] and self._states[block] == BlockState.WANTED:
                self._apply(block, Event.LOSE)
        if any(usable):
            self._ends = {block for block, yes in enumerate(ends) if yes}
            self._set_target(self.block_count - usable[::-1].index(True))
            self._keep_run()

    def usable(self, stored: Sequence[bool], ends: Sequence[bool]) -> Sequence[bool]:
        """Which of the prompt's blocks are stored and of use; with end states, those of
        `best_run`."""
        if not self.end_blocks:
            return stored
        run = best_run(stored[: self.block_count], ends, self._first)
        return [block in run for block in range(self.block_count)]

    def landed(self, block: int) -> bool:
        """Every rank has fetched the block. False: it is not wanted any more, discard its bytes."""
        return self._apply(block, Event.LAND) is BlockState.LANDED

    def lost(self, block: int) -> list[int]:
        """The block could not be loaded."""
        self._apply(block, Event.LOSE)
        return self._keep_run()

    def dropped(self, block: int) -> list[int]:
        """The landed bytes of the block were given up."""
        self._apply(block, Event.DROP)
        return self._keep_run()

    def give_up(self) -> list[int]:
        """Blocks that have not landed are GONE: steps will compute them."""
        self._ends = set()
        for block in (*range(len(self._states)), *self.end_indices):
            if self.state(block) is BlockState.WANTED:
                self._apply(block, Event.LOSE)
        return self._keep_run()

    def advance(self, front: int) -> list[int]:
        """The tree holds `[0, front)`.

        The front moves back if the tree has evicted a part of a waiting prompt. That part is
        computed then.
        """
        surplus = []
        if front < self.front:
            last = min(self._block_of(self.front) + 1, self.block_count)
            for block in range(self._block_of(front), last):
                self._apply(block, Event.EVICT)
            self._move_front(front)
        if front > self.front:
            for block in range(self._block_of(self.front), self._blocks_below(front)):
                if self._states[block] == BlockState.LANDED:
                    surplus.append(block)
                self._apply(block, Event.PASS)
            self._move_front(front)
        return surplus + self._keep_run()

    # ---- what the scheduler does ----

    def island(self) -> Span | None:
        """The span to attach now, `[front, end of the island that the front touches)`, or None. If
        the model has end states, it ends at the target, all of whose end blocks have landed."""
        first = self._block_of(self.front)
        stop = first
        while stop < len(self._states) and self._states[stop] == BlockState.LANDED:
            stop += 1
        end = min(stop * self.block_tokens, self.limit)
        if stop == first or end <= self.front:
            return None
        if self.end_blocks and (
            stop < self._target or self._end_block_states.count(BlockState.LANDED) < self.end_blocks
        ):
            return None
        assert self.front % self.page_tokens == 0, "the front entered a landed block"
        return Span(self.front, end)

    def attach(self, span: Span) -> None:
        """`span` (as `island()` gave it) joins the tree, with its end blocks (`end_indices`)."""
        assert span == self.island()
        for block in self.blocks_of(span):
            self._apply(block, Event.ATTACH)
        self._move_front(span.stop)
        self._set_target(0)

    def claim(self, stop: int) -> list[int]:
        """The step being scheduled computes `[front, stop)`. It computes landed blocks that take
        less time than another step, and with end states those that the front may not jump over yet.
        Returns the landed blocks that are given up."""
        surplus = []
        last = min(-(-stop // self.block_tokens), len(self._states))
        # Not from `_block_of`: past the limit the front stands in a block that may be attached.
        for block in range(self._blocks_below(self.front), last):
            if self._states[block] == BlockState.LANDED:
                surplus.append(block)
                self._apply(block, Event.DROP)
            self._apply(block, Event.CLAIM)
        self._move_front(stop)
        return surplus + self._keep_run()

    # ---- questions ----

    def blocks_of(self, span: Span) -> range:
        """The blocks that `span` touches."""
        return span.blocks(self.block_tokens)

    def state(self, block: int) -> BlockState:
        """State of a block, or of an end block. End blocks of former targets are GONE."""
        if block < self.block_count:
            return BlockState(self._states[block])
        ends = self.end_indices
        return BlockState(self._end_block_states[block - ends.start]) if block in ends else _S.GONE

    def wants_any(self, blocks: Iterable[int]) -> bool:
        """Whether one of `blocks`, or of these end blocks, is WANTED."""
        return any(self.state(block) is _S.WANTED for block in blocks)

    def view(self) -> View:
        """The front and the blocks right of it, for `planner`."""
        if self._view is None:
            first = self._block_of(self.front)
            self._view = View(
                front=self.front,
                first=first,
                states=bytes(self._states[first:]),
                block_tokens=self.block_tokens,
                prompt_tokens=self._prompt_tokens,
                limit=self.limit,
                end_blocks=self.end_blocks,
                end_wanted=self._end_block_states.count(BlockState.WANTED),
            )
        return self._view

    @property
    def block_count(self) -> int:
        """How many blocks may be loaded at all, end blocks aside."""
        return len(self._states)

    @property
    def indices(self) -> list[int]:
        """The indices of the blocks, and of the target's end blocks."""
        return [*range(self.block_count), *self.end_indices]

    def has(self, block: int) -> bool:
        """Whether it is the index of a block, or of an end block of the target."""
        return block < self.block_count or block in self.end_indices

    @property
    def run(self) -> range:
        """With end states: the blocks up to the target that the front may jump over. It stops at
        the target, or at 0 if there is none."""
        return range(self._states[: self._target].translate(_TO_COME).rfind(0) + 1, self._target)

    @property
    def end_indices(self) -> range:
        """The indices of the target's end blocks."""
        return end_indices(self.block_count, self.end_blocks, self._target)

    @property
    def first_loadable(self) -> int:
        """Blocks below this one are computed: the loader must not read them."""
        first = self._block_of(self.front)
        taken = first < len(self._states) and self._states[first] == BlockState.CLAIMED
        return first + 1 if taken else first

    @property
    def landed_blocks(self) -> int:
        """How many blocks wait for the front."""
        return self._states.count(BlockState.LANDED)

    @property
    def pending(self) -> bool:
        """Whether a block right of the front is still to come or to be attached."""
        return self.view().pending

    def _move_front(self, front: int) -> None:
        self.front = front
        self._view = None

    def _set_target(self, target: int) -> None:
        self._view = None
        self._target = target
        self._end_block_states = bytearray([BlockState.WANTED] * self.end_blocks if target else [])

    def _keep_run(self) -> list[int]:
        """Choose the target again if a block of the run, or its end, is lost. Only one unbroken run
        up to a stored end is of use; the other blocks are given up.

        The target stays unless a lower end has a run that is longer by more than an end state.
        """
        if not self._target:
            return []
        to_come = self._states[: self._target].translate(_TO_COME)
        lost = BlockState.GONE in self._end_block_states
        if to_come[-1] and not lost and to_come.find(1) == to_come.rfind(0) + 1:
            return []
        lengths = run_lengths(to_come)
        use = {b: lengths[b] for b in range(self._target - 1) if lengths[b] and b in self._ends}
        if to_come[-1] and not lost:
            use[self._target - 1] = lengths[-1] + self.end_blocks
        last = max(use, key=lambda block: (use[block], block), default=-1)
        kept = range(last + 1 - lengths[last], last + 1) if use else range(0)
        surplus = []
        for block in range(self._target):
            if to_come[block] and block not in kept:
                if self._states[block] == BlockState.LANDED:
                    surplus.append(block)
                    self._apply(block, Event.DROP)
                else:
                    self._apply(block, Event.LOSE)
        if kept.stop != self._target:
            surplus += [b for b in self.end_indices if self.state(b) is BlockState.LANDED]
            self._set_target(kept.stop)
        return surplus

    def _apply(self, block: int, event: Event) -> BlockState:
        state = TRANSITIONS[self.state(block), event]
        self._view = None
        if block < self.block_count:
            self._states[block] = state
        elif block in self.end_indices:
            self._end_block_states[block - self.end_indices.start] = state
        return state

    def _block_of(self, token: int) -> int:
        return min(token // self.block_tokens, len(self._states))

    def _blocks_below(self, front: int) -> int:
        """Index of the first block that could still be attached; all blocks if none could."""
        if front >= self.limit:
            return len(self._states)
        return self._block_of(front)
