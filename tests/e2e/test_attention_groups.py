"""Attention data parallelism: two groups, each with requests of its own, with MLA and with GQA."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from live import BLOCK, Live, PendingRequest, Start, assert_same, check_wrong_kv_is_noticed

from benchmarks.harness.deepseek import build_deepseek
from sglang_cake.demo.models import write_model

Make = Callable[[int], list[int]]


def build_qwen3(path: Path) -> Path:
    """Write a random Qwen3 to `path`. A Llama of SGLang 0.5.23 divides attention among all ranks,
    also if there are groups."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return write_model(path, Qwen3ForCausalLM, config)


@dataclass(frozen=True, slots=True)
class Served:
    """A server of two groups.

    Attributes:
        bandwidth: a part of a prompt is to be loaded, and a part computed. A latent row is small.
        ranks: of the server.
        namespaces: of the store; one for all ranks of a group that hold the same KV.
    """

    build: Callable[[Path], Path]
    bandwidth: str
    ranks: int = 2
    namespaces: int = 1


SERVED = {
    "MLA": Served(partial(build_deepseek, hidden=256, layers=3, heads=4, latent=64), "600kB/s"),
    "GQA": Served(build_qwen3, "5MB/s"),
    # The two ranks of a group agree on what they load, and each has KV of its own heads.
    "GQA-4-ranks": Served(build_qwen3, "5MB/s", ranks=4, namespaces=2),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.breadth] * (name != "MLA")) for name in SERVED],
)
def groups(
    request: pytest.FixtureRequest, start: Start, folder: Path, standins: dict[str, str]
) -> Iterator[Live]:
    """Each group takes part in the steps of the other."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two groups need two cores")
    served, name = SERVED[request.param], f"groups-{request.param}"
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "8192", "--cake-mode", "load"),
        *("--tp", str(served.ranks), "--dp", "2", "--enable-dp-attention"),
    )
    # The ranks of a group are next to each other, and a group has a core.
    cores = "|".join(str(rank * 2 // served.ranks) for rank in range(served.ranks))
    env = {**standins, "SGLANG_CPU_OMP_THREADS_BIND": cores}
    model, store = served.build(folder / name / "model"), folder / f"store-{name}"
    with start(model, flags, store=store, bandwidth=served.bandwidth, env=env) as live:
        live.store.ranks = served.namespaces
        yield live


@pytest.fixture
def small_prompt(prompt: Make) -> Make:
    """Prompts of the tokens of that model."""
    return lambda n: [t % 512 for t in prompt(n)]


def test_dp_attention_groups_load_what_the_other_stored_at_the_same_time(
    groups: Live, small_prompt: Make
) -> None:
    documents = [small_prompt(12 * BLOCK + 5) for _ in range(2)]
    cold = [groups.ask(ids, routed_dp_rank=group) for group, ids in enumerate(documents)]
    assert [(answer.meta["dp_rank"], answer.loaded) for answer in cold] == [(0, 0), (1, 0)]
    assert groups.store is not None
    files = [file for ids in documents for file in groups.store.until_stored(ids)]
    assert len(files) == 2 * 12 * groups.store.ranks
    asked = [
        PendingRequest(groups, ids, routed_dp_rank=1 - group, rid=f"other-group-{group}")
        for group, ids in enumerate(documents)
    ]
    for asking, reference in zip(asked, cold, strict=True):
        warm = asking.answer()
        assert warm.meta["dp_rank"] != reference.meta["dp_rank"]
        assert warm.loaded > 0
        assert_same(warm, reference)
    check_wrong_kv_is_noticed(
        files, lambda: groups.ask_flushed(documents[0], routed_dp_rank=1), cold[0]
    )


def test_dp_attention_aborts_at_four_stages_beside_another_group_leave_a_clean_log(
    groups: Live, small_prompt: Make
) -> None:
    document, other = small_prompt(20 * BLOCK), small_prompt(20 * BLOCK)
    groups.ask_and_store(document, routed_dp_rank=0)
    reference = groups.ask(other, routed_dp_rank=0, cache_salt="never asked again")
    for event in ("arrive", "fetch", "claim", "attach"):
        groups.flush()
        asking = PendingRequest(
            groups, document, new_tokens=8, rid=f"group-{event}", routed_dp_rank=1
        )
        beside = PendingRequest(
            groups, other, rid=f"beside-{event}", routed_dp_rank=0, cache_salt=event
        )
        asking.until(event)
        groups.post("/abort_request", rid=asking.rid)
        asking.answer()
        assert_same(beside.answer(), reference)
        assert groups.events(asking.rid)  # each group writes the trace of its requests
    groups.flush()
    groups.check_log()
