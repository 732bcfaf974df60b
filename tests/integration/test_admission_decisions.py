"""What becomes of a request in a step: the decisions of `prefill_adder` as tables."""

from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_cake.core.token_span import Span
from sglang_cake.integration.scheduler.prefill_adder import (
    AS_SGLANG,
    OverlapLastStep,
    Park,
    Requeue,
    Run,
    Skip,
    decide_chunked,
    decide_waiting,
    stop_at,
)
from sglang_cake.loading.planner import StepPlan

REQ: Any = object()
SPAN = Span(0, 64)
WAIT = StepPlan(32, wait=True)
SKIP = Skip(AddReqResult.CONTINUE)


def never() -> Any:
    raise AssertionError("the decision does not depend on it")


@pytest.mark.parametrize(
    ("preemptor", "step", "span", "may_yield", "decision"),
    [
        (REQ, never, never, never, Requeue(REQ)),
        (None, None, never, never, AS_SGLANG),
        (None, StepPlan(48), never, never, Run(48)),
        (None, WAIT, SPAN, never, OverlapLastStep(SPAN)),
        (None, WAIT, None, True, Requeue(None)),
        (None, WAIT, None, False, Park()),
    ],
)
def test_decide_chunked_each_situation_gives_its_decision(
    preemptor: Any, step: Any, span: Any, may_yield: Any, decision: Any
) -> None:
    def given(value: Any) -> Any:
        return value if value is never else lambda: value

    found = decide_chunked(
        preemptor, plan=given(step), begin_overlap=given(span), may_yield=given(may_yield)
    )
    assert found == decision


@pytest.mark.parametrize(
    ("step", "span", "chunk_taken", "decision"),
    [
        (None, never, True, AS_SGLANG),
        (WAIT, SPAN, False, OverlapLastStep(SPAN)),
        (WAIT, None, False, SKIP),
        (StepPlan(48), never, False, Run(48)),
        (StepPlan(48), never, True, SKIP),  # it would be a second chunked request
        (StepPlan(100), never, True, Run(100)),
    ],
)
def test_decide_waiting_each_situation_gives_its_decision(
    step: Any, span: Any, chunk_taken: bool, decision: Any
) -> None:
    overlap = span if span is never else lambda: span
    found = decide_waiting(step, begin_overlap=overlap, prompt_tokens=100, chunk_taken=chunk_taken)
    assert found == decision


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [
        (None, AS_SGLANG, AS_SGLANG),
        (32, AS_SGLANG, Run(32)),
        (32, Run(48), Run(32)),
        (32, Run(16), Run(16)),
        (32, OverlapLastStep(SPAN), OverlapLastStep(SPAN)),
        (32, SKIP, SKIP),
        (32, Park(), Park()),
        (32, Requeue(REQ), Requeue(REQ)),
    ],
)
def test_stop_at_shortens_steps_alone(stop: int | None, before: Any, after: Any) -> None:
    assert stop_at(stop, before) == after
