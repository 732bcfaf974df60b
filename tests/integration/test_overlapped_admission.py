"""Which request may begin an overlapped last step, and the request if it is not admitted."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from adder_harness import BareTree, prefill_adder
from coordinator_harness import BLOCK
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult
from test_requeueing import ChunkedAdmission

from sglang_cake.core.keys import Span
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.scheduler.coordinator import Coordinator

EARLY = Span(0, 4 * BLOCK)
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


class FakeOverlappedStep:
    """Begins every step that it is asked for, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.overlapped: Any = None

    def step_of(self, req: Any) -> Any:
        return self.overlapped

    def begin(self, req: Any, chunk_tokens: int) -> Span:
        self.calls.append("begin")
        return EARLY

    def confirm(self, req: Any) -> torch.Tensor:
        self.calls.append("confirm")
        return torch.arange(100, 100 + EARLY.tokens)

    def give_up(self, req: Any) -> None:
        self.calls.append("give up")


class OverlapAdmission:
    """A stored request that waits for its loads, and the admission of one step."""

    def __init__(self) -> None:
        self.chunked = ChunkedAdmission("adaptive")
        self.req = self.chunked.req("stored", stored=True)
        self.req.kv = SimpleNamespace(req_pool_idx=1)
        self.req.last_node = None
        self.req.full_untruncated_fill_ids = self.req.origin_input_ids
        self.rows = torch.zeros(2, 100, dtype=torch.int32)
        self.step = FakeOverlappedStep()
        self.admits = True
        self.tree: Any = BareTree(self.coordinator)
        self.tree.overlap_runner = self.step
        self.tree.req_to_token_pool = SimpleNamespace(write=self.rows.__setitem__)
        self.adder = prefill_adder(self.chunked.scheduler, self.tree, chunk_tokens=64)

    @property
    def coordinator(self) -> Coordinator:
        return self.chunked.base.coordinator

    def close(self) -> None:
        self.coordinator.release_all()
        self.chunked.base.close()


@pytest.fixture
def admission(monkeypatch: pytest.MonkeyPatch) -> Iterator[OverlapAdmission]:
    made = OverlapAdmission()

    def admit(adder: Any, req: Any) -> None:
        assert req.prefix_len == EARLY.stop
        if made.admits:
            req.extend_end = len(req.full_untruncated_fill_ids)
            adder.can_run_list.append(req)

    def add_chunked_req(adder: Any, req: Any) -> Any:
        admit(adder, req)
        return None if made.admits else req

    def add_one_req(adder: Any, req: Any, has_chunked: bool, align: Any) -> AddReqResult:
        admit(adder, req)
        return AddReqResult.CONTINUE if made.admits else AddReqResult.NO_TOKEN

    monkeypatch.setattr(f"{_ADDER}.add_chunked_req", add_chunked_req)
    monkeypatch.setattr(f"{_ADDER}.add_one_req", add_one_req)
    monkeypatch.setattr(f"{_ADDER}._lock_node", lambda *args: contextlib.nullcontext())
    yield made
    made.close()


def test_early_admission_chunked_request_gets_the_slots_into_its_row(
    admission: OverlapAdmission,
) -> None:
    assert admission.adder.add_chunked_req(admission.req) is None
    assert admission.step.calls == ["begin", "confirm"]
    assert admission.rows[1, : EARLY.stop].tolist() == list(range(100, 100 + EARLY.tokens))
    assert admission.adder.rem_chunk_tokens == 0  # nobody joins
    assert admission.req.prefix_len == EARLY.stop


def test_early_admission_queued_request_is_admitted_alone(admission: OverlapAdmission) -> None:
    admission.chunked.queue.append(admission.req)
    result = admission.adder.add_one_req(admission.req, False, None)
    assert result == AddReqResult.OTHER
    assert admission.step.calls == ["begin", "confirm"]
    assert admission.adder.rem_chunk_tokens == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_early_admission_rejected_request_is_unchanged(
    admission: OverlapAdmission, chunked: bool
) -> None:
    admission.admits = False
    if chunked:
        assert admission.adder.add_chunked_req(admission.req) is admission.req
        assert admission.req.extend_end == 0  # parked, as SGLang parks it
        assert admission.adder.rem_chunk_tokens == 0
    else:
        assert admission.adder.add_one_req(admission.req, False, None) == AddReqResult.NO_TOKEN
    assert admission.step.calls == ["begin", "give up"]
    assert admission.req.prefix_len == 0


def another_waits(admission: OverlapAdmission) -> None:
    admission.chunked.queue.append(admission.chunked.req("other", stored=True))


def another_generates(admission: OverlapAdmission) -> None:
    admission.adder.running_batch.reqs = [SimpleNamespace(finished=lambda: False)]


def another_is_in_the_step(admission: OverlapAdmission) -> None:
    admission.adder.can_run_list = [object()]


def decoding_is_mixed_in(admission: OverlapAdmission) -> None:
    decoding = SimpleNamespace(
        finished=lambda: True,
        output_ids=[],
        sampling_params=SimpleNamespace(ignore_eos=False, max_new_tokens=1),
    )
    admission.chunked.scheduler.is_mixed_chunk = True
    admission.adder = prefill_adder(
        admission.chunked.scheduler, admission.tree, chunk_tokens=64, running=[decoding]
    )


def it_is_not_to_be_had(admission: OverlapAdmission) -> None:
    admission.tree.overlap_runner = None


def it_is_a_beam_search(admission: OverlapAdmission) -> None:
    admission.req.beam_group = SimpleNamespace(beam_width=4)


@pytest.mark.parametrize(
    "reason",
    [
        another_waits,
        another_generates,
        another_is_in_the_step,
        decoding_is_mixed_in,
        it_is_not_to_be_had,
        it_is_a_beam_search,
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
def test_early_admission_request_that_is_not_alone_or_has_beams_is_not_begun(
    admission: OverlapAdmission, reason: Callable[[OverlapAdmission], None], chunked: bool
) -> None:
    reason(admission)
    if chunked:
        assert admission.adder.add_chunked_req(admission.req) is admission.req
    else:
        assert admission.adder.add_one_req(admission.req, False, None) == AddReqResult.CONTINUE
    assert admission.step.calls == []
    assert admission.req.prefix_len == 0


def test_early_admission_finished_running_request_does_not_count(
    admission: OverlapAdmission,
) -> None:
    admission.adder.running_batch.reqs = [SimpleNamespace(finished=lambda: True)]
    assert admission.adder.add_chunked_req(admission.req) is None


def test_early_admission_beside_a_chunked_request_is_not_begun(admission: OverlapAdmission) -> None:
    assert admission.adder.add_one_req(admission.req, True, None) == AddReqResult.CONTINUE
    assert admission.step.calls == []


@pytest.mark.parametrize("waits", [True, False])
def test_admission_no_running_request_is_preempted_for_one_that_waits_for_loads(
    admission: OverlapAdmission, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(f"{_ADDER}.preempt_to_schedule", lambda adder, req: True)
    if not waits:
        admission.coordinator.release(admission.req.rid)
    assert admission.adder.preempt_to_schedule(admission.req) == (not waits)


def test_admission_of_a_skipped_request_takes_its_matched_state_back(
    admission: OverlapAdmission,
) -> None:
    """SGLang does so for requests that it refuses; a skipped one is none for it."""
    freed: list[torch.Tensor] = []
    admission.tree.supports_mamba = lambda: True
    admission.tree.req_to_token_pool.mamba_allocator = SimpleNamespace(free=freed.append)
    kv = admission.req.kv = SimpleNamespace(
        holds_mamba=True,
        mamba_pool_idx=torch.tensor(3),
        mamba_cow_src_index=torch.tensor([5]),
        mamba_needs_clear=False,
    )
    assert admission.adder.add_one_req(admission.req, True, None) == AddReqResult.CONTINUE
    assert kv.mamba_cow_src_index is None
    assert kv.mamba_pool_idx is None
    assert [slots.tolist() for slots in freed] == [[3]]


@pytest.mark.parametrize("finished", [False, True])
def test_early_admission_unhooked_step_aborts_the_request_and_switches_off(
    admission: OverlapAdmission, finished: bool
) -> None:
    admission.step.overlapped = SimpleNamespace(slots=None)
    tree, req, off = admission.tree, admission.req, []
    BOUNDARY.set_handler(SimpleNamespace(switch_off=lambda: off.append(True)), None)
    req.finished = lambda: finished
    req.finished_reason = req.to_finish = None
    tree.checkpoint(req, up_to=10)
    assert req.skip_radix_cache_insert
    assert isinstance(req.finished_reason if finished else req.to_finish, FINISH_ABORT)
    assert off  # SGLang runs steps that cake does not see


def test_cake_radix_cache_prefix_indices_include_the_lent_slots(
    admission: OverlapAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = torch.arange(8)
    monkeypatch.setattr(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefix_device_indices",
        lambda tree, req: matched[: req.prefix_len],
    )
    tree = admission.tree
    admission.req.prefix_len = 6
    assert tree.prefix_device_indices(admission.req).tolist() == [0, 1, 2, 3, 4, 5]
    admission.step.overlapped = SimpleNamespace(span=Span(4, 7), slots=torch.tensor([70, 71, 72]))
    admission.req.prefix_len = 7
    assert tree.prefix_device_indices(admission.req).tolist() == [0, 1, 2, 3, 70, 71, 72]
    assert admission.req.prefix_len == 7
