"""Tiny draft models that propose what their targets would choose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_hybrids import LAYERS, QWEN3_NEXT, SHAPE

from sglang_cake.demo.models import write_model

VOCAB = 512
HIDDEN = SHAPE["hidden_size"]
_SHAPE = SHAPE | {"vocab_size": VOCAB, "initializer_range": 0.08}


def build_eagle(target: Path, draft: Path) -> tuple[Path, Path]:
    """Write a random Llama to `target`, and its draft model to `draft`.

    The draft has the target's layers. It does not use the target's hidden states, and sees all
    tokens but the first one, so nearly all that it proposes is accepted, if it has its own KV of
    the prompt. SGLang's draft normalizes neither its embeddings nor its output: the embeddings of
    this target are normalized already, and the output's size does not change the best token.
    """
    _write_llama(target)
    tensors = load_file(target / "model.safetensors")
    copied = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.") and name != "model.layers.0.input_layernorm.weight"
    }
    mix = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    draft.mkdir(parents=True)
    save_file(
        copied | {"fc.weight": mix, "fc.bias": torch.zeros(HIDDEN)}, draft / "model.safetensors"
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
    _write_llama(target, embedding_size=0.01)
    _write_eagle3_draft(target, draft)
    return target, draft


def _write_eagle3_draft(llama: Path, draft: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
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
        "layers.0.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
    }
    draft.mkdir(parents=True)
    save_file(copied, draft / "model.safetensors")
    facts = json.loads((llama / "config.json").read_text())
    facts |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        # What two layers get is taken, so that it has another size than an embedding.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0]},
    }
    (draft / "config.json").write_text(json.dumps(facts))


def _write_llama(path: Path, *, embedding_size: float = 1.0) -> None:
    """Write a random Llama of two layers."""
    config = transformers.LlamaConfig(
        **_SHAPE | {"num_hidden_layers": 2}, intermediate_size=4 * HIDDEN
    )

    def change(model: Any) -> None:
        _sharpen(model)
        model.model.embed_tokens.weight.data *= embedding_size

    write_model(path, transformers.LlamaForCausalLM, config, change=change)


def build_dflash(target: Path, draft: Path) -> tuple[Path, Path]:
    """Write a Llama to `target`, and its DFLASH draft model to `draft`.

    The target chooses the token after the one that was `distance` tokens before, which attention
    of its second layer finds by its position alone: queries are equal for all tokens, and so are
    keys. The first layer adds nothing. So all that the draft model proposes for a block of masks is
    accepted, if it has its own KV of the prompt, which is made of what the first layer passes on.
    """
    # The parts of HIDDEN: a constant, the code of a token, the code that was found, nothing.
    width, hidden = HIDDEN // 4, HIDDEN
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    distance, peak, masked = 100, 12.0, VOCAB - 1
    codes = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(0))
    codes *= (2 / codes.square().mean(1, keepdim=True)).sqrt()
    constant = torch.full((width,), 2**0.5)

    def from_constant(vector: torch.Tensor, count: int) -> torch.Tensor:
        """The weights that give each head this vector."""
        weights = torch.zeros(width, hidden)
        weights[:, :width] = torch.outer(vector, constant / constant.square().sum())
        return weights.repeat(count, 1)

    def attention(tokens_back: int, scale: float) -> dict[str, torch.Tensor]:
        angles = tokens_back * 10000.0 ** (-torch.arange(0, width, 2) / width)
        query = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)])
        key = torch.cat([angles.cos(), angles.sin()])  # the query, turned
        value, output = torch.zeros(width, hidden), torch.zeros(hidden, hidden)
        value[:, width : 2 * width] = torch.eye(width)
        output[2 * width : 3 * width, :width] = 4 * torch.eye(width)
        return {
            "q_proj": from_constant(query * scale, heads),
            "k_proj": from_constant(key * scale, kv_heads),
            "v_proj": value.repeat(kv_heads, 1),
            "o_proj": output,
        }

    def change(model: Any) -> None:
        embeddings, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
        embeddings.zero_()
        embeddings[:, :width], embeddings[:, width : 2 * width] = constant, codes
        head.zero_()
        head[:, 2 * width : 3 * width] = codes.roll(1, 0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        for name, weights in attention(distance, (peak * width**0.5) ** 0.5).items():
            getattr(model.model.layers[1].self_attn, name).weight.data = weights

    config = transformers.LlamaConfig(**_SHAPE | {"num_hidden_layers": 2}, intermediate_size=hidden)
    write_model(target, transformers.LlamaForCausalLM, config, change=change)
    # Queries and keys are normalized, which doubles the squares of these.
    normed = torch.full((width,), (peak * width**0.5 / 2) ** 0.5)
    layer = {f"self_attn.{name}": each for name, each in attention(distance + 1, 1.0).items()}
    layer |= {"self_attn.q_norm": normed, "self_attn.k_norm": normed.clone()}
    layer |= {f"mlp.{name}_proj": torch.zeros(hidden, hidden) for name in ("gate", "up", "down")}
    layer |= {f"{name}_layernorm": torch.ones(hidden) for name in ("input", "post_attention")}
    tensors = {f"layers.0.{name}.weight": each for name, each in layer.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in ("norm", "hidden_norm")}
    draft.mkdir(parents=True)
    save_file(tensors | {"fc.weight": torch.eye(hidden)}, draft / "model.safetensors")
    facts = json.loads((target / "config.json").read_text()) | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_target_layers": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": masked, "target_layer_ids": [0]},
    }
    (draft / "config.json").write_text(json.dumps(facts))
    return target, draft


def build_mimo(path: Path) -> Path:
    """Write a random MiMo of one layer to `path`, with its MTP layer in the same files.

    The MTP layer is the target's layer. It does not use the target's hidden states, and sees all
    tokens but the first one. transformers does not know MiMo: to it, this is a Qwen2 with weights
    that it leaves out.
    """
    config = transformers.Qwen2Config(
        **_SHAPE | {"num_hidden_layers": 1}, intermediate_size=4 * HIDDEN
    )
    write_model(path, transformers.Qwen2ForCausalLM, config, change=_sharpen)
    mtp = "model.mtp_layers.0."
    _copy_weights(
        path,
        {"model.layers.0.": mtp, "model.norm.": f"{mtp}final_layernorm."},
        {
            f"{mtp}input_proj.weight": torch.cat(
                [torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1
            ),
            f"{mtp}token_layernorm.weight": torch.ones(HIDDEN),
            f"{mtp}hidden_layernorm.weight": torch.ones(HIDDEN),
        },
    )
    facts = json.loads((path / "config.json").read_text())
    facts |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(facts))
    return path


def build_qwen3_next_mtp(path: Path) -> Path:
    """Write a random Qwen3-Next to `path`, with its MTP layer in the same files.

    The MTP layer is the target's last one, with full attention. It does not use the target's hidden
    states, and sees all tokens but the first one, so most of its tokens are accepted.
    """

    def change(model: Any) -> None:
        embeddings = model.model.embed_tokens.weight.data
        embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
        attention = model.model.layers[-1].self_attn
        attention.q_norm.weight.data += 2  # a peaked softmax
        attention.o_proj.weight.data *= 2

    _write_qwen3_next(path, change)
    _copy_weights(
        path,
        {f"model.layers.{LAYERS - 1}.": "mtp.layers.0.", "model.norm.": "mtp.norm."},
        {
            "mtp.fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
            "mtp.pre_fc_norm_embedding.weight": torch.zeros(HIDDEN),  # 1 is added
            "mtp.pre_fc_norm_hidden.weight": torch.zeros(HIDDEN),
        },
    )
    return path


def build_qwen3_next_of_llama(target: Path, llama: Path, eagle3: Path) -> tuple[Path, Path, Path]:
    """Write a random Llama of one layer to `llama`, its EAGLE3 draft model to `eagle3`, and to
    `target` a Qwen3-Next whose last layer, with full attention, is that of the Llama. So most
    tokens of both draft models are accepted.

    The experts of the last layer are equal, and its gates are half open. Its queries and keys are
    rotations of parts of an embedding, which are normalized. So the norms of queries and keys,
    which a Llama lacks, change nothing.
    """
    parts, kv_parts = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    width, hidden = HIDDEN // parts, HIDDEN
    peak = 3.0  # a peaked softmax
    seeded = torch.Generator().manual_seed(0)

    def rotated(count: int) -> torch.Tensor:
        """The weights that rotate each of the first parts of an embedding."""
        weights = torch.zeros(count * width, hidden)
        random = torch.randn(count, width, width, generator=seeded)
        weights[:, : count * width] = torch.block_diag(*torch.linalg.qr(random)[0])
        return weights

    def change_llama(model: Any) -> None:
        embeddings = model.model.embed_tokens.weight.data.view(VOCAB, parts, width)
        embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt()
        layer = model.model.layers[0]
        layer.self_attn.q_proj.weight.data = rotated(parts) * peak
        layer.self_attn.k_proj.weight.data = rotated(kv_parts)
        # The EAGLE3 draft model lacks the embedding in what a layer adds to, so that is small.
        layer.self_attn.o_proj.weight.data *= 20
        layer.mlp.down_proj.weight.data *= 12

    own = {"num_hidden_layers": 1, "initializer_range": 0.15}
    config = transformers.LlamaConfig(**_SHAPE | own, intermediate_size=64)
    write_model(llama, transformers.LlamaForCausalLM, config, change=change_llama)
    _write_eagle3_draft(llama, eagle3)
    given = load_file(llama / "model.safetensors")

    def change_target(model: Any) -> None:
        def weight(name: str) -> torch.Tensor:
            return given[f"model.layers.0.{name}.weight"]

        model.model.embed_tokens.weight.data = given["model.embed_tokens.weight"]
        model.lm_head.weight.data = given["lm_head.weight"]
        layer = model.model.layers[-1]
        attention, experts = layer.self_attn, layer.mlp.experts
        queries = weight("self_attn.q_proj").view(parts, width, hidden) / peak
        with_gates = torch.cat([queries, torch.zeros_like(queries)], dim=1)
        attention.q_proj.weight.data = with_gates.flatten(0, 1)
        attention.q_norm.weight.data.fill_(peak - 1)  # 1 is added
        attention.k_proj.weight.data = weight("self_attn.k_proj")
        attention.v_proj.weight.data = weight("self_attn.v_proj")
        attention.o_proj.weight.data = 2 * weight("self_attn.o_proj")
        gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])
        experts.gate_up_proj.data = gate_up.repeat(experts.num_experts, 1, 1)
        experts.down_proj.data = weight("mlp.down_proj").repeat(experts.num_experts, 1, 1)
        layer.mlp.shared_expert.down_proj.weight.data.zero_()

    _write_qwen3_next(target, change_target, partial_rotary_factor=1.0)
    return target, llama, eagle3


def _write_qwen3_next(
    path: Path, change: Callable[[Any], None], *, partial_rotary_factor: float = 0.25
) -> None:
    """Write a random Qwen3-Next to `path`.

    The layers with recurrent states add little to what the last one gets, which has full attention:
    wrong states change logprobs by about 1.

    Args: change: what is particular to the model.
    """
    own = {"vocab_size": VOCAB, "partial_rotary_factor": partial_rotary_factor}
    config = transformers.Qwen3NextConfig(**QWEN3_NEXT | own)
    config.full_attention_interval = LAYERS  # SGLang reads these, and transformers drops them
    config.partial_rotary_factor = partial_rotary_factor

    def change_all(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # half of a state is forgotten in 10 to 1,000 tokens
                weight.data = torch.linspace(-7.5, -3, weight.numel()).view_as(weight)
            elif "linear_attn.out_proj" in name or (
                "down_proj" in name and f"layers.{LAYERS - 1}." not in name
            ):
                weight.data *= 0.01
        change(model)

    write_model(path, transformers.Qwen3NextForCausalLM, config, change=change_all)


def _copy_weights(path: Path, prefixes: dict[str, str], more: dict[str, Any]) -> None:
    """Add weights to a model: those whose names begin with a prefix, under another prefix, and
    `more`."""
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
