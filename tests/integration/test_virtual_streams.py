"""Random streams of prompts that share a device and a failing store, in virtual time."""

import random
from dataclasses import replace
from typing import Any

import pytest
from failing_store import FailingStore

from sglang_cake.integration.request.prompt_record import LOOKUP_PATIENCE_S
from sglang_cake.integration.scheduler.prompt_loads import LOOKUP_PAUSE_S
from sglang_cake.loading.planner import Mode
from sglang_cake.testing.scheduler_loop import PromptRun, prompt
from sglang_cake.testing.virtual_gpu import LLAMA_70B, virtual_scheduler


class Stream:
    """Attributes: last_step_s: the time of a whole step at the end of the longest prompt."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._model = replace(LLAMA_70B, chunk_tokens=draw.choice([1024, 2048, 8192]))
        self._link_bytes_per_s = draw.choice([5e8, 1e9, 2e9, 4e9, 8e9])
        self._overlap = draw.random() < 0.6
        self._known = draw.random() < 0.8
        begin_s = draw.random()
        self._pause_s = begin_s, begin_s + draw.choice([0.1, 0.3, 1.0, 3.0])
        self._prompts = []  # when it arrives, its tokens, and whether it is stored
        at_s = 0.0
        for _ in range(draw.randint(2, 8)):
            self._prompts.append((at_s, draw.randrange(2000, 30000), draw.random() < 0.7))
            at_s += draw.uniform(0.0, 0.3)
        longest = max(tokens for _, tokens, _ in self._prompts)
        begin = max(0, longest - self._model.chunk_tokens)
        self.last_step_s = self._model.prefill.step_s(begin, longest)

    def serve(self, mode: Mode, fault: str) -> list[PromptRun]:
        with virtual_scheduler(
            self._model,
            link_bytes_per_s=self._link_bytes_per_s,
            mode=mode,
            overlap=self._overlap,
            store=FailingStore,
        ) as loop:
            if self._known:
                loop.knows_costs()
            arrivals = []
            for number, (at_s, tokens, stored) in enumerate(self._prompts):
                req = prompt(number, tokens)
                if stored:
                    loop.store.keys |= set(loop.keys(req.origin_input_ids))
                arrivals.append((at_s, req))
            loop.store.fault = fault
            begin_s, end_s = self._pause_s
            loop.store.pause_s = loop.io.now_s + begin_s, loop.io.now_s + end_s
            return loop.serve(arrivals)


@pytest.mark.parametrize(
    ("fault", "seeds"),
    [
        ("", range(40, 60)),
        ("silent", range(20)),
        ("paused", range(20)),
        ("lost", range(20)),
    ],
)
def test_virtual_stream_makes_no_prompt_much_later_than_computing(fault: str, seeds: range) -> None:
    for seed in seeds:
        stream = Stream(seed)
        runs = zip(stream.serve("auto", fault), stream.serve("compute", fault), strict=True)
        for auto, computed in runs:
            assert auto.ttft_s <= 1.02 * computed.ttft_s + 2 * stream.last_step_s, seed


def test_virtual_stream_prompts_behind_the_first_are_loaded_after_a_pause_of_the_store() -> None:
    model = replace(LLAMA_70B, chunk_tokens=2048)
    with virtual_scheduler(model, link_bytes_per_s=4e9, store=FailingStore) as loop:
        loop.knows_costs()
        prompts = [prompt(number, 16384) for number in range(8)]
        for req in prompts:
            loop.store.keys |= set(loop.keys(req.origin_input_ids))
        loop.store.fault = "paused"
        loop.store.pause_s = loop.io.now_s, loop.io.now_s + 0.5
        _, *behind = loop.serve([(0.0, req) for req in prompts])
        assert sum(run.report["loaded_tokens"] for run in behind) > 0.6 * 7 * 16384


def test_virtual_stream_only_the_first_prompt_waits_for_lookups_that_hang() -> None:
    with virtual_scheduler(LLAMA_70B, link_bytes_per_s=4e9, store=FailingStore) as loop:
        loop.store.lookups_hang = True
        first, *others = [loop.serve([(0.0, prompt(n, 2048))])[0].ttft_s for n in range(4)]
        assert max(others) < first - 0.9 * LOOKUP_PATIENCE_S
        loop.store.lookups_hang = False
        for number in 8, 9:  # the first of them is not waited for, and says that all is well again
            req = prompt(number, 16384)
            loop.store.keys |= set(loop.keys(req.origin_input_ids))
            [run] = loop.serve([(0.0, req)])
        assert run.report["meet_token"] < 8192 < run.report["loaded_tokens"]


def test_virtual_stream_prompts_of_one_step_are_loaded_again_after_lookups_were_late() -> None:
    """Each is prefilled before its lookup is answered, unless it waits."""
    with virtual_scheduler(LLAMA_70B, link_bytes_per_s=40e9, store=FailingStore) as loop:
        loop.knows_costs()
        loop.store.lookups_hang = True
        loop.serve([(0.0, prompt(0, 4096))])
        loop.store.lookups_hang = False
        runs = []
        for number, pause_s in (1, 0.1), (2, LOOKUP_PAUSE_S), (3, 0.1):
            req = prompt(number, 4096)
            loop.store.keys |= set(loop.keys(req.origin_input_ids))
            runs += loop.serve([(pause_s, req)])
        assert [run.report["loaded_tokens"] > 0 for run in runs] == [False, True, True]


def test_virtual_stream_prompts_lose_slack_only_while_one_is_prefilled_or_held_back() -> None:
    with virtual_scheduler(LLAMA_70B, link_bytes_per_s=4e9, store=FailingStore) as loop:
        loop.knows_costs()
        coordinator = loop.coordinator
        reqs: list[Any] = [prompt(number, 16384) for number in range(2)]
        for req in reqs:
            loop.store.keys |= set(loop.keys(req.origin_input_ids))
            coordinator.arrive(req, lambda tokens, limit: 0)

        def slack_s() -> float:
            """Of the second prompt, of which no block has landed yet."""
            loop.io.until(loop.io.now_s + 0.01)
            coordinator.poll([req.rid for req in reqs])
            return coordinator.queue_entry(reqs[1]).slack_s

        slack_s()  # its lookup is under way
        first_computed_s = LLAMA_70B.prefill.span_s(0, 16384, LLAMA_70B.chunk_tokens)
        assert slack_s() == pytest.approx(first_computed_s)
        assert slack_s() == pytest.approx(first_computed_s)
        coordinator.held_back()
        assert slack_s() == pytest.approx(first_computed_s - 0.01)
