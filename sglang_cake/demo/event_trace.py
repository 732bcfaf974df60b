"""Reads the events of requests that a server writes if `SGLANG_CAKE_TRACE_FILE` is set.

(Traces of requests for eviction policies, `--cake-record-trace`, are another format:
`simulator/request_traces.py`.)

One JSON object a line: `t_s` (`time.monotonic` seconds), `rid`, `event`, and the event's own
fields. `claim` is written when a step is scheduled. On a CPU, where steps run one after the other
in the scheduler's thread, a step ends about when the next `claim` or `attach` is written; the last
step ends with the first token (`done` only says that it is scheduled).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE_ENV = "SGLANG_CAKE_TRACE_FILE"


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One prefill step: its span of tokens and its time."""

    start: int
    stop: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One loaded block; its time is from the landing before it to its own."""

    block: int
    begin_s: float
    land_s: float


@dataclass(frozen=True, slots=True)
class Attached:
    """The front met an island and moved from `start` to `stop`."""

    start: int
    stop: int
    at_s: float


@dataclass(slots=True)
class RequestTrace:
    """The events of one request until its first token."""

    first_token_s: float
    arrive_s: float = 0.0
    found_s: float = 0.0  # when the lookup in the store ended, and reads began
    prompt_tokens: int = 0
    stored_blocks: int = 0
    block_tokens: int = 0
    steps: list[PrefillStep] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    attaches: list[Attached] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrive_s

    @property
    def stored_tokens(self) -> int:
        """Leading tokens that can be loaded; the last token of a prompt is always computed."""
        return min(self.stored_blocks * self.block_tokens, self.prompt_tokens - 1)


def read_event_trace(path: Path, rid: str, first_token_s: float) -> RequestTrace:
    """The trace of request `rid`.

    Args: first_token_s: when it had its first token, on the clock of the trace.
    Raises: ValueError if the file has no event of it.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    events = [event for event in map(json.loads, lines) if event["rid"] == rid]
    if not events:
        raise ValueError(f"{path} has no events of request {rid}")
    events.sort(key=lambda event: event["t_s"])
    trace = RequestTrace(first_token_s)
    for event in events:
        if event["event"] == "arrive":
            trace.arrive_s = event["t_s"]
            trace.prompt_tokens = event["tokens"]
            trace.block_tokens = event["block_tokens"]
        elif event["event"] == "found":
            trace.found_s = event["t_s"]
            trace.stored_blocks = event["stored_blocks"]
        elif event["event"] == "attach":
            trace.attaches.append(Attached(event["start"], event["stop"], event["t_s"]))
    trace.steps = _steps(events, first_token_s)
    trace.loads = _loads(events, trace.found_s)
    return trace


def _steps(events: list[dict[str, Any]], first_token_s: float) -> list[PrefillStep]:
    marks = [event for event in events if event["event"] in ("claim", "attach")]
    ends = [mark["t_s"] for mark in marks[1:]] + [first_token_s]
    return [
        PrefillStep(mark["start"], mark["stop"], mark["t_s"], end)
        for mark, end in zip(marks, ends, strict=True)
        if mark["event"] == "claim"
    ]


def _loads(events: list[dict[str, Any]], found_s: float) -> list[BlockLoad]:
    # Reads overlap to keep the link busy: the time of a block is that between two fetches.
    fetched = [event for event in events if event["event"] == "fetch"]
    begins = [found_s, *(event["t_s"] for event in fetched)]
    return [
        BlockLoad(event["block"], begin_s, event["t_s"])
        for event, begin_s in zip(fetched, begins, strict=False)
    ]
