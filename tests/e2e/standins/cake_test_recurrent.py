"""Kernels of Qwen3-Next, Qwen3.5 and LFM2 in plain torch, most of them those of transformers.

A plugin of SGLang, used only by tests, with CAKE_TEST_RECURRENT set. For these layers SGLang 0.5.23
has kernels of `sgl_kernel`, which has no wheel for CPUs, and of Triton, which needs a GPU. A state
is [value heads, value width, key width] here, and the state of a convolution is its last inputs,
oldest first: SGLang's own shapes.

With these stand-ins a CPU also has what the strategy `extra_buffer` of SGLang's Mamba cache needs:
the states at every 64th token of a step, and copies of states while tokens are generated; and what
the verification of drafts needs: the state behind each draft, and copies of those of the accepted.
"""

import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, sigmoid, silu, softplus

CHUNK_TOKENS = 64  # between two of the states that a step returns


def register() -> None:
    if "CAKE_TEST_RECURRENT" not in os.environ:
        return
    # `sgl_kernel` itself stays absent: SGLang takes what it has for more than is here.
    kernels: Any = ModuleType("sgl_kernel.mamba")
    kernels.causal_conv1d_fn_cpu = convolve
    kernels.causal_conv1d_update_cpu = convolve_token
    kernels.chunk_gated_delta_rule_cpu = attend
    sys.modules["sgl_kernel.mamba"] = kernels
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu = gates
    operators.fused_sigmoid_gating_delta_rule_update_cpu = attend_token
    # Qwen3.5 looks for these when it is imported.
    operators.fused_sigmoid_mul_cpu = multiply_by_gate
    operators.fused_qk_gemma_rmsnorm_cpu = norm_heads
    operators.fused_qk_gemma_rmsnorm_with_gate_cpu = norm_heads_and_split_gate
    operators.fused_qkvzba_split_reshape_cat_contiguous_cpu = split_projections

    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.models import lfm2, qwen2_moe, qwen3_5, qwen3_next
    from sglang.srt.models.registry import ModelRegistry

    FusedRMSNormGated.forward = norm  # type: ignore[method-assign]
    RMSNorm.forward = norm  # type: ignore[method-assign]
    model = qwen3_5.Qwen3_5ForConditionalGeneration
    ModelRegistry.models[model.__name__] = model
    qwen3_next.Qwen3NextForCausalLM.set_embed_and_head = share_head  # type: ignore[method-assign]
    qwen2_moe.fused_gate_sigmoid_mul_add = add_shared_expert
    lfm2.causal_conv1d_fn = convolve
    lfm2.causal_conv1d_update = convolve_token
    hybrid_linear_attn_backend.track_mamba_states_all_layers = copy_states
    hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify = keep_accepted
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def share_head(model: Any, embeddings: Tensor, head: Tensor) -> None:
    """Give a draft model those of its target. SGLang's own empties the memory of a GPU."""
    model.model.embed_tokens.weight = embeddings
    model.lm_head.weight = head


def convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Causal convolutions of the requests of a step: [channels, tokens] to the same shape."""
    output = torch.empty_like(inputs)
    spans = pairwise(query_start_loc.tolist())
    slots, continued = cache_indices.tolist(), has_initial_state.tolist()
    for (start, stop), slot, continues in zip(spans, slots, continued, strict=True):
        state = conv_states[slot] if continues else torch.zeros_like(conv_states[slot])
        known = torch.cat([state.to(inputs.dtype), inputs[:, start:stop]], dim=1)
        conv_states[slot] = known[:, known.shape[1] - state.shape[1] :]
        output[:, start:stop] = _activated(known[None], weight, bias, activation)[0]
    return output


def convolve_token(
    inputs: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As `convolve`, for one token of each request: [requests, channels] to the same shape.

    With a window for each draft, for trees of drafts: [requests, channels, nodes] to the same
    shape. The states behind the drafts are written there, and those of the requests stay.
    """
    slots = conv_state_indices.long()
    if intermediate_conv_window is None:
        known = torch.cat([conv_states[slots].to(inputs.dtype), inputs[..., None]], dim=2)
        conv_states[slots] = known[..., 1:].to(conv_states.dtype)
        return _activated(known, weight, bias, activation)[..., 0]
    output = torch.empty_like(inputs)
    if retrieve_parent_token is not None:
        assert retrieve_next_token is not None
        assert retrieve_next_sibling is not None
        retrieve_parent_token.copy_(_parents(retrieve_next_token, retrieve_next_sibling))
    for row, (slot, request) in enumerate(zip(slots, inputs, strict=True)):
        for node, parent in enumerate(_parents_of(row, inputs.shape[2], retrieve_parent_token)):
            before = conv_states[slot] if parent < 0 else intermediate_conv_window[row, parent]
            known = torch.cat([before.to(inputs.dtype), request[:, node, None]], dim=1)
            intermediate_conv_window[row, node] = known[:, 1:]
            output[row, :, node] = _activated(known[None], weight, bias, activation)[0, :, 0]
    return output


def _parents(child: Tensor, sibling: Tensor) -> Tensor:
    """The parent of each node of some trees, which is before it; -1: none."""
    parents = torch.full_like(child, -1)
    for row, children in enumerate(child.tolist()):
        for node, found in enumerate(children):
            while found >= 0:
                parents[row, found] = node
                found = int(sibling[row, found])
    return parents


def _parents_of(row: int, nodes: int, parents: Tensor | None) -> list[int]:
    """The same for one request. Args: parents: None: each draft continues the one before it."""
    found: list[int] = [*range(-1, nodes - 1)] if parents is None else parents[row].tolist()
    return found


def _activated(
    known: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    output = conv1d(known, weight[:, None], bias, groups=len(weight))
    return output if activation is None else {"silu": silu}[activation](output)


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay in log space and learning rate, each [1, tokens, value heads]."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias))[None], sigmoid(b.float())[None]


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
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """The outputs of a step; and the states before each of its chunks, request by request."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = _for_values(q, v), _for_values(k, v)
    output, before = torch.empty_like(v), []
    spans = pairwise(cu_seqlens.tolist())
    for (start, stop), slot in zip(spans, initial_state_indices.tolist(), strict=True):
        state = initial_state[slot].transpose(-1, -2)[None].float()
        for first in range(start, stop, CHUNK_TOKENS):
            before.append(state[0].transpose(-1, -2))
            chunk = slice(first, min(first + CHUNK_TOKENS, stop))
            output[:, chunk], state = torch_chunk_gated_delta_rule(
                *(tensor[:, chunk] for tensor in (q, k, v)),
                g=g[:, chunk],
                beta=beta[:, chunk],
                chunk_size=CHUNK_TOKENS,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        initial_state[slot] = state[0].transpose(-1, -2)
    return output, None, torch.stack(before)[None]


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
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int = 1,
    retrieve_parent_token: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As `attend`, for one token of each request.

    With a buffer for the states behind drafts, for the `cache_steps` nodes of each request's tree
    of drafts. The states of the requests stay.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    g, beta = gates(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    tensors = [tensor.transpose(0, 1) for tensor in (_for_values(q, v), _for_values(k, v), v)]
    g, beta = g.transpose(0, 1), beta.transpose(0, 1)

    def step(at: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        output, state = torch_recurrent_gated_delta_rule(
            *(tensor[at] for tensor in tensors),
            g=g[at],
            beta=beta[at],
            initial_state=states.transpose(-1, -2).float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return output, state.transpose(-1, -2).to(states.dtype)

    if intermediate_states_buffer is None:
        output, states = step(slice(None), initial_state_source[slots])
        initial_state_source[slots] = states
        return output.transpose(0, 1)
    outputs = []
    for row, slot in enumerate(slots.tolist()):
        behind = intermediate_states_buffer[row]
        for node, parent in enumerate(_parents_of(row, cache_steps, retrieve_parent_token)):
            before = initial_state_source[slot] if parent < 0 else behind[parent]
            at = row * cache_steps + node
            output, states = step(slice(at, at + 1), before[None])
            behind[node] = states[0]
            outputs.append(output)
    return torch.cat(outputs).transpose(0, 1)


def _for_values(heads: Tensor, values: Tensor) -> Tensor:
    """Queries or keys, repeated for the value heads that share them."""
    return heads.repeat_interleave(values.shape[2] // heads.shape[2], dim=2)


def norm(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + layer.eps)
    gate = {"swish": silu, "silu": silu, "sigmoid": sigmoid}[layer.activation](g.float())
    return (layer.weight * scaled.to(x.dtype) * gate).to(x.dtype)


def multiply_by_gate(output: Tensor, gate: Tensor) -> None:
    output *= sigmoid(gate)


def norm_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each [tokens and heads, head width]."""

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        wide = heads.reshape(-1, width).float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * (1 + weight.float())).to(heads.dtype)

    return normed(q, q_weight), normed(k, k_weight)


def norm_heads_and_split_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `norm_heads`, of a projection with the gate of each head behind its query."""
    q, gate = q_gate.reshape(-1, heads, 2 * width).chunk(2, dim=-1)
    return *norm_heads(q, k, q_weight, k_weight, eps, width), gate.contiguous().view(-1, width)


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values in one tensor; the gates of the output, [tokens, value heads, value
    width]; and what the learning rates and the decays are made of."""
    values = value_heads * value_width
    qkv, z = qkvz.split([2 * key_heads * key_width + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_width), b.contiguous(), a.contiguous()


def add_shared_expert(hidden: Tensor, gate: Tensor, shared: Tensor, routed: Tensor) -> None:
    routed += sigmoid(hidden @ gate)[:, None] * shared


def copy_states(
    conv_states: Tensor,
    states: Tensor,
    sources: Tensor,
    mask: Tensor,
    targets: Tensor,
    requests: int,
    **_: Any,
) -> None:
    """Copy the states of the requests in `mask`, in all layers."""
    chosen = mask[:requests].bool()
    source, target = sources[:requests][chosen].long(), targets[:requests][chosen].long()
    for pool in (conv_states, states):
        pool[:, target] = pool[:, source]


def keep_accepted(
    states: Any,
    slots: Tensor,
    accepted: Tensor,
    tracked_slots: Tensor | None,
    tracked: Tensor | None,
    **_: Any,
) -> None:
    """Copy the states behind the last accepted draft of each request to the slot of the request,
    and those behind the draft that is tracked to another slot; -1: none is."""
    kept = [(states.temporal, states.intermediate_ssm)]
    kept += zip(states.conv, states.intermediate_conv_window, strict=True)
    for target, source in kept:
        for chosen, nodes in ((slots, accepted), (tracked_slots, tracked)):
            if chosen is not None and nodes is not None:
                for row, (slot, node) in enumerate(
                    zip(chosen.tolist(), nodes.tolist(), strict=True)
                ):
                    if node >= 0:
                        target[:, slot] = source[:, row, node]
