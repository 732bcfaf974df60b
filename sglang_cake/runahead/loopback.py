"""Members within one process, for tests: the same promises as any transport, without a network."""

import queue
import threading

from sglang_cake.runahead.messages import LayerPart, Message, decode, encode
from sglang_cake.runahead.transport import MAX_PART_BYTES, Handler, PeerGone

_MAX_QUEUE = 256
_Letter = tuple[Message, None] | tuple[LayerPart, bytes]


class Loopback:
    """One member of a group made by `group`."""

    def __init__(self, rank: int, members: "list[Loopback]") -> None:
        self._rank, self._members = rank, members
        self._inboxes: dict[int, queue.Queue[_Letter | None]] = {}
        self._handler: Handler | None = None
        self._closed = threading.Event()

    @staticmethod
    def group(size: int) -> "list[Loopback]":
        """That many members that know each other."""
        members: list[Loopback] = []
        for rank in range(size):
            members.append(Loopback(rank, members))
        return members

    def start(self, handler: Handler) -> None:
        self._handler = handler
        for other in self._members:
            if other is not self:
                inbox = self._inboxes[other._rank] = queue.Queue(_MAX_QUEUE)
                threading.Thread(
                    target=self._deliver, args=(other._rank, inbox), daemon=True
                ).start()

    def reachable(self) -> frozenset[int]:
        if self._closed.is_set():
            return frozenset()
        return frozenset(
            m._rank
            for m in self._members
            if m is not self and m._handler and not m._closed.is_set()
        )

    def bytes_per_s(self, rank: int) -> float | None:
        return None

    def send(self, rank: int, message: Message) -> None:
        # Through bytes, as on a wire: nothing is shared, and everything is judged.
        try:
            self._inbox(rank).put_nowait((decode(encode(message)), None))
        except queue.Full:
            raise PeerGone(f"member {rank} does not take what it is sent") from None

    def send_part(self, rank: int, part: LayerPart, payload: memoryview) -> None:
        assert 0 < len(payload) <= MAX_PART_BYTES
        inbox = self._inbox(rank)
        inbox.put((part, bytes(payload)))
        while inbox.qsize() > 1:  # one part in flight
            if not self._members[rank]._closed.wait(0.001):
                continue
            raise PeerGone(f"member {rank} is gone")

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for inbox in self._inboxes.values():
            inbox.put(None)
        for member in self._members:
            if member is not self and member._handler and not member._closed.is_set():
                member._handler.on_gone(self._rank, "closed")

    def _inbox(self, rank: int) -> "queue.Queue[_Letter | None]":
        if rank not in self.reachable():
            raise PeerGone(f"member {rank} cannot be reached")
        return self._members[rank]._inboxes[self._rank]

    def _deliver(self, rank: int, inbox: "queue.Queue[_Letter | None]") -> None:
        assert self._handler is not None
        while (letter := inbox.get()) is not None and not self._closed.is_set():
            head, payload = letter
            if isinstance(head, LayerPart):
                assert payload is not None
                self._handler.on_part(rank, head, memoryview(payload))
            else:
                self._handler.on_message(rank, head)
