"""Whether a block is worth writing at all."""

from dataclasses import dataclass
from typing import Final

from sglang_cake.store.eviction.base import UNKNOWN_USE, EvictionPolicy, Usage
from sglang_cake.store.eviction.worth import Worth


@dataclass(frozen=True, slots=True)
class Admission:
    """A block is written if the seconds that it can be expected to save are at least `least` times
    those that writing it takes, which are taken to be those of loading it.

    Expected: the share of its class that is used again at all, times what its prompt saves per
    block. So neither prompts that are computed faster than they are loaded are written, nor classes
    of which next to nothing comes back. Both wear the disk for nothing.
    """

    least: float = 0.0  # 0: everything is written

    def admits(self, policy: EvictionPolicy, usage: Usage, worth: Worth) -> bool:
        """Of a block of which nothing is known: yes."""
        if not self.least or usage.use is UNKNOWN_USE:
            return True
        saved_s = policy.chance(usage) * worth.mean_saved_s(usage.use.reach)
        return saved_s >= self.least * worth.load_s


ALL: Final = Admission()
