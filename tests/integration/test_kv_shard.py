"""Each block of a shard is stored by one rank of a machine."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pools import deepseek_v4, hybrid, mha, mla
from sglang.srt.server_args import ServerArgs

from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import build
from sglang_cake.integration.build import machine_schedulers, shard_of
from sglang_cake.integration.memory.kv_shard import KvShard

SAME: list[float] = [0] * 4
MACHINES = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(machines=MACHINES, block=st.integers(0, 99))
def test_kv_shard_replicated_block_is_stored_once_on_each_machine_of_the_group(
    machines: list[float], block: int
) -> None:
    """Also where ranks of two machines take turns, as Ray may place them."""
    shards = [KvShard.of_rank(n, machines, replicated=True) for n in range(len(machines))]
    stored = [where for where, shard in zip(machines, shards, strict=True) if shard.stores(block)]
    assert sorted(stored) == sorted(set(machines))


@given(machines=MACHINES)
def test_kv_shard_replicated_ranks_of_any_group_size_have_one_namespace(
    machines: list[float],
) -> None:
    shards = [KvShard.of_rank(n, machines, replicated=True) for n in range(len(machines))]
    assert {(shard.index, shard.count) for shard in shards} == {(0, 1)}


def test_kv_shard_rank_with_heads_of_its_own_stores_all_of_its_blocks() -> None:
    shard = KvShard.of_rank(3, [0] * 8, replicated=False)
    assert (shard.index, shard.count) == (3, 8)
    assert all(shard.stores(block) for block in range(100))


@given(groups=st.integers(1, 64), size=st.integers(1, 64))
def test_kv_shard_head_groups_are_divided_among_the_ranks_in_order(groups: int, size: int) -> None:
    shards = [KvShard.of_rank(n, [0] * size, replicated=False) for n in range(size)]
    if groups % size:
        with pytest.raises(ConfigError, match=f"set {size}, or a multiple") as refused:
            shards[0].head_groups(groups)
        assert "\n" not in str(refused.value)
        return
    held = [group for shard in shards for group in shard.head_groups(groups) or ()]
    assert held == list(range(groups))
    assert shards[0].head_groups(None) is None


def test_kv_shard_of_all_heads_has_no_head_groups() -> None:
    shard = KvShard.of_rank(1, [0, 0], replicated=True)
    assert shard.head_groups(4) is None
    assert shard.head_groups(3) is None


latent_hybrid = partial(hybrid, use_mla=True, kv_lora_rank=16, qk_rope_head_dim=8)


def compressed(slots: int) -> Any:
    return deepseek_v4(256 * slots)


@pytest.mark.parametrize(
    ("pool", "drafts", "machines", "expected"),
    [
        (mha, [], SAME, KvShard(3, 4)),
        (hybrid, [], SAME, KvShard(3, 4)),
        (  # ranks divide its states
            latent_hybrid,
            [],
            SAME,
            KvShard(holder=3, holders=4, has_all_heads=True, end_rank=(3, 4)),
        ),
        (latent_hybrid, [mha], SAME, KvShard(3, 4)),
        (mla, [], SAME, KvShard(holder=3, holders=4, has_all_heads=True)),
        (mla, [mla], SAME, KvShard(holder=3, holders=4, has_all_heads=True)),
        (compressed, [], SAME, KvShard(holder=3, holders=4, has_all_heads=True)),
        (mla, [mha], SAME, KvShard(3, 4)),  # each rank has heads of the draft model
        (mla, [], [0, 0, 1, 1], KvShard(holder=1, holders=2, has_all_heads=True)),
        (mla, [], [0, 1, 2, 3], KvShard(has_all_heads=True)),
    ],
)
def test_kv_shard_of_a_process_follows_its_pool_and_attention_rank(
    pool: Any,
    drafts: list[Any],
    machines: list[float],
    expected: KvShard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of four ranks of an attention group."""
    parallel = SimpleNamespace(attn_tp_rank=3)
    monkeypatch.setattr(build, "get_parallel", lambda: parallel)
    allocator = SimpleNamespace(get_kvcache=lambda: pool(4))
    ctx: Any = SimpleNamespace(params=SimpleNamespace(token_to_kv_pool_allocator=allocator))
    assert shard_of(ctx, machines, [draft(4) for draft in drafts]) == expected


@pytest.mark.parametrize(
    ("tp_size", "dp_ranks", "attention_groups", "nnodes", "expected"),
    [
        (1, 1, 1, 1, 1),
        (8, 1, 1, 1, 8),
        (2, 3, 1, 1, 6),  # replicas of the model
        (8, 4, 4, 1, 8),  # attention groups inside of the eight ranks
        (16, 1, 1, 2, 8),
        (1, 1, 1, 2, 1),
    ],
)
def test_machine_schedulers_are_the_ranks_of_all_replicas_on_a_machine(
    tp_size: int,
    dp_ranks: int,
    attention_groups: int,
    nnodes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parallel = SimpleNamespace(num_dp_ranks=dp_ranks, attn_dp_size=attention_groups)
    monkeypatch.setattr(build, "get_parallel", lambda: parallel)
    ctx: Any = SimpleNamespace(
        server_args=ServerArgs(model_path="m", nnodes=nnodes), tp_size=tp_size
    )
    assert machine_schedulers(ctx) == expected
