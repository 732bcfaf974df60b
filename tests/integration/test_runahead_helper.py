"""What a helper refuses before it touches anything of its own."""

import contextlib
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_cake.core.counters import Counters
from sglang_cake.integration.runahead.runahead_helper import SpanRunner, forward_stream
from sglang_cake.runahead.chain_plan import ChainLimits
from sglang_cake.runahead.messages import HelpOffer, new_job

RANK, OWNER = 0, 1


class _Member:
    """Keeps what was refused."""

    rank = RANK

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def refuse(self, offer: HelpOffer, reason: str) -> None:
        assert offer.owner == OWNER
        self.reasons.append(reason)


class _Running:
    """A request of the running batch; it may have ended in the last step."""

    def __init__(self, *, over: bool) -> None:
        self._over = over

    def finished(self) -> bool:
        return self._over


def _scheduler(**changes: Any) -> Any:
    fields = {
        "waiting_queue": [],
        "chunked_req": None,
        "collect_inflight_reqs": lambda: {_Running(over=True)},
        "model_config": SimpleNamespace(vocab_size=1000),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(4, 512)),
        "weight_updater": SimpleNamespace(offload_tags=set()),
    }
    return SimpleNamespace(**fields | changes)


def _offer(tokens: int, token: int = 7) -> HelpOffer:
    bounds = (0, tokens, tokens + 64)
    return HelpOffer(
        new_job(), (RANK, OWNER), bounds, "00", None, None, array("i", [token] * tokens)
    )


@pytest.mark.parametrize(
    ("scheduler", "offer", "says"),
    [
        (_scheduler(waiting_queue=["a request"]), _offer(64), "busy"),
        (_scheduler(chunked_req="a request"), _offer(64), "busy"),
        (_scheduler(collect_inflight_reqs=lambda: {_Running(over=False)}), _offer(64), "busy"),
        (
            _scheduler(weight_updater=SimpleNamespace(offload_tags={"kv_cache"})),
            _offer(64),
            "memory is released",
        ),
        (_scheduler(), _offer(64, token=1000), "does not have"),
        (_scheduler(), _offer(512), "longer prompt"),
        (_scheduler(), _offer(320), "longer span"),
    ],
)
def test_span_runner_unservable_offer_is_refused(
    scheduler: Any, offer: HelpOffer, says: str
) -> None:
    member: Any = _Member()
    gate: Any = None
    runner = SpanRunner(member, gate, Counters(), ChainLimits(page_tokens=16, step_tokens=256))
    runner.serve(scheduler, offer)
    (reason,) = member.reasons
    assert says in reason


class _Stream:
    """Says what waits for what."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def wait_stream(self, other: "_Stream") -> None:
        self._said.append(f"{self.name} after {other.name}")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_forward_stream_with_overlap_orders_both_streams_around_computing(
    overlap: bool, fails: bool
) -> None:
    """The scheduler launches on another stream than the forward's, if it overlaps them."""
    said: list[str] = []

    @contextlib.contextmanager
    def current() -> Iterator[None]:
        said.append("to the forward's")
        yield

    scheduler: Any = SimpleNamespace(
        enable_overlap=overlap,
        forward_stream_ctx=current(),
        forward_stream=_Stream("forward", said),
        schedule_stream=_Stream("schedule", said),
    )
    with contextlib.suppress(MemoryError), forward_stream(scheduler):
        said.append("compute")
        if fails:
            raise MemoryError
    around = ["to the forward's", "forward after schedule", "compute", "schedule after forward"]
    assert said == (around if overlap else ["compute"])
