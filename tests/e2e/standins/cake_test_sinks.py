"""Attention with sinks in plain torch, for gpt-oss and MiMo V2.

A plugin of SGLang, used only by tests, with CAKE_TEST_SINKS set. `torch_native`, the attention
backend of SGLang 0.5.23 that needs no kernels, has no sinks, so gpt-oss refuses it (see
`cake_test_any_backend`). A sink takes its share of a head's softmax, and has no value. Layers with
full attention may have none.
"""

import os
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    if "CAKE_TEST_SINKS" not in os.environ:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("extend", "decode"):
        forward = getattr(TorchNativeAttnBackend, f"forward_{name}")
        attend = getattr(TorchNativeAttnBackend, f"_run_sdpa_forward_{name}")
        setattr(TorchNativeAttnBackend, f"forward_{name}", _with_sinks(forward))
        setattr(TorchNativeAttnBackend, f"_run_sdpa_forward_{name}", _sunk(attend))


def _with_sinks(forward: Any) -> Any:
    def forward_with_sinks(backend: Any, *args: Any, sinks: Tensor | None, **kwargs: Any) -> Any:
        backend.sinks = sinks
        return forward(backend, *args, **kwargs)

    return forward_with_sinks


def _sunk(attend: Any) -> Any:
    """As `attend`, which computes a step of all requests, with sinks."""

    def attend_with_sinks(
        backend: Any,
        query: Tensor,
        output: Tensor,
        keys: Tensor,
        values: Tensor,
        req_to_token: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        *lens: Tensor | None,
        scaling: float,
        sliding_window_size: int | None,
        **_: Any,
    ) -> Tensor:
        is_extend = len(lens) == 3  # prefixes, new tokens, those of an encoder
        counts = lens[1].tolist() if is_extend else [1] * len(seq_lens)  # type: ignore[union-attr]
        start = 0
        for row, total, count in zip(rows.tolist(), seq_lens.tolist(), counts, strict=True):
            slots = req_to_token[row, :total].long()
            span = slice(start, start + count)
            groups = query.shape[1] // keys.shape[1]
            k, v = (kv[slots].repeat_interleave(groups, dim=1) for kv in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[span], k) * scaling
            seen = torch.arange(total)[None] - torch.arange(total - count, total)[:, None]
            hidden = seen > 0
            if sliding_window_size is not None:
                hidden |= seen < -sliding_window_size
            scores = scores.masked_fill(hidden, float("-inf"))
            if backend.sinks is not None:
                sinks = backend.sinks.float()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., :total]
            output[span] = torch.einsum("hqk,khd->qhd", weights, v)
            start += count
        return output

    return attend_with_sinks
