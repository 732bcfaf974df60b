"""The owner's forward, with a helper that says what the test wants and no model."""

import contextlib
import copy
import logging
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from polling import until
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_cake.core.counters import Counters
from sglang_cake.core.keys import Digest
from sglang_cake.demo.sglang_server import free_port
from sglang_cake.integration.boundary import OriginalFunction
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.kv_pool import Copy
from sglang_cake.integration.overlap.layer_gate import LayerGate
from sglang_cake.integration.runahead import runahead_scheduler
from sglang_cake.integration.runahead.runahead_scheduler import Runahead
from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import Meet
from sglang_cake.loading.planner import LoadProgress
from sglang_cake.runahead.chain_plan import ChainLimits, StoredTail
from sglang_cake.runahead.member import MemberSettings
from sglang_cake.runahead.messages import (
    Accept,
    Cancel,
    Failed,
    HelpOffer,
    LayerPart,
    Message,
    PeerGone,
    Refuse,
    new_job,
)
from sglang_cake.runahead.partition_table import WatchedTable
from sglang_cake.runahead.zeromq import LinkTimes, ZmqTransport

HELPER, OWNER = 0, 1
LAYERS, SPLIT, STOP = 3, 64, 128
PATIENT = LinkTimes(  # two slow cores may not run a thread for seconds
    send_s=60.0, silence_s=60.0, connect_s=60.0, handshake_s=60.0
)


class Rows:
    layers, token_bytes = LAYERS, 8

    def read(self, *args: object) -> None:
        raise AssertionError("the owner sends nothing")

    def begin(self) -> None:
        pass

    def write(self, *args: object) -> Copy:
        return Copy()


class Helper:
    """Accepts; then does `then(transport, job)`."""

    def __init__(self, transport: ZmqTransport, then: Callable[[ZmqTransport, str], None]) -> None:
        self.cancelled = threading.Event()
        self.refused = threading.Event()  # an offer of its own
        self._transport, self._then = transport, then
        transport.start(self)

    def on_message(self, rank: int, message: Message) -> None:
        if isinstance(message, Cancel):
            self.cancelled.set()
        elif isinstance(message, Refuse):
            self.refused.set()
        elif isinstance(message, HelpOffer):
            self._transport.send(OWNER, Accept(message.job))
            self._then(self._transport, message.job)

    def on_part(self, *args: object) -> None:
        pass

    def on_gone(self, *args: object) -> None:
        pass


def send_nothing(transport: ZmqTransport, job: str) -> None:
    pass


def send_all(transport: ZmqTransport, job: str) -> None:
    data = memoryview(bytearray(SPLIT * Rows.token_bytes))
    with contextlib.suppress(PeerGone):  # the test is over
        for layer in range(LAYERS):
            transport.send_part(OWNER, LayerPart(job, layer, 0, SPLIT), data)


def fail_after_one_layer(transport: ZmqTransport, job: str) -> None:
    data = memoryview(bytearray(SPLIT * Rows.token_bytes))
    transport.send_part(OWNER, LayerPart(job, 0, 0, SPLIT), data)
    transport.send(OWNER, Failed(job, HELPER, "no memory"))


class Setup:
    """An owner whose one request is about to be shared."""

    def __init__(self, then: Callable[[ZmqTransport, str], None], **changes: Any) -> None:
        """Args: changes: of the settings of the owner as a member."""
        peers = [("127.0.0.1", free_port()) for _ in range(2)]
        namespace = Digest(bytes(32))
        self.transports = [
            ZmqTransport(rank, peers, secret=bytes(32), namespace=namespace, times=PATIENT)
            for rank in range(2)
        ]
        self.helper = Helper(self.transports[HELPER], then)
        self.gate = LayerGate(
            SimpleNamespace(register_layer_transfer_counter=lambda gate: None), LAYERS
        )
        self.counters = Counters()
        self.namespace: str | None = "00"
        self.records: dict[str, Any] = {}
        self.step_costs: Any = SimpleNamespace(
            agreed=PrefillCost(fixed_s=0.0, token_s=0.01, pair_s=0.0),
            measured=False,
            do_not_measure=lambda: None,
        )
        self.owner = Runahead(
            OWNER,
            self.transports[OWNER],
            Rows(),  # type: ignore[arg-type]
            self.gate,
            step_costs=self.step_costs,
            counters=self.counters,
            namespace=lambda: self.namespace,
            record_of=lambda req: self.records.get(req.rid),
            loads_only=False,
            least_tokens=0,
            limits=ChainLimits(page_tokens=16, step_tokens=SPLIT),
            table=WatchedTable(None),
            member_settings=MemberSettings(**{"answer_s": 60.0, **changes}),  # two slow cores
        )
        params = SimpleNamespace(custom_params={"cake_runahead": [SPLIT, STOP]})
        nothing = dict.fromkeys(
            ("lora_id", "input_embeds", "positional_embed_overrides", "multimodal_inputs")
        )
        never = dict.fromkeys(
            ("return_logprob", "return_hidden_states", "return_routed_experts"), False
        )
        self.req: Any = SimpleNamespace(
            rid="mine",
            prefix_len=0,
            full_untruncated_fill_ids=list(range(STOP)),
            origin_input_ids=list(range(STOP)),
            sampling_params=params,
            extra_key=None,
            cache_salt=None,
            session=None,
            beam_group=None,
            output_ids=[],
            return_indexer_topk=False,
            customized_info=None,
            skip_radix_cache_insert=False,
            discard_output_reason=None,
            **nothing,
            **never,
        )
        self.inbox: list[list[object]] = []  # what each look into the socket finds
        self.scheduler: Any = SimpleNamespace(
            chunked_req=None,
            waiting_queue=[],
            weight_updater=SimpleNamespace(offload_tags=set()),
            _pending_chunked_abort_req=None,
            _deferred_input_requests=[],
            request_receiver=SimpleNamespace(
                recv_requests=lambda: self.inbox.pop(0) if self.inbox else []
            ),
        )
        self.computed: list[tuple[int, int]] = []

    def agree(self) -> None:
        until(lambda: all(each.reachable() for each in self.transports), "the members meet")
        self.owner.poll(self.scheduler)
        while (verdict := self.owner.consider(self.req, alone=True)) == "wait":
            pass
        assert verdict == (STOP, SPLIT)

    def run(self) -> tuple[int, int]:
        """The step; what its last forward computed."""
        batch = SimpleNamespace(
            reqs=[self.req],
            forward_mode=SimpleNamespace(is_extend=lambda: True, is_mixed=lambda: False),
            prefix_lens=[0],
            extend_lens=[STOP],
            extend_num_tokens=STOP,
            extend_logprob_start_lens=None,
            input_ids=torch.arange(STOP),
            out_cache_loc=torch.arange(STOP),
            seq_lens=torch.tensor([STOP]),
            seq_lens_cpu=torch.tensor([STOP]),
        )
        model_runner = SimpleNamespace(forward=lambda part: self.compute(None, part))
        worker = SimpleNamespace(model_runner=model_runner)
        found: tuple[int, int] = self.owner.forward(OriginalFunction(self.compute), worker, batch)
        return found

    def compute(self, worker: object, part: Any) -> tuple[int, int]:
        span = (part.prefix_lens[0], part.prefix_lens[0] + part.extend_lens[0])
        for layer in range(LAYERS):
            self.gate.wait_until(layer)
        self.computed.append(span)
        return span

    def failures(self) -> dict[str, int]:
        counted = self.counters.snapshot()
        return {
            label: count
            for (name, label), count in counted.items()
            if name == "runahead_failures" and count
        }


@pytest.fixture
def setup() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(then: Callable[[ZmqTransport, str], None], **changes: Any) -> Setup:
        made.append(Setup(then, **changes))
        made[-1].agree()
        return made[-1]

    yield make
    for each in made:
        each.owner.close()
        each.transports[HELPER].close()


def test_runahead_scheduler_shared_step_computes_only_the_last_span(
    setup: Callable[..., Setup],
) -> None:
    one = setup(send_all)
    assert one.run() == (SPLIT, STOP)
    assert one.computed == [(SPLIT, STOP)]
    assert one.counters.snapshot()["helped_tokens", ""] == SPLIT
    assert one.failures() == {}


def test_runahead_scheduler_helper_failure_is_computed_in_the_same_step(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = threading.Event()

    def fail_when_shared(transport: ZmqTransport, job: str) -> None:
        def fail() -> None:
            assert shared.wait(60)
            fail_after_one_layer(transport, job)

        threading.Thread(target=fail, daemon=True).start()

    one = setup(fail_when_shared, left_out_s=(60.0, 120.0))
    shared.set()  # the owner has seen that the helper accepted
    plain_compute = one.compute
    activations: list[weakref.ref[torch.Tensor]] = []

    def compute(worker: object, part: Any) -> tuple[int, int]:
        assert not any(each() is not None for each in activations), "held while computing again"
        hidden = torch.empty(64)
        activations.append(weakref.ref(hidden))
        return plain_compute(worker, part)

    one.compute = compute  # type: ignore[method-assign]
    monkeypatch.setattr(ForwardBatch, "init_new", lambda part, *args, **kwargs: part)
    assert one.run() == (SPLIT, STOP)
    assert one.computed == [(0, SPLIT), (SPLIT, STOP)]  # in steps of what one forward computes
    assert one.failures() == {"broken": 1}
    assert one.owner.member.helpers() == ()  # left out
    assert one.req.discard_output_reason is None


def test_runahead_scheduler_refused_offer_is_not_logged_as_served(
    setup: Callable[..., Setup], caplog: pytest.LogCaptureFixture
) -> None:
    one = setup(send_all)
    assert one.run() == (SPLIT, STOP)
    one.scheduler.waiting_queue = ["a request"]  # of its own
    prompt = array("q", range(SPLIT))
    prompt = array("i", range(SPLIT))
    offer = HelpOffer(new_job(), (OWNER, HELPER), (0, SPLIT, STOP), "00", None, None, prompt)
    one.transports[HELPER].send(OWNER, offer)

    def is_refused() -> bool:
        one.owner.poll(one.scheduler)
        return one.helper.refused.is_set()

    with caplog.at_level(logging.INFO):
        until(is_refused, "an answer")
    assert "served member" not in caplog.text


@pytest.mark.parametrize("abort", [AbortReq(rid="mine"), AbortReq(abort_all=True)])
@pytest.mark.parametrize("chunked", [False, True])
def test_runahead_scheduler_abort_while_waiting_ends_the_step(
    setup: Callable[..., Setup], abort: AbortReq, chunked: bool
) -> None:
    one = setup(send_nothing)
    if chunked:  # the prompt goes on after this step
        one.scheduler.chunked_req = one.req
    one.inbox = [[], ["a request"], [AbortReq(rid="another"), abort, "a request behind it"]]
    assert one.run() == (STOP - 1, STOP)
    assert one.computed == [(STOP - 1, STOP)]  # the least: its output is dropped
    assert one.req.skip_radix_cache_insert
    assert one.req.discard_output_reason is not None
    assert one.scheduler._pending_chunked_abort_req is (one.req if chunked else None)
    kept = one.scheduler._deferred_input_requests  # for the scheduler, all of it, in order
    assert [kept[0], kept[2], kept[3]] == ["a request", abort, "a request behind it"]
    assert one.helper.cancelled.wait(60)
    assert one.failures() == {"aborted": 1}
    assert one.owner.member.helpers() == (HELPER,)  # nobody is to blame


def test_runahead_scheduler_abort_before_the_step_ends_it_though_kv_has_come(
    setup: Callable[..., Setup],
) -> None:
    one = setup(send_all)
    one.scheduler._deferred_input_requests.append(AbortReq(rid="mine"))  # heard before the step
    assert one.run() == (STOP - 1, STOP)
    assert one.failures() == {"aborted": 1}


def test_runahead_scheduler_abort_of_another_request_is_deferred(
    setup: Callable[..., Setup],
) -> None:
    one = setup(send_all)
    one.inbox = [[AbortReq(rid="another")]]
    assert one.run() == (SPLIT, STOP)
    assert [each.rid for each in one.scheduler._deferred_input_requests] == ["another"]
    assert one.req.discard_output_reason is None


@pytest.mark.parametrize("namespace", [None, "11"])
def test_runahead_scheduler_changed_weights_end_the_chain(
    setup: Callable[..., Setup], namespace: str | None
) -> None:
    one = setup(send_all)
    one.namespace = namespace  # while the request waits for its step
    assert one.owner.consider(one.req, alone=True) == "alone"
    assert one.helper.cancelled.wait(60)


@pytest.mark.parametrize("namespace", [None, "11"])
def test_runahead_scheduler_weights_changed_before_the_forward_are_not_mixed(
    setup: Callable[..., Setup], namespace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForwardBatch, "init_new", lambda part, *args, **kwargs: part)
    one = setup(send_all)
    one.namespace = namespace
    assert one.run() == (SPLIT, STOP)
    assert one.computed == [(0, SPLIT), (SPLIT, STOP)]  # in steps of what one forward computes
    assert one.counters.snapshot().get(("helped_tokens", ""), 0) == 0
    assert one.helper.cancelled.wait(60)


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("text", ["s" * 513, "\ud800"], ids=["long", "half a character"])
def test_runahead_scheduler_text_that_no_offer_can_carry_is_not_shared(
    setup: Callable[..., Setup], field: str, text: str
) -> None:
    one = setup(send_all)
    assert one.run() == (SPLIT, STOP)
    one.req.rid = "salted"
    setattr(one.req, field, text)
    assert one.owner.consider(one.req, alone=True) == "alone"
    assert one.owner.member.helpers() == (HELPER,)  # it was not asked


def test_runahead_scheduler_beam_search_is_not_shared(setup: Callable[..., Setup]) -> None:
    one = setup(send_all)
    assert one.run() == (SPLIT, STOP)
    one.req.rid = "beams"
    one.req.beam_group = SimpleNamespace(beam_width=4)
    assert one.owner.consider(one.req, alone=True) == "alone"
    assert one.owner.member.helpers() == (HELPER,)  # it was not asked


class CountedCost(PrefillCost):
    """Counts its predictions."""

    calls = 0

    def step_s(self, start: int, stop: int) -> float:
        CountedCost.calls += 1
        return PrefillCost.step_s(self, start, stop)


def test_runahead_scheduler_waiting_prompt_is_planned_again_only_after_a_change(
    setup: Callable[..., Setup],
) -> None:
    one = setup(send_all)
    one.run()
    one.req.rid, one.req.sampling_params.custom_params = "waiting", None
    one.step_costs.agreed = CountedCost(fixed_s=10.0, token_s=0.01, pair_s=0.0)  # no chain pays
    assert one.owner.consider(one.req, alone=True) == "alone"
    calls = CountedCost.calls
    assert calls > 0
    for _ in range(20):
        assert one.owner.consider(one.req, alone=True) == "alone"
    assert CountedCost.calls == calls
    one.step_costs.agreed = CountedCost(fixed_s=0.0, token_s=0.01, pair_s=0.0)
    assert one.owner.consider(one.req, alone=True) == "wait"


def test_runahead_scheduler_step_plans_few_of_the_prompts_that_wait_and_all_in_turn(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = setup(send_all)
    one.run()
    planned: list[int] = []
    step_number = 0

    def plan_beside_loader(tail: StoredTail, *args: object, **kwargs: object) -> None:
        planned.append(tail.view.prompt_tokens - STOP)

    monkeypatch.setattr(runahead_scheduler, "plan_beside_loader", plan_beside_loader)
    one.step_costs.costs_alone = lambda record: PromptCosts(
        one.step_costs.agreed,
        LoadCost(0.0, 1.0 + step_number),  # as measured, other ones in each step
    )
    reqs = []
    for number in range(12):
        req = copy.copy(one.req)
        tokens = STOP + number
        req.rid, req.sampling_params = f"r{number}", SimpleNamespace(custom_params=None)
        req.full_untruncated_fill_ids = req.origin_input_ids = list(range(tokens))
        meet = Meet(block_tokens=16, page_tokens=1, limit_tokens=tokens - 1, prompt_tokens=tokens)
        meet.found([True] * meet.block_count)
        one.records[req.rid] = SimpleNamespace(meet=meet, loading=True, progress=LoadProgress())
        reqs.append(req)

    def step(waiting: list[Any]) -> list[int]:
        nonlocal step_number
        step_number += 1
        planned.clear()
        one.owner.poll(one.scheduler)
        assert {one.owner.consider(req, alone=True) for req in waiting} == {"alone"}
        return sorted(planned)

    first_steps = [step(reqs) for _ in range(3)]
    assert first_steps[0] == [0, 1, 2, 3]
    assert max(map(len, first_steps)) == 5
    assert {number for numbers in first_steps for number in numbers} == {*range(12)}
    later_steps = [step(reqs) for _ in range(12)]
    assert all(len(numbers) == 1 for numbers in later_steps)
    assert {number for numbers in later_steps for number in numbers} == {*range(12)}
    step(reqs[:1])
    assert [step(reqs[:1]) for _ in range(3)] == [[0]] * 3  # one alone is planned in each step


def test_runahead_scheduler_handover_time_fades_once_for_a_prompt(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, clock = setup(send_all), time.monotonic
    one.step_costs.measured = True
    monkeypatch.setattr("time.monotonic", lambda: clock() + 3.0)  # a slow chain
    one.run()
    one.req.sampling_params.custom_params = None
    for number in range(200):
        one.req.rid = f"prompt {number}"
        if one.owner.consider(one.req, alone=True) == "wait":
            break
        for _ in range(60):
            assert one.owner.consider(one.req, alone=True) == "alone"
        one.owner.release(one.req.rid)
    assert 5 < number < 199  # in the end, a chain is tried again


def test_runahead_scheduler_own_faults_pause_its_asking(
    setup: Callable[..., Setup],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ForwardBatch, "init_new", lambda part, *args, **kwargs: part)

    def write(*args: object) -> Copy:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Rows, "write", write)
    one = setup(send_all, left_out_s=(60.0, 120.0))
    assert one.run() == (SPLIT, STOP)
    assert one.computed[0] == (0, SPLIT)
    assert one.failures() == {"broken": 1}
    assert one.owner.member.helpers() == ()
    assert "no member is asked for help" in caplog.text
    assert f"member {HELPER} is left out" not in caplog.text
    one.req.rid = "next"
    assert one.owner.consider(one.req, alone=True) == "alone"


def test_runahead_scheduler_step_that_is_not_admitted_is_no_fault_of_this_member(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = threading.Event()

    def send_when_agreed(transport: ZmqTransport, job: str) -> None:
        def send() -> None:
            assert agreed.wait(60)
            send_all(transport, job)

        threading.Thread(target=send, daemon=True).start()

    one = setup(send_when_agreed, left_out_s=(60.0, 120.0))
    agreed.set()
    one.owner.poll(one.scheduler)
    assert one.owner.consider(one.req, alone=True) == (STOP, SPLIT)  # SGLang lacks a row, say
    monkeypatch.setattr(runahead_scheduler, "BEGIN_S", 0.0)
    one.owner.poll(one.scheduler)
    assert one.owner.consider(one.req, alone=True) == "alone"
    assert one.helper.cancelled.wait(60)
    assert one.failures() == {"refused": 1}
    assert one.owner.member.helpers() == (HELPER,)


def test_runahead_scheduler_fault_in_the_own_gate_pauses_its_asking(
    setup: Callable[..., Setup],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ForwardBatch, "init_new", lambda part, *args, **kwargs: part)
    one = setup(send_all, left_out_s=(60.0, 120.0))

    def begin(*args: object) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(Rows, "begin", begin)
    assert one.run() == (SPLIT, STOP)
    assert "no member is asked for help" in caplog.text


def test_runahead_scheduler_idle_scheduler_sleeps_again_after_the_member_is_switched_off(
    setup: Callable[..., Setup],
) -> None:
    one = setup(send_nothing)
    poller = zmq.Poller()
    one.scheduler.idle_sleeper = SimpleNamespace(poller=poller)  # SGLang waits for it
    one.owner.poll(one.scheduler)
    one.transports[HELPER].send(OWNER, Cancel(new_job(), "of no job"))
    assert poller.poll(60_000)  # the message ends the sleep
    tree: Any = CakeRadixCache.__new__(CakeRadixCache)
    tree.saving = tree.coordinator = None
    tree.runahead = one.owner
    tree.switch_off()
    assert not poller.poll(0)
    one.owner.close()  # as when the process ends
    assert not poller.poll(0)


def test_runahead_scheduler_switched_off_member_leaves_the_group(
    setup: Callable[..., Setup],
) -> None:
    jobs: list[str] = []
    one = setup(lambda transport, job: jobs.append(job))
    until(lambda: jobs, "the helper has accepted")
    part, data = LayerPart(jobs[0], 0, 0, SPLIT), memoryview(bytes(SPLIT * Rows.token_bytes))
    waits = threading.Thread(target=one.owner.member.on_part, args=(HELPER, part, data))
    waits.start()  # for the step
    tree: Any = CakeRadixCache.__new__(CakeRadixCache)
    tree.saving = tree.coordinator = None
    tree.runahead = one.owner
    tree.switch_off()
    assert tree.runahead is None
    # The other one would ask it in vain.
    until(lambda: not one.transports[HELPER].reachable(), "it is gone")
    waits.join(60)
    assert not waits.is_alive()
