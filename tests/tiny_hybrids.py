"""Tiny random models with sliding windows or recurrent layers, and their answers by transformers.

Their logits depend strongly on the whole prompt, as those of `sglang_cake.demo.models` do: weights
are large, attention is peaked, and recurrent states forget slowly. So wrong KV, a wrong window or a
wrong state changes the answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang_cake.demo.models import write_model

VOCAB = 32000  # as SGLang's own test kits expect
TRANSFORMERS = "transformers"  # folder of a configuration that SGLang reads in another form
LAYERS = 4  # three with a window or a state, and one with full attention
SHAPE = {
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
WINDOWS = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]  # kinds of layers
_GATED_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,  # unlike keys: a transposed state has another shape
}
QWEN3_NEXT = {
    **SHAPE,
    **_GATED_DELTA,
    "intermediate_size": 256,
    "full_attention_interval": LAYERS,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def build_mellum(path: Path, *, window_tokens: int) -> Path:
    """Write a dense Mellum to `path`. Its windows include the token that looks."""
    config = transformers.MellumConfig(
        **SHAPE,
        intermediate_size=256,
        sliding_window=window_tokens,
        layer_types=WINDOWS,
        mlp_layer_types=["dense"] * LAYERS,
    )
    return write_model(path, transformers.MellumForCausalLM, config, change=_sharpen)


def build_qwen3_next(path: Path) -> Path:
    """Write a Qwen3-Next to `path`: gated delta rule, and a mixture of four experts."""
    config = transformers.Qwen3NextConfig(**QWEN3_NEXT)
    config.full_attention_interval = LAYERS  # SGLang reads it, and transformers drops it
    return write_model(path, transformers.Qwen3NextForCausalLM, config, change=_sharpen)


def build_qwen3_5(path: Path) -> Path:
    """Write a dense Qwen3.5 to `path`: gated delta rule, gated attention, and an encoder of images.

    Its image token is `VOCAB - 10`, behind which are those for videos and around images.
    """
    config = transformers.Qwen3_5Config(
        text_config=SHAPE
        | {
            "intermediate_size": 256,
            **_GATED_DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": SHAPE["hidden_size"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
            "initializer_range": 0.08,
        },
        image_token_id=VOCAB - 10,
        video_token_id=VOCAB - 9,
        vision_start_token_id=VOCAB - 8,
        vision_end_token_id=VOCAB - 7,
        tie_word_embeddings=False,
    )
    # SGLang reads it, and transformers drops it.
    config.text_config.full_attention_interval = LAYERS
    return write_model(path, transformers.Qwen3_5ForConditionalGeneration, config, change=_sharpen)


def build_lfm2(path: Path) -> Path:
    """Write an LFM2 to `path`: short convolutions, whose states are their last inputs."""
    config = transformers.Lfm2Config(
        **SHAPE,
        intermediate_size=256,
        block_auto_adjust_ff_dim=False,
        pad_token_id=None,
        layer_types=["conv"] * (LAYERS - 1) + ["full_attention"],
    )
    return write_model(path, transformers.Lfm2ForCausalLM, config, change=_sharpen)


def build_kimi_linear(path: Path) -> Path:
    """Write a dense Kimi Linear to `path`: delta rule with a gate for each channel, and MLA."""
    layers = range(1, LAYERS + 1)  # as the model's own configuration counts them
    kda = {
        "kda_layers": list(layers)[:-1],
        "full_attn_layers": list(layers)[-1:],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    config = transformers.KimiLinearConfig(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"}
        | {"num_key_value_heads": 4},
        intermediate_size=256,
        kv_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
        first_k_dense_replace=LAYERS,
        linear_attn_config=kda,
    )
    write_model(path, transformers.KimiLinearForCausalLM, config, change=_sharpen)
    # What SGLang reads, and what this version of transformers writes in another way.
    _add_facts(
        path,
        linear_attn_config=kda,
        first_k_dense_replace=LAYERS,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        mla_use_nope=True,
    )
    file = path / "model.safetensors"
    named = load_file(file)
    save_file(
        {name.replace("block_sparse_moe", "mlp"): weight for name, weight in named.items()},
        file,
        metadata={"format": "pt"},
    )
    return path


def build_nemotron_h(path: Path) -> Path:
    """Write a dense Nemotron-H to `path`: Mamba2."""
    config = transformers.NemotronHConfig(
        **{name: value for name, value in SHAPE.items() if name != "num_hidden_layers"},
        hybrid_override_pattern="M-M-M-*-",
        intermediate_size=256,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,  # unlike heads: a transposed state has another shape
        n_groups=2,
        chunk_size=64,
        time_step_min=1e-9,
        pad_token_id=None,
    )
    write_model(path, transformers.NemotronHForCausalLM, config, change=_sharpen)
    _add_facts(path, hybrid_override_pattern="M-M-M-*-", mamba_n_groups=2)
    return path


def build_granite_4(path: Path) -> Path:
    """Write a Granite 4 to `path`: Mamba2, and a mixture of four experts beside a shared one."""
    config = transformers.GraniteMoeHybridConfig(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"},
        intermediate_size=64,
        shared_intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["mamba"] * (LAYERS - 1) + ["attention"],
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,  # unlike heads: a transposed state has another shape
        mamba_n_groups=1,
        mamba_chunk_size=64,
        attention_multiplier=32**-0.5,
    )
    return write_model(path, transformers.GraniteMoeHybridForCausalLM, config, change=_sharpen)


def build_falcon_h1(path: Path) -> Path:
    """Write a Falcon-H1 to `path`: each layer has attention and Mamba2 side by side."""
    config = transformers.FalconH1Config(
        **SHAPE,
        intermediate_size=256,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,  # unlike heads: a transposed state has another shape
        mamba_n_groups=2,
        mamba_chunk_size=64,
    )
    return write_model(path, transformers.FalconH1ForCausalLM, config, change=_sharpen)


def build_gemma_4(path: Path, *, window_tokens: int) -> Path:
    """Write the text of a Gemma 4 to `path`: heads of full attention are wider than those of
    windows, and an embedding of each layer is added."""
    config = transformers.Gemma4TextConfig(
        **SHAPE,
        intermediate_size=256,
        sliding_window=window_tokens,
        layer_types=WINDOWS,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
    )
    write_model(path, transformers.Gemma4ForCausalLM, config, change=_sharpen)
    shapes = {"swa_head_dim": 32, "swa_v_head_dim": 32, "swa_num_key_value_heads": 2}
    _add_form(path, per_layer_config=None, head_dim=64, **shapes)
    return path


def build_mimo_v2(path: Path, *, window_tokens: int) -> Path:
    """Write a dense MiMo V2 to `path`: V is narrower than K, and windows have sinks, and twice as
    many KV heads as full attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = transformers.MiMoV2FlashConfig(
        **SHAPE,
        intermediate_size=256,
        v_head_dim=16,
        sliding_window=window_tokens,
        layer_types=WINDOWS,
        mlp_layer_types=["dense"] * LAYERS,
        rope_parameters=dict.fromkeys(WINDOWS, rope),
    )
    write_model(path, transformers.MiMoV2FlashForCausalLM, config, change=_sharpen)
    shapes = {"swa_head_dim": 32, "swa_v_head_dim": 16, "swa_num_key_value_heads": 4}
    _add_form(
        path,
        rope_parameters=rope,
        partial_rotary_factor=0.5,
        hybrid_layer_pattern=[1] * (LAYERS - 1) + [0],
        moe_layer_freq=[0] * LAYERS,
        sliding_window_size=window_tokens - 1,  # without the token that looks
        add_swa_attention_sink_bias=True,
        swa_num_attention_heads=4,
        layernorm_epsilon=config.rms_norm_eps,
        **shapes,
    )
    return path


def build_gpt_oss(path: Path, *, window_tokens: int) -> Path:
    """Write a gpt-oss to `path`: windows with sinks, and a mixture of four experts."""
    config = transformers.GptOssConfig(
        **SHAPE,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=window_tokens,
        layer_types=WINDOWS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return write_model(path, transformers.GptOssForCausalLM, config, change=_sharpen)


def build_llama_4(path: Path, *, chunk_tokens: int) -> Path:
    """Write the text of a dense Llama 4 to `path`: a token sees those of its own chunk, and in the
    layer with full attention, which has no positions, all."""
    config = transformers.Llama4TextConfig(
        **SHAPE,
        intermediate_size=64,
        intermediate_size_mlp=256,
        interleave_moe_layer_step=2 * LAYERS,
        attention_chunk_size=chunk_tokens,
        floor_scale=256,
        use_qk_norm=False,  # SGLang computes it in bfloat16, if there is no GPU
    )
    write_model(path, transformers.Llama4ForCausalLM, config, change=_sharpen)
    # Under its own name, SGLang makes no pool of windows for it.
    _add_facts(path, architectures=["Llama4ForConditionalGeneration"])
    return path


def build_gemma_3(path: Path, *, window_tokens: int) -> Path:
    """Write the text of a Gemma 3 to `path`."""
    config = transformers.Gemma3TextConfig(
        **(SHAPE | {"tie_word_embeddings": True}),  # SGLang reads no other head
        intermediate_size=256,
        sliding_window=window_tokens,
        query_pre_attn_scalar=32,
        layer_types=WINDOWS,
    )
    return write_model(path, transformers.Gemma3ForCausalLM, config, change=_sharpen)


def build_step_3_5(path: Path, *, window_tokens: int) -> Path:
    """Write the text of a dense Step 3.5 to `path`: a gate for each head, and windows with more
    heads than full attention."""
    text = transformers.Step3p7TextConfig(
        **SHAPE,
        intermediate_size=256,
        sliding_window=window_tokens,
        layer_types=WINDOWS,
        mlp_layer_types=["dense"] * LAYERS,
        num_sliding_attention_heads=8,
        pad_token_id=0,
    )
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
    config = transformers.Step3p7Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=VOCAB - 10
    )
    write_model(path, transformers.Step3p7ForConditionalGeneration, config, change=_sharpen)
    facts = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    _set_form(
        path,
        facts
        | {
            "architectures": ["Step3p5ForCausalLM"],
            "model_type": "step3p5",
            "intermediate_size": 256,
            "num_attention_groups": 2,
            "sliding_window": window_tokens - 1,  # without the token that looks
            "layer_types": WINDOWS,
            "moe_layers_enum": "99",
            "rope_theta": [10000.0] * LAYERS,
            "partial_rotary_factors": [1.0] * LAYERS,
            "use_head_wise_attn_gate": True,
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
            "per_layer_config": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "rms_norm_eps": text.rms_norm_eps,
            "torch_dtype": "float32",
        },
    )
    return path


def _add_form(path: Path, **facts: object) -> None:
    """The configuration with these facts, for SGLang; that of transformers is kept in a folder."""
    _set_form(path, json.loads((path / "config.json").read_text()) | facts)


def _set_form(path: Path, facts: dict[str, object]) -> None:
    """These facts alone, for SGLang."""
    file = path / "config.json"
    (path / TRANSFORMERS).mkdir()
    file.rename(path / TRANSFORMERS / file.name)
    file.write_text(json.dumps(facts))


def _add_facts(path: Path, **facts: object) -> None:
    """Facts of the configuration instead of those in the way of transformers."""
    file = path / "config.json"
    known = json.loads(file.read_text())
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        known.pop(name, None)
    file.write_text(json.dumps(known | facts))


def _sharpen(model: Any) -> None:
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "q_layernorm.weight")):
            weight.data += 2  # a peaked softmax
        elif name.endswith("A_log"):  # half of a state is forgotten in 10 to 1,000 tokens
            weight.data = torch.linspace(-7.5, -3, weight.numel()).view_as(weight)
        elif name.endswith("sinks"):  # SGLang keeps them in bfloat16
            weight.data = torch.linspace(-1, 2, len(weight)).bfloat16().float()


@dataclass(frozen=True, slots=True)
class Expected:
    """A greedy answer: tokens, and their natural log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Transformers:
    """The model at `path`, run by transformers.

    From then on this process has one thread for PyTorch: with servers and another worker of the
    tests beside it, two threads wait for each other, and take ten times as long.

    Args: seeing: with its tower; of the models here Qwen3.5 has one.
    """

    def __init__(self, path: Path, *, seeing: bool = False) -> None:
        torch.set_num_threads(1)
        config = transformers.AutoConfig.from_pretrained(
            path / TRANSFORMERS if (path / TRANSFORMERS).exists() else path
        )
        seeing |= config.model_type == "step3p7"  # it has no class for text alone
        kind: Any = transformers.AutoModelForCausalLM
        if seeing:
            kind = transformers.AutoModelForImageTextToText
        self._model = kind.from_pretrained(path, config=config, dtype=torch.float32).eval()

    def answer(self, ids: Sequence[int], new_tokens: int, **media: Any) -> Expected:
        """The media are what the model's processor would return beside the tokens."""
        given = torch.tensor([list(ids)])
        made = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **media,
        )
        tokens = made.sequences[0, len(ids) :].tolist()
        logprobs = [
            logits[0].log_softmax(-1)[token].item()
            for token, logits in zip(tokens, made.logits, strict=True)
        ]
        return Expected(tokens, logprobs)
