"""What happens inside a store beyond its answers, for whoever watches it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Counting(Protocol):
    """A store that counts what happens to it, or that is in front of one."""

    def events(self) -> Mapping[str, int]:
        """How often each thing happened since the store was opened, by name; names that stay the
        same. Asks nobody: it also answers during an outage."""
        ...


def events_of(store: object) -> Mapping[str, int]:
    """What a store counts; nothing if it does not."""
    return store.events() if isinstance(store, Counting) else {}
