"""What happened to each request: a log line, metrics, and a trace for those who draw it."""

import json
import logging
import time
from typing import IO

from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.metrics import Metrics
from sglang_cake.integration.request.restore import Restore
from sglang_cake.loading.cost_model import Costs

logger = logging.getLogger("sglang_cake")

_TRACE = "--cake-trace-file"
BOUNDARY.hooks[_TRACE] = []


class RequestReporter:
    """Tells the story of requests. Only one rank of a group talks.

    Args:
        trace_path: file that gets one JSON line per event (`t_s` is `time.monotonic()`), or None.
        speaks: whether this rank is the one that talks.
        metrics: where numbers go, if SGLang was asked for metrics.
    """

    def __init__(self, trace_path: str | None, *, speaks: bool, metrics: Metrics | None) -> None:
        self._speaks = speaks
        self._metrics = metrics
        self._trace: IO[str] | None = None
        if trace_path and speaks:
            self._trace = open(trace_path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def tell(
        self, restore: Restore, event: str, *, at_s: float | None = None, **facts: object
    ) -> None:
        """Write one trace line, if a trace is wanted. `at_s`: when it happened, if not now."""
        if self._trace is not None:
            line = {"t_s": at_s or time.monotonic(), "rid": restore.rid, "event": event, **facts}
            try:
                self._trace.write(json.dumps(line) + "\n")
            except OSError as error:
                BOUNDARY.failed(_TRACE, error, rid="")
                self._trace = None  # what a trace lacks, nobody can tell

    def stepped(self, *, overhead_s: float | None, costs: Costs) -> None:
        """A scheduling step is over in which cake took `overhead_s`; None: it had nothing to do."""
        if self._metrics is not None:
            self._metrics.publish(step_overhead_s=overhead_s, costs=costs)

    def prefilled(self, restore: Restore) -> None:
        """The last prefill step of the request is scheduled."""
        self.tell(
            restore,
            "done",
            computed_tokens=restore.computed_tokens,
            loaded_tokens=restore.loaded_tokens,
            wasted_bytes=restore.wasted_bytes,
        )
        if self._metrics is not None and any(restore.stored):
            meet = len(restore.tokens) if restore.meet_token is None else restore.meet_token
            self._metrics.observe_meet(meet / max(1, len(restore.tokens)))
            if restore.predicted_s and restore.prefill_s:
                self._metrics.observe_prediction(restore.predicted_s, restore.prefill_s)

    def ended(self, restore: Restore) -> None:
        """The request is over; says so in one line if anything of it was stored."""
        if self._metrics is not None:
            self._metrics.publish_next_step()
        if not self._speaks or not any(restore.stored):
            return
        logger.info(
            "cake rid=%s prompt=%d matched=%d computed=%d loaded=%d meet=%s prefill_s=%s "
            "wasted_bytes=%d",
            restore.rid,
            len(restore.tokens),
            restore.matched_tokens,
            restore.computed_tokens,
            restore.loaded_tokens,
            "none" if restore.meet_token is None else restore.meet_token,
            "none" if restore.prefill_s is None else f"{restore.prefill_s:.3f}",
            restore.wasted_bytes,
        )
