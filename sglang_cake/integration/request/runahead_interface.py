"""The interface of KV-Runahead to the core. `NoRunahead` implements it for a server that is in no
group, `Runahead` (`integration/runahead/runahead_scheduler.py`) for a member of one."""

from typing import TYPE_CHECKING, Any, Literal

from sglang_cake.core.token_span import Span
from sglang_cake.integration.boundary import OriginalFunction

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

Verdict = Literal["alone", "wait", "share"]


class NoRunahead:
    """The interface of KV-Runahead, for a server that is no member of a group. `Runahead` overrides
    every method. The scheduler thread owns it."""

    is_member = False

    def poll(self, scheduler: "Scheduler") -> None:
        """Serve other members. Call between two steps."""

    def consider(self, req: "Req", *, alone: bool) -> Verdict:
        """Whether the step of `req` from `req.prefix_len`, which touches no island, is shared.

        Args:
            alone: no other request is in this step.
        """
        return "alone"

    def extent(self, req: "Req") -> Span | None:
        """The tokens that this server and its helpers compute of this request; None: it has no
        helpers."""
        return None

    def helped_tokens(self, req: "Req") -> int:
        """How many of these tokens the helpers compute."""
        return 0

    def forward(self, original: OriginalFunction, worker: Any, batch: Any, **kwargs: Any) -> Any:
        """AROUND a worker's `forward_batch_generation`. Raises: errors of SGLang."""
        return original(worker, batch, **kwargs)

    def release(self, rid: str) -> None:
        """The request has ended, or was aborted or retracted."""

    def close(self) -> None:
        """The process ends."""
