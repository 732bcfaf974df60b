"""The KV pool as a chain sees it: rows of a layer that are read and written, maybe beside a forward
that a device is still working at."""

from typing import Any, Protocol

from sglang_cake.runahead.transport import Payload

# Rows of the pool, one a token. Only `Rows` looks inside; elsewhere they are cut by tokens.
Slots = Any


class Launched(Protocol):
    """A copy that is under way, or complete."""

    def wait(self) -> None:
        """Until it is complete."""
        ...


class Rows(Protocol):
    """The KV pool, a layer at a time."""

    @property
    def layers(self) -> int:
        """How many layers there are."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all planes."""
        ...

    def buffer(self, size_bytes: int) -> Payload:
        """Memory to read parts into, of the kind that the transport sends best. Any thread."""
        ...

    def begin(self) -> None:
        """Writes come after all that the calling thread has launched so far: others may have had
        the slots until then. The forward's thread."""
        ...

    def read(self, layer: int, slots: Slots, out: Payload) -> None:
        """Copy slots into `out`, plane after plane, each `[tokens, bytes]`. Any thread."""
        ...

    def write(self, layer: int, slots: Slots, payload: Payload, skip: int) -> Launched:
        """Copy `payload` without its first `skip` tokens into slots. Any thread.

        `payload` and `slots` must stay as they are until it is complete. A forward may go on
        before that.
        """
        ...
