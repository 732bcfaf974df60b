"""Kernels of speculative decoding in plain torch. A plugin of SGLang, used only by tests, with
CAKE_TEST_SPECULATIVE set.

SGLang 0.5.23 has these kernels for CPUs in `sgl_kernel`, which has no wheel for CPUs, and its
attention backend `torch_native` has neither the tree masks of a verification nor the several steps
of a draft. It refuses DFLASH on a CPU, whose worker has a way without kernels.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    if "CAKE_TEST_SPECULATIVE" not in os.environ:
        return
    # `sgl_kernel` itself stays absent: SGLang takes what it has for more than is here.
    kernels: Any = ModuleType("sgl_kernel.speculative")
    kernels.reconstruct_indices_from_tree_mask = describe_trees
    sys.modules["sgl_kernel.speculative"] = kernels

    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.arg_groups import choices, speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cache_locs.assign_extend_cache_locs_cpu = slots_of_spans
    cache_locs.assign_draft_cache_locs_contiguous_cpu = slots_of_drafts
    eagle.fill_accept_out_cache_loc_cpu = slots_of_accepted
    eagle.fill_bonus_tokens_cpu = bonus_tokens
    spec_tree.sgl_build_tree_kernel_efficient_cpu = build_trees
    spec_tree.sgl_verify_tree_greedy_cpu = verify

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(backend: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> Any:
        if args[1].forward_mode.is_target_verify():
            return attend_trees(backend, q, k, v, *args, **kw)
        return extend(backend, q, k, v, *args, **kw)

    TorchNativeAttnBackend.forward_extend = forward_extend  # type: ignore[method-assign]
    DraftBackendFactory.create_decode_backend = (  # type: ignore[method-assign]
        lambda factory: Steps(factory.draft_model_runner, factory.speculative_num_steps)
    )
    DraftBackendFactory.create_draft_extend_backend = (  # type: ignore[method-assign]
        lambda factory: TorchNativeAttnBackend(factory.draft_model_runner)
    )
    choices.add_draft_attention_backend_choices(["torch_native"])
    draft = DFlashDraftModel.forward

    def forward_draft(
        model: Any, input_ids: Tensor, positions: Tensor, batch: Any, input_embeds: Tensor
    ) -> Any:
        """SGLang rounds embeddings to bfloat16, whatever the model's own dtype."""
        embeddings = input_embeds.to(model.norm.weight.dtype)
        return draft(model, input_ids, positions, batch, input_embeds=embeddings)

    DFlashDraftModel.forward = forward_draft  # type: ignore[method-assign]
    speculative_hook.current_platform = AnyPlatform()
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]


class AnyPlatform:
    """To SGLang, a platform of another package, which has all algorithms."""

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, _: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, *_: str) -> bool:
        return True


# ---- slots ----


def slots_of_spans(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, slots: Tensor, _: int
) -> None:
    """Write the slots of `[start, stop)` of each request to `slots`, one behind the other."""
    spans = zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
    found = torch.cat([table[row, start:stop] for row, start, stop in spans])
    slots[: len(found)] = found


def slots_of_drafts(
    rows: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, _: int, topk: int, steps: int
) -> None:
    """Write the slots behind each request to `slots`, as many as it drafts tokens."""
    slots_of_spans(rows, table, lengths, lengths + topk * steps, slots, 0)


def slots_of_accepted(accepted: Tensor, window: Tensor, slots: Tensor) -> None:
    """Write the slots of the accepted drafts to `slots`. Args: accepted: -1 stands for none."""
    found = window[accepted.flatten()[accepted.flatten() >= 0].long()]
    slots[: len(found)] = found


def bonus_tokens(accepted: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """Write the last accepted token of each request to `bonus`."""
    for index, length in enumerate(lengths.tolist()):
        bonus[index] = accepted.flatten()[index * stride + length - 1]


# ---- trees of drafts ----


def describe_trees(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    requests: int,
    nodes: int,
) -> None:
    """Write what `verify` needs of trees that are given by their masks."""
    trees = mask.view(requests, nodes, nodes).tril(-1)
    positions.copy_((trees.sum(-1) + lengths[:, None]).flatten())
    index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    for tree, tree_child, tree_sibling in zip(trees, child, sibling, strict=True):
        parents = [int(row.nonzero().max()) if row.any() else -1 for row in tree]
        _link(parents, tree_child, tree_sibling)


def _link(parents: list[int], child: Tensor, sibling: Tensor) -> None:
    """Write the first child, and the next sibling, of each node; -1 stands for none."""
    child.fill_(-1)
    sibling.fill_(-1)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent >= 0:
            sibling[node] = child[parent]
            child[parent] = node


def build_trees(
    parent_list: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    topk: int,
    steps: int,
    nodes: int,
    mode: int,
) -> None:
    """Write the chains of `topk` 1: each draft continues the one before it."""
    assert topk == 1
    requests = len(lengths)
    order = torch.arange(nodes)
    mask.copy_(torch.ones(nodes, nodes, dtype=torch.bool).tril().flatten().repeat(requests))
    positions.copy_((lengths[:, None] + order).flatten())
    index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    for tree_child, tree_sibling in zip(child, sibling, strict=True):
        _link(list(range(-1, nodes - 1)), tree_child, tree_sibling)


def verify(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the drafts of each tree that the target would have chosen itself."""
    for request, targets in enumerate(target_predict.tolist()):
        drafts, index = candidates[request].tolist(), retrive_index[request].tolist()
        children, siblings = retrive_next_token[request], retrive_next_sibling[request]
        node, accepted = 0, 0
        accept_index[request, 0] = index[0]
        while True:
            predicts[index[node]] = targets[node]
            draft = int(children[node])
            while draft >= 0 and drafts[draft] != targets[node]:
                draft = int(siblings[draft])
            if draft < 0 or accepted + 1 == accept_index.shape[1]:
                break
            node, accepted = draft, accepted + 1
            accept_index[request, accepted] = index[node]
        accept_token_num[request] = accepted


# ---- attention ----


def attend_trees(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
) -> Tensor:
    """Each draft sees the tokens of its request, and the drafts that its tree's mask names. Those
    of DFLASH have none: they are a chain, and in the draft model a block that sees all of itself.
    """
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache:
        where = KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, where, k, v)
    nodes = batch.spec_info.draft_token_num
    heads = q.view(-1, nodes, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
    masks = batch.spec_info.custom_mask
    if masks is None:
        whole = torch.ones(nodes, nodes, dtype=torch.bool)
        block = whole if layer.attn_type == AttentionType.ENCODER_ONLY else whole.tril()
        masks = block.repeat(batch.batch_size, 1, 1)
    masks = masks.view(-1, nodes, nodes)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    table = backend.req_to_token_pool.req_to_token
    in_window_pool = backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
    window_tokens = layer.sliding_window_size
    outputs = []
    requests = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    for number, (row, length) in enumerate(requests):
        slots = table[row, : length + nodes].long()
        mask = torch.cat([torch.ones(nodes, length, dtype=torch.bool), masks[number]], dim=1)
        if window_tokens is not None and window_tokens > -1:
            depths = length + masks[number].sum(-1) - 1
            places = torch.cat([torch.arange(length), depths])
            mask &= places >= depths[:, None] - window_tokens
        if in_window_pool:  # slots of tokens that have left the window are of its dummy
            slots = pool.translate_loc_from_full_to_swa(slots).long()
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                heads[number],
                keys[slots].transpose(0, 1).to(q.dtype),
                values[slots].transpose(0, 1).to(q.dtype),
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=True,
            ).transpose(0, 1)
        )
    return torch.cat(outputs).reshape(len(q), -1)


class Steps:
    """The attention of a draft of several tokens, one step after another."""

    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        self.attn_backends = [TorchNativeAttnBackend(runner) for _ in range(steps)]
        for step, backend in enumerate(self.attn_backends):
            backend.forward_decode = _behind(backend, step + 1)

    def init_forward_metadata(self, batch: Any) -> None:
        """Nothing: each step makes its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn_backends[0], name)


def _behind(backend: Any, drafts: int) -> Any:
    """Its decode forward, for requests that have so many drafts behind their tokens."""
    forward = backend.forward_decode

    def forward_decode(q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, **kw: Any) -> Any:
        with _longer(batch, drafts):
            backend.init_forward_metadata(batch)  # slots of windows
            return forward(q, k, v, layer, batch, **kw)

    return forward_decode


@contextmanager
def _longer(batch: Any, tokens: int) -> Iterator[None]:
    batch.seq_lens = batch.seq_lens + tokens
    try:
        yield
    finally:
        batch.seq_lens = batch.seq_lens - tokens
