"""How members of a group reach each other: the interface, and what everybody may rely on.

- Messages from one member to another arrive in order, each at most once, or not at all; so do the
  parts of a layer. Between messages and parts there is no order.
- `send` never waits for the peer. `send_part` waits while the peer is not taking: what is in flight
  is bounded, by one part and the buffers of the operating system.
- What arrives was checked: it is what a member of this group sent.
- A peer that is gone is told as gone, once, and before it is back.

Handlers are called from the transport's threads, one at a time for each peer.
"""

from typing import Any, Protocol

from sglang_cake.core.errors import RunaheadError
from sglang_cake.runahead.messages import LayerPart, Message

MAX_PART_BYTES = 4 * 2**20
SEND_TIMEOUT_S = 5.0  # in which a part must be taken

# The bytes of a part: a memoryview, or, with a transport between GPUs, a tensor of uint8 on ours.
Payload = Any


class PeerGone(RunaheadError):
    """The peer cannot be reached now, or does not take what it is sent."""

    reason = "peer"


class Handler(Protocol):
    """Who hears what peers say."""

    def on_message(self, rank: int, message: Message) -> None:
        """A message came. Must not wait."""
        ...

    def on_part(self, rank: int, part: LayerPart, payload: Payload) -> None:
        """A part came. `payload` is the transport's, and only until this returns.

        Waiting here holds the sender up, and whatever else it has for this member.
        """
        ...

    def on_gone(self, rank: int, reason: str) -> None:
        """The peer was reachable and is not any more. Must not wait."""
        ...


class Transport(Protocol):
    """One member's connections to all others."""

    def start(self, handler: Handler) -> None:
        """Begin to reach the others, and to be reached."""
        ...

    def reachable(self) -> frozenset[int]:
        """Ranks that can be sent to, and were heard of a moment ago."""
        ...

    def bytes_per_s(self, rank: int) -> float | None:
        """What the link from a peer carried lately while it carried parts; None if unknown."""
        ...

    def send(self, rank: int, message: Message) -> None:
        """Queue a message. Raises: PeerGone."""
        ...

    def send_part(self, rank: int, part: LayerPart, payload: Payload) -> None:
        """Send at most MAX_PART_BYTES; when this returns, `payload` may be reused.

        Raises: PeerGone.
        """
        ...

    def close(self) -> None:
        """End all connections and threads."""
        ...
