"""What a policy is, and what it may know."""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sglang_cake.store.eviction.reuse import Fits
from sglang_cake.store.eviction.worth import Worth


class Use(NamedTuple):
    """What is known of a block from the last request that touched it."""

    workload: str = ""  # what the request said it is for
    turn: int = 1  # of the conversation, as its prefix tells; 1: nothing like it was seen before
    position: int = 0  # of the block in the prompt, in blocks
    reach: int = 1  # blocks of the prompt
    tenant: int = 0  # who asked; 0: not known


UNKNOWN_USE: Final = Use()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a policy may know of a block."""

    stored_bytes: int
    created_s: float  # seconds since 1970, as are all times here
    used_s: float  # last put or read
    uses: int  # reads since it was put
    ident: int  # the same again when an evicted block comes back
    use: Use = UNKNOWN_USE


def ident_of(key: bytes) -> int:
    """`Usage.ident` of the block with this key: 63 bits of it."""
    return int.from_bytes(key[:8]) >> 1


class EvictionPolicy(Protocol):
    """An order among blocks, which are integers here: a new one each time that a block is stored.

    Every call is O(log n) or better, or O(W) for W classes of requests; `refresh` may take
    longer, and is called in the background.
    """

    def __len__(self) -> int: ...

    def add(self, block: int, usage: Usage) -> None:
        """A block is there; one that was there already is known better now."""
        ...

    def touch(self, block: int, at_s: float, uses: int = 1, use: Use | None = None) -> None:
        """A block was read, the last time at `at_s`; an unknown one is passed over.

        Those of one request are touched last block first, so that its head is the most recent.
        """
        ...

    def remove(self, block: int) -> None:
        """A block has gone; an unknown one is passed over."""
        ...

    def pop(self, now_s: float) -> tuple[int, Usage] | None:
        """Remove and return the block to evict next, as it was known; None when none is left.

        One that cannot be evicted now, because it is being read, is given back by `add`.
        """
        ...

    def skipped(self, usage: Usage) -> None:
        """A block was used that is not there, and will not be: it was not worth writing. It is
        followed like those that were evicted, or it would never be known that others like it
        have become worth it."""
        ...

    def chance(self, usage: Usage) -> float:
        """How likely a block like this one is ever used again; 1 for who does not know."""
        ...

    def refresh(self, now_s: float) -> None:
        """Learn from what was seen. Called every second or so."""
        ...

    def over_bytes(self) -> int:
        """How much should go whether there is room or not: what tenants have above their quota."""
        ...

    def weigh(self, worth: Worth) -> None:
        """What blocks save from now on."""
        ...

    def fits(self) -> Fits:
        """What was learned, to be kept across restarts; empty where nothing is."""
        ...

    def learned(self, fits: Fits, now_s: float) -> None:
        """What `fits` gave before a restart, which is now. Called before any block is added."""
        ...


class BasePolicy:
    """Keeps what is known of each block, and learns nothing. Subclasses implement the order."""

    def __init__(self) -> None:
        self._usage: dict[int, Usage] = {}

    def __len__(self) -> int:
        return len(self._usage)

    def add(self, block: int, usage: Usage) -> None:
        raise NotImplementedError

    def touch(self, block: int, at_s: float, uses: int = 1, use: Use | None = None) -> None:
        usage = self._usage.get(block)
        if usage is not None:
            self.touched(block, _touched(usage, at_s, uses, use))

    def touched(self, block: int, usage: Usage) -> None:
        """A block that is there was read, and is known so now."""
        self.add(block, usage)

    def skipped(self, usage: Usage) -> None:
        pass

    def chance(self, usage: Usage) -> float:
        return 1.0

    def refresh(self, now_s: float) -> None:
        pass

    def over_bytes(self) -> int:
        return 0

    def weigh(self, worth: Worth) -> None:
        pass

    def fits(self) -> Fits:
        return {}

    def learned(self, fits: Fits, now_s: float) -> None:
        pass


def _touched(usage: Usage, at_s: float, uses: int, use: Use | None) -> Usage:
    return Usage(
        usage.stored_bytes,
        usage.created_s,
        max(at_s, usage.used_s),
        usage.uses + uses,
        usage.ident,
        usage.use if use is None else use,
    )
