"""A prefill and a decode server that take each other's KV over Mooncake's TCP transport."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

from live import Answer, Live, PendingRequest

COMMON = (
    *("--dtype", "float32", "--max-total-tokens", "12000", "--enable-metrics"),
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
)
NO_DECODE_SERVER = "2.2.2.2"  # SGLang's name for a decode server that takes KV and does nothing
ROOMS = itertools.count(random.randrange(2**40))


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode server, and what a router does: each gets every request."""

    prefill: Live
    decode: Live
    port: int  # where the decode server finds the prefill server

    def room(self) -> dict[str, Any]:
        """The fields by which the servers find each other for one request."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(ROOMS),
        }

    def begin(self, ids: list[int], **extra: Any) -> tuple[PendingRequest, PendingRequest]:
        """Send a request to the decode and to the prefill server."""
        extra = self.room() | extra
        decoding = PendingRequest(self.decode, ids, **extra)
        return decoding, PendingRequest(self.prefill, ids, **extra)

    def ask(self, ids: list[int], **extra: Any) -> tuple[Answer, Answer]:
        """The answers of the decode server, which is the user's, and of the prefill server."""
        decoding, prefilling = self.begin(ids, **extra)
        return decoding.answer(), prefilling.answer()

    def stored(self) -> list[float]:
        """Blocks that the prefill server and the decode server have stored."""
        return [live.metric("stored_blocks_total") for live in (self.prefill, self.decode)]

    def flush(self) -> None:
        self.prefill.flush()
        self.decode.flush()
