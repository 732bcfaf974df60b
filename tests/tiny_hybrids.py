"""Tiny random models with sliding windows or linear attention, and their answers by transformers.

Their logits depend strongly on the whole prompt, as those of `sglang_cake.demo.models` do: weights
are large, attention is peaked, and recurrent states forget slowly. So wrong KV, a wrong window or a
wrong state changes the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.demo.models import write_model

VOCAB = 512
LAYERS = 4  # three with a window or a state, and one with full attention
_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build_mellum(path: Path, *, window_tokens: int) -> Path:
    """Write a dense Mellum to `path`. Its windows include the token that looks."""
    from transformers import MellumConfig, MellumForCausalLM

    kinds = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    config = MellumConfig(
        **_SHAPE,
        intermediate_size=256,
        sliding_window=window_tokens,
        layer_types=kinds,
        mlp_layer_types=["dense"] * LAYERS,
    )
    write_model(path, MellumForCausalLM, config, change=_sharpen)
    return path


def build_qwen3_next(path: Path) -> Path:
    """Write a Qwen3-Next to `path`: gated delta rule, and a mixture of four experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SHAPE,
        intermediate_size=256,
        full_attention_interval=LAYERS,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=16,  # unlike keys: a transposed state has another shape
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config.full_attention_interval = LAYERS  # SGLang reads it, and transformers drops it
    write_model(path, Qwen3NextForCausalLM, config, change=_sharpen)
    return path


def build_lfm2(path: Path) -> Path:
    """Write an LFM2 to `path`: short convolutions, whose states are their last inputs."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_SHAPE,
        intermediate_size=256,
        block_auto_adjust_ff_dim=False,
        pad_token_id=None,
        layer_types=["conv"] * (LAYERS - 1) + ["full_attention"],
    )
    write_model(path, Lfm2ForCausalLM, config, change=_sharpen)
    return path


def _sharpen(model: Any) -> None:
    import torch

    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "q_layernorm.weight")):
            weight.data += 2  # a peaked softmax
        elif name.endswith("A_log"):  # half of a state is forgotten in 10 to 1,000 tokens
            weight.data = torch.linspace(-7.5, -3, len(weight))


@dataclass(frozen=True, slots=True)
class Expected:
    """A greedy answer: tokens, and their natural log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Transformers:
    """The model at `path`, run by transformers."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def answer(self, ids: Sequence[int], new_tokens: int) -> Expected:
        import torch

        given = torch.tensor([list(ids)])
        made = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[0, len(ids) :].tolist()
        logprobs = [
            logits[0].log_softmax(-1)[token].item()
            for token, logits in zip(tokens, made.logits, strict=True)
        ]
        return Expected(tokens, logprobs)
