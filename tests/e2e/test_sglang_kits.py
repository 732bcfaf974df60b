"""SGLang's own test kits, against a server with cake, and against one without it.

Left out, because they need what a random model on a CPU does not have: accuracy (gsm8k, mmmu,
decode correctness, reasoning), constrained decoding that means something, speculative decoding,
PD, VLM and streaming sessions (cake refuses these four), timeouts of a server started for them.
"""

import functools
import json
import random
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, Start
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin

FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "12000"),
    *("--enable-metrics", "--enable-cache-report"),
)


@pytest.fixture(scope="module", params=["cake", pytest.param("stock", marks=pytest.mark.breadth)])
def served(request: pytest.FixtureRequest, start: Start, models: dict[str, Path]) -> Iterator[Live]:
    """With our class, and with SGLang's own."""
    if request.param == "cake":
        yield request.getfixturevalue("racing")
    else:
        with start(models["first"], FLAGS) as live:
            yield live


class _Case:
    """What the kits find in their surroundings. A `TestCase` would get no parameters of pytest."""

    base_url: str
    model: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("assert"):
            return getattr(unittest.TestCase(), name)
        raise AttributeError(name)

    @pytest.fixture(autouse=True)
    def surroundings(self, served: Live, models: dict[str, Path]) -> None:
        self.base_url, self.model = served.url, str(models["first"])
        self.process = served.server.process


class TestApiContract(BasicAPIContractMixin, _Case):
    pass


class TestAbortAll(AbortAllMixin, _Case):
    abort_all_num_requests = 8
    abort_all_max_new_tokens = 4000
    abort_all_sleep = 2  # in which all have arrived, also on a busy machine


class TestPauseAndResume(PauseResumeInPlaceMixin, _Case):
    pause_num_requests = 3
    pause_max_new_tokens = 500  # seconds more than pass until the pause
    pause_duration = 1
    pause_ignore_eos = True


class TestRadixTree(UnifiedRadixTreeTestMixin, _Case):
    kl_threshold = 1e-6  # the kit's own 0.003 would not notice wrong KV in a random model
    max_new_tokens = 6
    num_groups = 2
    branches_per_group = 2
    prefix_len = 384
    input_ids = tuple(random.Random(i).choices(range(1, 30000), k=448) for i in range(2))
    test_gsm8k = None  # needs a model that can calculate


def test_sglang_kit_random_radix_tree_passes(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(1)
    small = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=12, chunk_len=48)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", small)
    radix_cache_server_kit.run_radix_attention_test(served.url)


def test_sglang_kit_multiturn_cache_hits_pass(
    served: Live, models: dict[str, Path], tmp_path: Path
) -> None:
    words = " ".join(str(i) for i in range(800))
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": words}]
    dataset = tmp_path / "sharegpt.json"
    dataset.write_text(json.dumps([{"id": str(i), "conversations": turns} for i in range(8)]))
    run_multiturn_cache_hit_test(
        served.url,
        str(models["first"]),
        num_clients=2,
        num_rounds=3,
        request_length=160,
        output_length=8,
        dataset_path=str(dataset),
    )
