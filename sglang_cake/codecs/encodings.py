"""What one block is encoded as: a payload for each codec that suits one of its tiers."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Forms:
    """The payloads of one block so far, which all tiers with the same codec share. For one thread
    at a time."""

    block: memoryview
    first: bool  # whether it begins with a prompt's first token
    take: Callable[[], memoryview]  # memory for one more payload
    payloads: dict[str, memoryview] = field(default_factory=dict)  # by the codec that was asked for
    lost: dict[str, float] = field(default_factory=dict)  # codec -> its error: too much, here
