"""A tiny EAGLE draft model that proposes what its target would choose."""

import json
from pathlib import Path

from sglang_cake.demo.models import write_model

VOCAB = 512


def build_eagle(target: Path, draft: Path) -> tuple[Path, Path]:
    """Write a random Llama to `target`, and its draft model to `draft`.

    The draft has the target's layers. It does not use the target's hidden states, and sees all
    tokens but the first one, so nearly all that it proposes is accepted, if it has its own KV of
    the prompt. SGLang's draft normalizes neither its embeddings nor its output: the embeddings of
    this target are normalized already, and the output's size does not change the best token.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = 128, 2
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )

    def change(model: LlamaForCausalLM) -> None:
        embeddings = model.model.embed_tokens.weight.data
        embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
        for layer in model.model.layers:  # the prompt decides each token
            layer.self_attn.o_proj.weight.data *= 4
            layer.self_attn.q_proj.weight.data *= 2

    write_model(target, LlamaForCausalLM, config, change=change)
    tensors = load_file(target / "model.safetensors")
    copied = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    mix = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    draft.mkdir(parents=True)
    save_file(
        copied | {"fc.weight": mix, "fc.bias": torch.zeros(hidden)}, draft / "model.safetensors"
    )
    facts = json.loads((target / "config.json").read_text())
    facts["architectures"] = ["LlamaForCausalLMEagle"]
    (draft / "config.json").write_text(json.dumps(facts))
    return target, draft
