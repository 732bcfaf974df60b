"""Reports what happened to each request: a log line, metrics, and an optional trace file.

Clients choose the ids of requests. So log lines have them quoted and escaped (`%r`).
"""

import json
import logging
import time
from typing import IO

from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.metrics import Metrics
from sglang_cake.integration.request.prompt_record import PromptRecord
from sglang_cake.loading.cost_model import PromptCosts

logger = logging.getLogger("sglang_cake")

GIVEN_UP_EVERY_S = 60.0  # between two log lines about loads that were given up

_TRACE = "--cake-trace-file"
BOUNDARY.hooks[_TRACE] = []


class RequestReporter:
    """Reports on requests. Only one rank of a group writes log lines and the trace.

    Args:
        trace_path: file that gets one JSON line per event (`t_s` is `time.monotonic()`), or None.
        writes: whether this rank writes log lines and the trace.
        metrics: where numbers go, if SGLang was asked for metrics.
    """

    def __init__(self, trace_path: str | None, *, writes: bool, metrics: Metrics | None) -> None:
        self._writes = writes
        self._metrics = metrics
        self._given_up = 0  # requests since the last log line about them
        self._given_up_line_s: float | None = None
        self._trace: IO[str] | None = None
        if trace_path and writes:
            self._trace = open(trace_path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write_event(
        self, record: PromptRecord, event: str, *, at_s: float | None = None, **fields: object
    ) -> None:
        """Write one trace line, if a trace is wanted. `at_s`: when it happened, if not now."""
        if self._trace is not None:
            line = {"t_s": at_s or time.monotonic(), "rid": record.rid, "event": event, **fields}
            try:
                self._trace.write(json.dumps(line) + "\n")
            except OSError as error:
                BOUNDARY.failed(_TRACE, error, rid="")
                self._trace = None  # a trace with a gap would mislead

    def stepped(self, *, overhead_s: float | None, costs: PromptCosts) -> None:
        """A scheduling step is over in which cake took `overhead_s`; None: it had nothing to do."""
        if self._metrics is not None:
            self._metrics.publish(step_overhead_s=overhead_s, costs=costs)

    def gave_up(self, record: PromptRecord, silence_s: float) -> None:
        """The loads of the request are given up, since no block came in `silence_s`. Of many such
        requests in GIVEN_UP_EVERY_S, only the first one gets a log line."""
        self._given_up += 1
        now_s = time.monotonic()
        last_s = self._given_up_line_s
        if last_s is None or now_s - last_s >= GIVEN_UP_EVERY_S:
            if self._writes:
                logger.warning(
                    "cake: loads are overdue: no block came in %.2f s, so the rest of request %r "
                    "is computed (%d requests since the last such line)",
                    silence_s,
                    record.rid,
                    self._given_up,
                )
            self._given_up_line_s = now_s
            self._given_up = 0

    def prefilled(self, record: PromptRecord, rest_s: float) -> None:
        """The last prefill step of the request is scheduled. Args: rest_s: predicted time until it
        is over."""
        stats = record.stats
        self.write_event(
            record,
            "done",
            computed_tokens=stats.computed_tokens,
            loaded_tokens=stats.loaded_tokens,
            wasted_bytes=record.memory.wasted_bytes,
        )
        if self._metrics is not None and any(record.agreed.stored):
            meet = len(record.tokens) if stats.meet_token is None else stats.meet_token
            self._metrics.observe_meet(meet / max(1, len(record.tokens)))
            if stats.predicted_s and stats.prefill_s:
                self._metrics.observe_prediction(stats.predicted_s, stats.prefill_s + rest_s)

    def ended(self, record: PromptRecord) -> None:
        """The request is over. It gets one log line if any of its blocks were stored."""
        if self._metrics is not None:
            self._metrics.publish_next_step()
        if not self._writes or not any(record.agreed.stored):
            return
        stats = record.stats
        logger.info(
            "cake rid=%r prompt=%d matched=%d computed=%d loaded=%d meet=%s prefill_s=%s "
            "wasted_bytes=%d",
            record.rid,
            len(record.tokens),
            stats.matched_tokens + stats.rematched_tokens,
            stats.computed_tokens,
            stats.loaded_tokens,
            "none" if stats.meet_token is None else stats.meet_token,
            "none" if stats.prefill_s is None else f"{stats.prefill_s:.3f}",
            record.memory.wasted_bytes,
        )
