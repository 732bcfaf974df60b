"""Kernels of Kimi Linear and Nemotron-H in plain torch, those of transformers.

A plugin of SGLang, used only by tests, with CAKE_TEST_KDA_MAMBA2 set. SGLang 0.5.23 has them in
Triton only, which needs a GPU. It uses `cake_test_recurrent`, whose variable must be set, too. A
state of KDA is [heads, value width, key width] here, and one of Mamba2 [heads, head width, state
width]: SGLang's own shapes.
"""

import os
from itertools import pairwise
from typing import Any

import cake_test_recurrent
import torch
from torch import Tensor
from torch.nn.functional import softplus

CHUNK_TOKENS = cake_test_recurrent.CHUNK_TOKENS


def register() -> None:
    if "CAKE_TEST_KDA_MAMBA2" not in os.environ:
        return
    cake_test_recurrent.register()  # the imports below need its kernels

    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels import kda_triton
    from sglang.srt.layers.attention.mamba import mamba

    kda_backend.causal_conv1d_fn = cake_test_recurrent.convolve
    kernels: Any = kda_triton
    kernels.chunk_kda = attend
    kernels.fused_sigmoid_gating_delta_rule_update = attend_token
    mixer: Any = mamba
    mixer.causal_conv1d_fn = mixer.causal_conv1d_fn_triton = cake_test_recurrent.convolve
    mixer.causal_conv1d_update = cake_test_recurrent.convolve_token
    mixer.causal_conv1d_update_triton = cake_test_recurrent.convolve_token
    mixer.mamba_chunk_scan_combined = scan
    mixer.selective_state_update = scan_token


def decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """In log space: [1, tokens, heads, key width]."""
    bias = dt_bias.float().view(gate.shape[-2:])
    return -A_log.float().exp().view(-1, 1) * softplus(gate.float() + bias)


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    output_intermediate_states: bool,
    track_state: Tensor | None,
    track_chunk_idx: Tensor | None,
    **_: Any,
) -> Any:
    """The outputs of a step of KDA; and, if asked for, the states before each of its chunks."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    g, beta = decay(g, A_log, dt_bias), beta.float().sigmoid()
    output, before, firsts = torch.empty_like(v), [], []
    spans = pairwise(cu_seqlens.tolist())
    for (start, stop), slot in zip(spans, initial_state_indices.tolist(), strict=True):
        state = initial_state[slot].transpose(-1, -2)[None].float()
        firsts.append(len(before))
        for first in range(start, stop, CHUNK_TOKENS):
            before.append(state[0].transpose(-1, -2))
            chunk = slice(first, min(first + CHUNK_TOKENS, stop))
            output[:, chunk], state = chunk_kimi_delta_attention(
                *(tensor[:, chunk] for tensor in (q, k, v)),
                g=g[:, chunk],
                beta=beta[:, chunk],
                chunk_size=CHUNK_TOKENS,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        initial_state[slot] = state[0].transpose(-1, -2)
    if track_state is not None and track_chunk_idx is not None:
        for row, index in enumerate(track_chunk_idx.tolist()):  # of a chunk of that request
            if index >= 0:
                track_state[row] = before[firsts[row] + index]
    return (output, torch.stack(before)[None]) if output_intermediate_states else output


def attend_token(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """As `attend`, for one token of each request."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    slots = initial_state_indices.long()
    g = decay(a.reshape(k.shape), A_log, dt_bias)
    beta = b.reshape(k.shape[:3]).float().sigmoid()
    output, state = recurrent_kimi_delta_attention(
        *(tensor.transpose(0, 1) for tensor in (q, k, v)),
        g=g.transpose(0, 1),
        beta=beta.transpose(0, 1),
        initial_state=initial_state_source[slots].transpose(-1, -2).float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    initial_state_source[slots] = state.transpose(-1, -2).to(initial_state_source.dtype)
    return output.transpose(0, 1)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor | None,
    cu_seqlens: Tensor,
    out: Tensor,
    state_dtype: torch.dtype,
    **_: Any,
) -> tuple[None, Tensor, None]:
    """A step of Mamba2, written to `out`; the state behind each request. It keeps no other states,
    so it serves the strategy `no_buffer` only."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    states = []
    for index, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        span = slice(start, stop)
        out[:, span], state = mamba2_chunk_scan(
            *(x[:, span], dt[:, span], A, B[:, span], C[:, span], chunk_size),
            D=D,
            dt_bias=dt_bias,
            dt_softplus=True,
            initial_states=None if initial_states is None else initial_states[index : index + 1],
            return_final_states=True,
        )
        states.append(state)
    return None, torch.cat(states).to(state_dtype), None


def scan_token(
    states: Tensor,
    x: Tensor,
    *inputs: Tensor,
    z: None,
    dt_bias: Tensor,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    out: Tensor,
) -> None:
    """As `scan`, for one token of each request."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_selective_state_update

    slots = state_batch_indices.long()
    own = states[slots]
    out[:] = mamba2_selective_state_update(
        own, x, *inputs, dt_bias=dt_bias, dt_softplus=dt_softplus
    )
    states[slots] = own
