"""A random DeepSeek-V2, made without a network."""

import json
from pathlib import Path

from sglang_cake.demo.models import write_model


def build_deepseek(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    latent: int,
    head_dim: int = 32,
    rope_dim: int = 32,
    dtype: str = "float32",
    max_tokens: int = 8192,
) -> Path:
    """Write a random dense DeepSeek-V2 to `path`, as `build_llama` does.

    Args:
        latent, rope_dim: values of one token's KV in a layer.
        head_dim: of queries and values, without the part that is turned.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=512,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=layers,
        n_group=1,
        topk_group=1,
    )
    write_model(path, DeepseekV2ForCausalLM, config, dtype=dtype)
    # SGLang reads these fields, and this version of transformers does not write them.
    file = path / "config.json"
    facts = json.loads(file.read_text())
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": max_tokens,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    facts |= {
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "rope_theta": 10000.0,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 10000.0},
    }
    file.write_text(json.dumps(facts))
    return path
