"""Who may begin its last step early, and what becomes of a request that is not admitted then."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult
from test_coordinator import BLOCK
from test_standing_aside import Stand

from sglang_cake.core.spans import Span
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.scheduler.prefill_adder import CakePrefillAdder

EARLY = Span(0, 4 * BLOCK)
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


class FakeLastStep:
    """Says yes to all, and remembers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, req: Any, chunk_tokens: int) -> Span:
        self.calls.append("begin")
        return EARLY

    def keep(self, req: Any) -> torch.Tensor:
        self.calls.append("keep")
        return torch.arange(100, 100 + EARLY.tokens)

    def give_up(self, req: Any) -> None:
        self.calls.append("give up")


class Door:
    """A stored request that waits for its loads, and the admission of one step."""

    def __init__(self) -> None:
        self.stand = Stand("adaptive")
        self.req = self.stand.req("stored", stored=True)
        self.req.kv = SimpleNamespace(req_pool_idx=1)
        self.req.last_node, self.req.full_untruncated_fill_ids = None, self.req.origin_input_ids
        self.rows = torch.zeros(2, 100, dtype=torch.int32)
        self.last = FakeLastStep()
        self.admits = True
        tree: Any = CakeRadixCache.__new__(CakeRadixCache)
        tree.coordinator, tree.last_step = self.stand.desk.cake, self.last
        tree.req_to_token_pool = SimpleNamespace(write=self.rows.__setitem__)
        self.adder: Any = CakePrefillAdder.__new__(CakePrefillAdder)
        self.adder._scheduler, self.adder.tree_cache = self.stand.scheduler, tree
        self.adder.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.adder.rem_chunk_tokens, self.adder.chunked_req_limit = 64, None
        self.adder.can_run_list, self.adder._decodes = [], 0
        self.adder.new_chunked_req = None
        self.adder.memory_budget = SimpleNamespace(remaining_total=100_000)

    def close(self) -> None:
        self.stand.desk.cake.end_all()
        self.stand.desk.io.close()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    made = Door()

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
    monkeypatch.setattr(f"{_ADDER}._lock_node", lambda *args: _Nothing())
    yield made
    made.close()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def test_the_chunked_request_gets_the_slots_into_its_row(door: Door) -> None:
    assert door.adder.add_chunked_req(door.req) is None
    assert door.last.calls == ["begin", "keep"]
    assert door.rows[1, : EARLY.stop].tolist() == list(range(100, 100 + EARLY.tokens))
    assert door.adder.rem_chunk_tokens == 0  # nobody joins
    assert door.req.prefix_len == EARLY.stop


def test_a_request_from_the_queue_brings_them_along(door: Door) -> None:
    door.stand.queue.append(door.req)
    result = door.adder.add_one_req(door.req, False, None)
    assert result == AddReqResult.OTHER
    assert door.last.calls == ["begin", "keep"]
    assert door.adder.rem_chunk_tokens == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_who_is_not_admitted_is_as_it_was(door: Door, chunked: bool) -> None:
    door.admits = False
    if chunked:
        assert door.adder.add_chunked_req(door.req) is door.req
        assert door.req.extend_end == 0  # parked, as SGLang parks it
        assert door.adder.rem_chunk_tokens == 0
    else:
        assert door.adder.add_one_req(door.req, False, None) == AddReqResult.NO_TOKEN
    assert door.last.calls == ["begin", "give up"]
    assert door.req.prefix_len == 0


def another_waits(door: Door) -> None:
    door.stand.queue.append(door.stand.req("other", stored=True))


def another_generates(door: Door) -> None:
    door.adder.running_batch.reqs = [SimpleNamespace(finished=lambda: False)]


def another_is_in_the_step(door: Door) -> None:
    door.adder.can_run_list = [object()]


def decoding_is_mixed_in(door: Door) -> None:
    door.adder._decodes = 1


def it_is_not_to_be_had(door: Door) -> None:
    door.adder.tree_cache.last_step = None


@pytest.mark.parametrize(
    "reason",
    [
        another_waits,
        another_generates,
        another_is_in_the_step,
        decoding_is_mixed_in,
        it_is_not_to_be_had,
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
def test_who_is_not_alone_waits(door: Door, reason: Callable[[Door], None], chunked: bool) -> None:
    reason(door)
    if chunked:
        assert door.adder.add_chunked_req(door.req) is door.req
    else:
        assert door.adder.add_one_req(door.req, False, None) == AddReqResult.CONTINUE
    assert door.last.calls == []
    assert door.req.prefix_len == 0


def test_who_has_generated_all_is_nobody(door: Door) -> None:
    door.adder.running_batch.reqs = [SimpleNamespace(finished=lambda: True)]
    assert door.adder.add_chunked_req(door.req) is None


def test_beside_a_chunked_request_it_waits(door: Door) -> None:
    assert door.adder.add_one_req(door.req, True, None) == AddReqResult.CONTINUE
    assert door.last.calls == []


@pytest.mark.parametrize("finished", [False, True])
def test_a_step_that_ran_past_cake_joins_no_tree_and_gives_no_answer(
    door: Door, finished: bool
) -> None:
    restore = door.stand.desk.cake.restore("stored")
    assert restore is not None
    restore.overlap = SimpleNamespace(slots=None)  # type: ignore[assignment]
    tree, req, off = door.adder.tree_cache, door.req, []
    BOUNDARY.attach(SimpleNamespace(switch_off=lambda: off.append(True)), None)
    req.finished = lambda: finished
    req.finished_reason = req.to_finish = None
    tree.checkpoint(req, up_to=10)
    assert req.skip_radix_cache_insert
    assert isinstance(req.finished_reason if finished else req.to_finish, FINISH_ABORT)
    assert off  # SGLang runs steps that cake does not see
    restore.overlap = None


def test_the_prefix_of_a_new_row_is_what_the_tree_has_and_what_was_lent(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = torch.arange(8)
    monkeypatch.setattr(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefix_device_indices",
        lambda tree, req: matched[: req.prefix_len],
    )
    tree, restore = door.adder.tree_cache, door.stand.desk.cake.restore("stored")
    assert restore is not None
    door.req.prefix_len = 6
    assert tree.prefix_device_indices(door.req).tolist() == [0, 1, 2, 3, 4, 5]
    lent = SimpleNamespace(span=Span(4, 7), slots=torch.tensor([70, 71, 72]))
    restore.overlap, door.req.prefix_len = lent, 7  # type: ignore[assignment]
    assert tree.prefix_device_indices(door.req).tolist() == [0, 1, 2, 3, 70, 71, 72]
    assert door.req.prefix_len == 7
    restore.overlap = None
