"""What a transport between the members of a group promises (`zeromq.py`), and whom it calls.

- Messages from one member to another arrive in order, each at most once, or not at all. The same
  holds for parts of layers. Messages and parts are not ordered relative to each other.
- `send` never waits for the peer. `send_part` waits while the peer does not accept data: data in
  flight is bounded by one part and the buffers of the operating system.
- Arrived data was authenticated: a member of this group sent it.
- `on_gone` is called once for a peer that is gone, before the peer is reachable again.

Handlers are called from the transport's threads, one at a time for each peer.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import RunaheadError
from sglang_cake.loading.cost_model import DOUBT_S
from sglang_cake.runahead.messages import LayerPart, Message

MAX_PART_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Times of the connections between members, in seconds."""

    send_s: float = 5.0  # in which a peer must accept a part
    silence_s: float = 2.0  # after which a peer counts as gone
    ping_s: float = 0.5  # period of heartbeats
    connect_s: float = 10.0  # in which a connection must be made, and then deliver something
    handshake_s: float = 5.0  # in which a new connection must authenticate
    retry_s: tuple[float, float] = (0.1, 2.0)  # between attempts to connect: at first, at most
    # A throughput that was measured longer ago is unknown. Otherwise a link that was slow, so that
    # no prompt is shared over it, would never be known to be fast again.
    doubt_s: float = DOUBT_S


LINK_TIMES: Final = LinkTimes()


class PeerGone(RunaheadError):
    """The peer cannot be reached now, or does not accept data."""

    reason = "peer"


class Handler(Protocol):
    """Receives messages and parts of peers."""

    def on_message(self, rank: int, message: Message) -> None:
        """A message arrived. Must not block."""
        ...

    def on_part(self, rank: int, part: LayerPart, data: PartBytes) -> None:
        """A part arrived. `data` belongs to the transport, and is valid until this returns.

        Blocking here delays the sender, and its other parts for this member.
        """
        ...

    def on_gone(self, rank: int, reason: str) -> None:
        """The peer is no longer reachable. Must not block."""
        ...
