"""Patch 0003: the chunk attention gives the numbers of the released code."""

from types import SimpleNamespace
from typing import Any, Optional

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sglang_copy import Copies, cut_out  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

BACKEND = "sglang/srt/layers/attention/torch_native_backend.py"
METHODS = {"_run_sdpa_forward_extend", "_make_sliding_window_mask", "_causal_lower_right"}


class Counting:
    """`scaled_dot_product_attention`, keeping the query length of every call."""

    def __init__(self) -> None:
        self.query_lens: list[int] = []

    def __call__(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.query_lens.append(query.shape[-2])
        return torch.nn.functional.scaled_dot_product_attention(query, *args, **kwargs)


@pytest.fixture(scope="session")
def backends(copies: Copies) -> SimpleNamespace:
    def load(source: bytes) -> SimpleNamespace:
        sdpa = Counting()
        names = {"torch": torch, "Optional": Optional, "scaled_dot_product_attention": sdpa}
        methods = cut_out(source, METHODS, names)
        methods.sdpa = sdpa
        return methods

    return SimpleNamespace(
        released=load(copies.released[BACKEND]), repaired=load(copies.repaired[BACKEND])
    )


def run_both(backends: SimpleNamespace, spans: list[tuple[int, int]], **options: Any) -> Any:
    """Both outputs for requests of (prefix, new) tokens, whose KV lies in shuffled slots."""
    generator = torch.Generator().manual_seed(options.pop("seed", 0))
    heads, kv_heads = options.pop("heads", 4), options.pop("kv_heads", 2)
    dim, v_dim = options.pop("dim", 16), options.pop("v_dim", 16)
    dtype = options.pop("dtype", torch.float32)
    encoder = options.pop("encoder", 0)
    seq_lens = torch.tensor([prefix + new for prefix, new in spans])
    width = int(seq_lens.max()) + encoder
    slots = torch.randperm(len(spans) * width + 7, generator=generator)
    query = torch.randn(sum(new for _, new in spans), heads, dim, generator=generator).to(dtype)
    keys = torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype)
    values = torch.randn(len(slots), kv_heads, v_dim, generator=generator).to(dtype)
    outputs = []
    for backend in (backends.released, backends.repaired):
        backend.sdpa.query_lens.clear()
        outputs.append(
            backend._run_sdpa_forward_extend(
                backend,
                query,
                torch.full((query.shape[0], heads, v_dim), float("nan"), dtype=dtype),
                keys,
                values,
                slots[: len(spans) * width].view(len(spans), width),
                torch.arange(len(spans)).flip(0),
                seq_lens,
                torch.tensor([prefix for prefix, _ in spans]),
                torch.tensor([new for _, new in spans]),
                torch.full((len(spans),), encoder) if encoder else None,
                enable_gqa=heads != kv_heads,
                **{"causal": True, **options},
            )
        )
    return outputs


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    spans=SPANS,
    kv_heads=st.sampled_from([1, 2, 4]),
    scaling=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 999),
)
def test_patch_attention_random_batches_equal_the_released_code(
    backends: SimpleNamespace,
    spans: list[tuple[int, int]],
    kv_heads: int,
    scaling: float | None,
    seed: int,
) -> None:
    released, repaired = run_both(backends, spans, kv_heads=kv_heads, scaling=scaling, seed=seed)
    torch.testing.assert_close(repaired, released, atol=1e-5, rtol=0)


# Around the kernel's blocks of 32 and 256 queries and 512 keys, and one token of a mixed batch.
@pytest.mark.parametrize("new", [1, 32, 33, 255, 256, 257, 600])
@pytest.mark.parametrize("prefix", [0, 1, 300, 513])
def test_patch_attention_sizes_around_kernel_blocks_equal_the_released_code(
    backends: SimpleNamespace, prefix: int, new: int
) -> None:
    released, repaired = run_both(backends, [(prefix, new), (5, 3)])
    torch.testing.assert_close(repaired, released, atol=1e-5, rtol=0)


def test_patch_attention_values_narrower_than_keys_equal_the_released_code(
    backends: SimpleNamespace,
) -> None:
    released, repaired = run_both(backends, [(30, 20)], dim=24, v_dim=16)
    torch.testing.assert_close(repaired, released, atol=1e-5, rtol=0)


def test_patch_attention_bfloat16_equals_the_released_code_to_its_precision(
    backends: SimpleNamespace,
) -> None:
    released, repaired = run_both(backends, [(300, 260)], dtype=torch.bfloat16)
    torch.testing.assert_close(repaired, released, atol=2e-2, rtol=2e-2)


def test_patch_attention_request_without_new_tokens_is_skipped(backends: SimpleNamespace) -> None:
    released, repaired = run_both(backends, [(9, 0), (4, 3)])
    torch.testing.assert_close(repaired, released, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window_size": 7},
        {"causal": False, "encoder": 11, "is_cross_attn": True},
        {"encoder": 11},
    ],
)
def test_patch_attention_other_kinds_take_the_released_path(
    backends: SimpleNamespace, options: dict[str, Any]
) -> None:
    spans = [(11, 0)] if options.get("is_cross_attn") else [(20, 10), (0, 5)]
    released, repaired = run_both(backends, spans, **options)
    assert backends.repaired.sdpa.query_lens == backends.released.sdpa.query_lens
    assert torch.equal(repaired, released)


def test_patch_attention_chunk_without_prefix_makes_the_released_call(
    backends: SimpleNamespace,
) -> None:
    released, repaired = run_both(backends, [(0, 300)])
    assert backends.repaired.sdpa.query_lens == backends.released.sdpa.query_lens == [300]
    assert torch.equal(repaired, released)


class Pairs(TorchDispatchMode):
    """Counts the (query, key) pairs of every call of the CPU kernel, per head of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key = args[:2]
            self.calls.append((query.shape[1] * query.shape[2], key.shape[2]))
        return func(*args, **(kwargs or {}))


def test_patch_attention_query_count_is_that_of_the_chunk(backends: SimpleNamespace) -> None:
    with Pairs() as seen:
        run_both(backends, [(900, 300)], heads=4, kv_heads=2)
    released, *repaired = seen.calls
    assert released == (4 * 1200, 1200)
    assert repaired == [(4 * 300, 900), (4 * 300, 300)]


def test_patch_attention_control_shifted_mask_changes_the_output(backends: SimpleNamespace) -> None:
    """Negative control: the inputs tell a shifted mask from the right one."""
    right, _ = run_both(backends, [(20, 10)])
    shifted, _ = run_both(backends, [(20, 10)], sliding_window_size=28)
    assert (right - shifted).abs().max() > 1e-3
