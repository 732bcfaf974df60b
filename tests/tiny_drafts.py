"""Tiny draft models that propose what their targets would choose."""

import json
from pathlib import Path
from typing import Any

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

    write_model(target, LlamaForCausalLM, config, change=_sharpen)
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


def build_mimo(path: Path) -> Path:
    """Write a random MiMo of one layer to `path`, with its MTP layer in the same files.

    The MTP layer is the target's layer. It does not use the target's hidden states, and sees all
    tokens but the first one. transformers does not know MiMo: to it, this is a Qwen2 with weights
    that it leaves out.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden = 128
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    write_model(path, Qwen2ForCausalLM, config, change=_sharpen)
    tensors = load_file(path / "model.safetensors")
    mtp = "model.mtp_layers.0."
    tensors |= {
        name.replace("model.layers.0.", mtp): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    mix = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    tensors |= {
        f"{mtp}input_proj.weight": mix,
        f"{mtp}token_layernorm.weight": torch.ones(hidden),
        f"{mtp}hidden_layernorm.weight": torch.ones(hidden),
        f"{mtp}final_layernorm.weight": tensors["model.norm.weight"].clone(),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((path / "config.json").read_text())
    facts |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(facts))
    return path


def _sharpen(model: Any) -> None:
    """The prompt decides each token. Embeddings are normalized."""
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 4
        layer.self_attn.q_proj.weight.data *= 2
