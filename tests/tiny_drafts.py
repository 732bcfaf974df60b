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

    hidden = _write_llama(target)
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


def build_eagle3(target: Path, draft: Path) -> tuple[Path, Path]:
    """Write a random Llama to `target`, and its EAGLE3 draft model to `draft`.

    The draft has the target's layers, takes nothing of the target's hidden states, and sees all
    tokens but the first one. What it adds up begins without the token's embedding, which is of
    little size in this target.
    """
    import torch
    from safetensors.torch import load_file, save_file

    hidden = _write_llama(target, embedding_size=0.01)
    tensors = load_file(target / "model.safetensors")
    copied = {
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        if not short.startswith("layers."):
            continue
        if short.startswith("layers.0.") and any(f".{each}_proj" in short for each in "qkv"):
            tensor = torch.cat([tensor, torch.zeros_like(tensor)], dim=1)
        if not short.startswith("layers.0."):
            short = short.replace("input_layernorm", "hidden_norm")
        copied[short] = tensor
    copied |= {
        "layers.0.hidden_norm.weight": torch.ones(hidden),
        "fc.weight": torch.zeros(hidden, 2 * hidden),
    }
    draft.mkdir(parents=True)
    save_file(copied, draft / "model.safetensors")
    facts = json.loads((target / "config.json").read_text())
    facts |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        # What two layers get is taken, so that it has another size than an embedding.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0]},
    }
    (draft / "config.json").write_text(json.dumps(facts))
    return target, draft


def _write_llama(path: Path, *, embedding_size: float = 1.0) -> int:
    """Write a random Llama of two layers. Returns its width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 128
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )

    def change(model: Any) -> None:
        _sharpen(model)
        model.model.embed_tokens.weight.data *= embedding_size

    write_model(path, LlamaForCausalLM, config, change=change)
    return hidden


def build_mimo(path: Path) -> Path:
    """Write a random MiMo of one layer to `path`, with its MTP layer in the same files.

    The MTP layer is the target's layer. It does not use the target's hidden states, and sees all
    tokens but the first one. transformers does not know MiMo: to it, this is a Qwen2 with weights
    that it leaves out.
    """
    import torch
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
    mtp = "model.mtp_layers.0."
    _copy_weights(
        path,
        {"model.layers.0.": mtp, "model.norm.": f"{mtp}final_layernorm."},
        {
            f"{mtp}input_proj.weight": torch.cat(
                [torch.zeros(hidden, hidden), torch.eye(hidden)], 1
            ),
            f"{mtp}token_layernorm.weight": torch.ones(hidden),
            f"{mtp}hidden_layernorm.weight": torch.ones(hidden),
        },
    )
    facts = json.loads((path / "config.json").read_text())
    facts |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(facts))
    return path


def build_qwen3_next_mtp(path: Path) -> Path:
    """Write a random Qwen3-Next to `path`, with its MTP layer in the same files.

    The MTP layer is the target's last one, with full attention. It does not use the target's hidden
    states, and sees all tokens but the first one. The target's other layers, which have recurrent
    states, add little to what the last one gets: most of the MTP layer's tokens are accepted, and
    wrong states change logprobs by about 1.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    hidden, layers = 128, 4
    config = Qwen3NextConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        intermediate_size=256,
        full_attention_interval=layers,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config.full_attention_interval = layers  # SGLang reads it, and transformers drops it

    def change(model: Any) -> None:
        embeddings = model.model.embed_tokens.weight.data
        embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.data += 2  # a peaked softmax
            elif name.endswith("A_log"):  # half of a state is forgotten in 10 to 1,000 tokens
                weight.data = torch.linspace(-7.5, -3, weight.numel()).view_as(weight)
            elif "self_attn.o_proj" in name:
                weight.data *= 2
            elif "linear_attn.out_proj" in name or (
                "down_proj" in name and f"layers.{layers - 1}." not in name
            ):
                weight.data *= 0.01

    write_model(path, Qwen3NextForCausalLM, config, change=change)
    last = f"model.layers.{layers - 1}."
    _copy_weights(
        path,
        {last: "mtp.layers.0.", "model.norm.": "mtp.norm."},
        {
            "mtp.fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1),
            "mtp.pre_fc_norm_embedding.weight": torch.zeros(hidden),  # 1 is added
            "mtp.pre_fc_norm_hidden.weight": torch.zeros(hidden),
        },
    )
    return path


def _copy_weights(path: Path, prefixes: dict[str, str], more: dict[str, Any]) -> None:
    """Add weights to a model: those whose names begin with a prefix, under another prefix, and
    `more`."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    copies = {
        name.replace(old, new, 1): tensor.clone()
        for old, new in prefixes.items()
        for name, tensor in tensors.items()
        if name.startswith(old)
    }
    save_file(tensors | copies | more, path / "model.safetensors", metadata={"format": "pt"})


def _sharpen(model: Any) -> None:
    """The prompt decides each token. Embeddings are normalized."""
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 4
        layer.self_attn.q_proj.weight.data *= 2
