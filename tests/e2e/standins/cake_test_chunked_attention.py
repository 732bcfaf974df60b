"""Chunked attention in plain torch, for Llama 4.

A plugin of SGLang, used only by tests, with CAKE_TEST_CHUNKED_ATTENTION set to the tokens of a
chunk. In `torch_native` of SGLang 0.5.23, a layer with chunks sees all tokens, also those that the
pool of its windows has no rows for any more. Here it sees those of its own chunk. Llama 4 relies on
kernels that rotate queries and keys in place, which a CPU does not have either.
"""

import os
from typing import Any

import torch


def register() -> None:
    if "CAKE_TEST_CHUNKED_ATTENTION" not in os.environ:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.models import llama4

    chunk_tokens = int(os.environ["CAKE_TEST_CHUNKED_ATTENTION"])
    build, get_rope = RadixAttention.__init__, llama4.get_rope

    def with_chunks(layer: Any, *args: Any, **kwargs: Any) -> None:
        build(layer, *args, **kwargs)
        if layer.use_irope:
            layer.sliding_window_size = chunk_tokens  # so that it gets a mask

    def mask(
        *, q_len: int, kv_len: int, device: torch.device, query_offset: int = 0, **_: Any
    ) -> torch.Tensor:
        queries = torch.arange(query_offset, query_offset + q_len, device=device)[:, None]
        keys = torch.arange(kv_len, device=device)[None]
        return (keys <= queries) & (keys // chunk_tokens == queries // chunk_tokens)

    def get_rope_in_place(*args: Any, **kwargs: Any) -> Any:
        rotate = get_rope(*args, **kwargs)

        def rotate_in_place(positions: torch.Tensor, *parts: torch.Tensor) -> Any:
            for part, rotated in zip(parts, rotate(positions, *parts), strict=True):
                part.copy_(rotated)
            return parts

        return rotate_in_place

    llama4.get_rope = get_rope_in_place
    RadixAttention.__init__ = with_chunks
    TorchNativeAttnBackend._make_sliding_window_mask = staticmethod(mask)
