"""The costs of a transformer, and whether cake supports it, from its `config.json`.

A model that is known by name has a `config.json` here too, with only the fields that count. So a
name and the file of that model give the same answer.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.pooling_models import POOLING_ARCHITECTURES
from sglang_cake.simulator.layer_kinds import has_uncounted_layers, layer_kinds, sparse_index

Config = dict[str, Any]

_KV_VALUE_BYTES = 2  # SGLang keeps KV in BF16 or FP16 unless --kv-cache-dtype says otherwise
_DEFAULT_CONTEXT_TOKENS = 2048  # SGLang's, for a config without any length
_CONTEXT_FIELDS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_NOT_A_CONFIG = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_k")
_SHARED_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_PART_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
# The architectures for which SGLang 0.5.23 makes a second KV pool, of sliding windows.
WINDOW_POOLS = frozenset(
    {
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForCausalLMDSpark",
        "DeepseekV4ForCausalLMNextN",
        "DiffusionGemmaForBlockDiffusion",
        "EmbeddingGemma2Model",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "IQuestQ1ForCausalLM",
        "IQuestQ1MTP",
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2MTP",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p5MTP",
        "Step3p7ForConditionalGeneration",
        "UnlimitedOCRForCausalLM",
    }
)
# The architectures for which it makes one if their config has a window.
POOLS_BY_CONFIG = frozenset({"BeamForCausalLM", "LagunaForCausalLM"})


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer: the properties on which costs, memory and support depend.

    Attributes:
        heads, kv_heads: that tensor parallelism divides; MLA has one row of KV for all heads.
        active: parameters that a token passes, embeddings aside, and as many as attention to the
            tokens that an index selects costs; `parameters`: all.
        weight_bytes: of one parameter.
        pair_flops: of one (query, key) pair in attention, all layers.
        index_flops: of one (query, key) pair in an index, all layers. Every rank computes all.
        prefix_flops: of one token of the prefix in each step, all layers: with MLA, kernels for
            prefill take K and V of all heads, which are projected again from latent rows.
        token_flops: of one token beside the matrix products with weights and the pairs: windows,
            recurrent states, and the keys that sparse attention chooses.
        kv_head_bytes: of one token and one KV head, all layers that have KV of all tokens.
        state_bytes: of the recurrent states of a prompt, over all ranks.
        window_head_bytes: of the KV in the sliding windows of a prompt, for one KV head.
        context_tokens: a prompt must be shorter.
        refused: why a server refuses it, a clause; None: it is served.
        unmodelled: why its sizes are not known, a clause; None: they are.
        is_latent: MLA. All ranks hold the same KV, and it is stored once.
    """

    layers: int
    heads: int
    kv_heads: int
    active: float
    parameters: float
    weight_bytes: float
    pair_flops: float
    kv_head_bytes: int
    context_tokens: int
    refused: str | None = None
    unmodelled: str | None = None
    is_latent: bool = False
    token_flops: float = 0.0
    index_flops: float = 0.0
    prefix_flops: float = 0.0
    state_bytes: int = 0
    window_head_bytes: int = 0

    @property
    def has_experts(self) -> bool:
        return self.parameters > 1.5 * self.active

    def unshared(self, gpus: int) -> str | None:
        """Why `gpus` tensor-parallel ranks cannot share the heads, a clause; None: they can."""
        if self.heads % gpus == 0 and max(self.kv_heads, gpus) % min(self.kv_heads, gpus) == 0:
            return None
        return f"{gpus} GPUs cannot share {self.heads} heads, and {self.kv_heads} of KV, evenly"

    def rank_kv_bytes(self, gpus: int) -> int:
        """KV of one token on one of `gpus` tensor-parallel ranks: at least one head."""
        return max(1, self.kv_heads // gpus) * self.kv_head_bytes

    def read_bytes(self, gpus: int) -> int:
        """KV of one token as it is read: each rank reads what it holds."""
        return gpus * self.rank_kv_bytes(gpus)

    def stored_bytes(self, gpus: int) -> int:
        """KV of one token as it is stored. A head that several ranks hold, where there are more
        ranks than KV heads, is stored by each of them."""
        return self.kv_head_bytes if self.is_latent else self.read_bytes(gpus)

    def end_blocks(self, gpus: int, block_tokens: int, *, smaller: float = 1.0) -> int:
        """Blocks of one end state; 0: the model has none.

        Args:
            smaller: so many times smaller than 16 bits are values of KV, in windows too. Recurrent
                states are not: their type is set apart, and lossy codecs are refused for them.
        """
        windows = max(1, self.kv_heads // gpus) * self.window_head_bytes / smaller
        block_bytes = block_tokens * self.rank_kv_bytes(gpus) / smaller
        return math.ceil((self.state_bytes / gpus + windows) / block_bytes)


def _config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    vocab: int,
    context: int,
    **more: Any,
) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


MODELS: dict[str, Config] = {
    "llama-2-7b": _config(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _config(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-3.2-3b": _config(28, 3072, 24, 8, 8192, 128256, 131072, tie_word_embeddings=True),
    "llama-3.1-8b": _config(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _config(80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _config(126, 16384, 128, 8, 53248, 128256, 131072),
    "qwen3-8b": _config(36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128),
    "qwen3-32b": _config(64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128),
    "qwen3-30b-a3b": _config(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        width=6144,
        vocab=151936,
        context=40960,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "mistral-7b": _config(32, 4096, 32, 8, 14336, 32768, 32768),
    "deepseek-v3": _config(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        width=18432,
        vocab=129280,
        context=163840,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        quantization_config={"quant_method": "fp8"},
    ),
    "gpt-oss-120b": _config(
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        width=2880,
        vocab=201088,
        context=131072,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 18,
        architectures=["GptOssForCausalLM"],
        quantization_config={"quant_method": "mxfp4"},
    ),
    "kimi-linear-48b": _config(
        layers=27,
        hidden=2304,
        heads=32,
        kv_heads=32,
        width=9216,
        vocab=163840,
        context=1048576,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=1024,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    "qwen3.5-397b": _config(
        layers=60,
        hidden=4096,
        heads=32,
        kv_heads=2,
        width=1024,
        vocab=248320,
        context=262144,
        head_dim=256,
        attn_output_gate=True,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        num_experts=512,
        num_experts_per_tok=10,
        quantization_config={"quant_method": "fp8"},
    ),
}
MODELS["deepseek-v3.2"] = {
    **MODELS["deepseek-v3"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def find_shape(text: str) -> Shape:
    """A known model's name, a model folder, or a config.json. Raises: ConfigError."""
    if text.lower() in MODELS:
        return shape_of(MODELS[text.lower()])
    path = Path(text)
    if os.path.isdir(path):  # methods of Path raise where a folder may not be entered
        path /= "config.json"
    if not os.path.isfile(path):
        names = ", ".join(sorted(MODELS))
        raise ConfigError(
            f"--model {text!r} is neither a folder, nor a config.json, nor one of {names}"
        )
    try:
        return shape_of(json.loads(path.read_text()))
    except (*_NOT_A_CONFIG, OSError, RecursionError) as error:
        raise ConfigError(
            f"--model {text!r}: not a transformer's config.json ({error!r})"
        ) from None


def kv_token_bytes(model: Path, dtype: str) -> int:
    """Bytes of KV that a server with `--dtype` stores for one token of the model in a folder.

    Raises: ConfigError. `auto` is 16 bits, also for weights in float32.
    """
    kv_bytes = find_shape(str(model)).stored_bytes(1)
    return 2 * kv_bytes if dtype in ("float32", "float") else kv_bytes


def shape_of(whole: Config) -> Shape:
    """The shape of a parsed `config.json`.

    Raises: KeyError, TypeError, ValueError, AttributeError, ArithmeticError if it is none.
    """
    config = part = whole
    while names := [name for name in _PART_CONFIGS if isinstance(part.get(name), dict)]:
        part = part[names[0]]
        config = {**config, **part}
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    is_latent = "kv_lora_rank" in config
    if is_latent:
        attention, pair_width, kv_values = _latent_attention(config)
        kv_heads = 1
        prefix_flops = 2 * _latent_projection(config)
    else:
        head_dim = int(config.get("head_dim") or hidden // heads)
        attention = hidden * head_dim * 2 * (heads + kv_heads)
        if config.get("attn_output_gate"):
            attention += hidden * head_dim * heads
        pair_width, kv_values = 2 * head_dim, 2 * head_dim
        prefix_flops = 0
    kinds = layer_kinds(config, has_window_pool=_has_window_pool(whole, config))
    index = sparse_index(config)
    attended = 2 * heads * pair_width * kinds.window_tokens * kinds.window
    pair_flops, chosen_flops = 2 * heads * pair_width, 0
    if index.chosen_tokens:  # the index sees all pairs, attention the chosen keys, as latents
        pair_flops = prefix_flops = 0
        chosen_flops = 2 * heads * (2 * kv_values - int(config["qk_rope_head_dim"]))
    active_mlp, every_mlp = _mlp(config, layers)
    vocabulary = int(config.get("vocab_size") or 0) * hidden
    embeddings = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    mixers = (layers - kinds.state) * (attention + index.parameters)
    mixers += kinds.state * kinds.state_parameters
    if min(hidden, layers, heads, kv_heads, kv_values, active_mlp) <= 0:
        raise ValueError("a size is not positive")
    if kinds.full <= 0:
        raise ValueError("no layer has KV of all tokens")
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        active=mixers + active_mlp,
        parameters=mixers + every_mlp + embeddings,
        weight_bytes=_weight_bytes(config.get("quantization_config") or {}),
        pair_flops=pair_flops * kinds.full,
        kv_head_bytes=kinds.full * (kv_values * _KV_VALUE_BYTES + index.kv_bytes),
        context_tokens=_context_tokens(config),
        refused=_refused(whole),
        unmodelled=_unmodelled(whole, config),
        is_latent=is_latent,
        index_flops=2 * index.pair_width * kinds.full,
        prefix_flops=prefix_flops * kinds.full,
        token_flops=attended
        + chosen_flops * index.chosen_tokens * kinds.full
        + kinds.state * kinds.state_flops,
        state_bytes=kinds.state * kinds.state_bytes,
        window_head_bytes=kinds.window * kinds.window_tokens * kv_values * _KV_VALUE_BYTES,
    )


def _latent_attention(config: Config) -> tuple[int, int, int]:
    """MLA: parameters of a layer, the width of a pair in prefill, KV values of a token."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    key, value = int(config.get("qk_nope_head_dim", 128)), int(config.get("v_head_dim", 128))
    query_rank = int(config.get("q_lora_rank") or 0)
    query = heads * (key + rope)
    queries = query_rank * (hidden + query) if query_rank else hidden * query
    keys = hidden * (latent + rope) + _latent_projection(config)
    return queries + keys + heads * value * hidden, key + rope + value, latent + rope


def _latent_projection(config: Config) -> int:
    """MLA: parameters that make K and V of all heads from a latent row, in a layer."""
    widths = int(config.get("qk_nope_head_dim", 128)) + int(config.get("v_head_dim", 128))
    return int(config["kv_lora_rank"]) * int(config["num_attention_heads"]) * widths


def _mlp(config: Config, layers: int) -> tuple[int, int]:
    """MLP parameters of all layers: the ones that a token passes, and all."""
    hidden = int(config["hidden_size"])
    experts = _first_of(config, _EXPERT_FIELDS)
    if not experts:
        widths = _list(config["intermediate_size"])  # one, or that of each layer (Gemma 3n)
        dense = 3 * hidden * (sum(widths) if len(widths) > 1 else layers * widths[0])
        return dense, dense
    # Those of text tokens. ERNIE VL has others, narrower ones, for images.
    width, *others = _list(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config.get("intermediate_size_mlp"):  # Llama 4
        mixtures = layers // int(config.get("interleave_moe_layer_step") or 1)
        shared, dense_width = width, int(config["intermediate_size_mlp"])
    else:
        first = _first_of(config, ("first_k_dense_replace", "moe_layer_start_index"))
        mixtures = len(range(first, layers, int(config.get("moe_layer_interval") or 1)))
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        shared += _first_of(config, _SHARED_FIELDS) * width
        dense_width = int(config["intermediate_size"]) if mixtures < layers else 0
    dense = (layers - mixtures) * 3 * hidden * dense_width
    router = hidden * experts

    def of(used: int, width: int) -> int:
        return dense + mixtures * (3 * hidden * (used * width + shared) + router)

    chosen = _first_of(config, _CHOSEN_FIELDS) or 1  # `_unmodelled` names more experts than one
    return of(chosen, width), of(experts, width + sum(others))


def _first_of(config: Config, names: Sequence[str]) -> int:
    """The first of these fields that is set, for text tokens; 0: none is."""
    return next((_list(config[name])[0] for name in names if config.get(name)), 0)


def _list(value: Any) -> list[int]:
    """The value of a field that is a list in some models. Of multimodal ones, text comes first."""
    return [int(each) for each in (value if isinstance(value, list) else [value])]


def _weight_bytes(quantization: Config) -> float:
    """Bytes of one parameter; BF16 unless the checkpoint is quantized."""
    method = str(quantization.get("quant_method", "")).lower()
    algorithm = str(quantization.get("quant_algo", "")).upper()  # of ModelOpt
    if "FP4" in algorithm or method in ("mxfp4", "nvfp4", "modelopt_fp4"):
        return 0.56  # 4 bits, and a scale of 8 bits for 16 values
    if "fp8" in method or method in ("w8a8_int8", "modelopt"):
        return 1
    bits = quantization.get("bits")
    for group in (quantization.get("config_groups") or {}).values():
        bits = bits or (group.get("weights") or {}).get("num_bits")
    if quantization.get("load_in_4bit"):
        bits = 4
    return float(bits) / 8 if bits else 2


def _context_tokens(config: Config) -> int:
    """The context as SGLang derives it; with longrope, as far as cake supports it."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    length = next((config[name] for name in _CONTEXT_FIELDS if config.get(name)), None)
    if length is None:
        return _DEFAULT_CONTEXT_TOKENS
    original = scaling.get("original_max_position_embeddings")
    if kind == "longrope":  # a longer prompt's KV depends on its batch: cake refuses it
        return int(original or config.get("original_max_position_embeddings") or length)
    scales = config.get("rope_scaling") and original is None and kind != "llama3"
    return int(float(scaling.get("factor") or 1) * length) if scales else int(length)


# LongCat-Flash-Lite has the second, or in earlier files the third.
_NGRAM_FIELDS = ("use_ngram_embedding", "ngram_vocab_size_ratio", "oe_vocab_size_ratio")


def _refused(whole: Config) -> str | None:
    """Why a server refuses the model, as far as a `config.json` shows it."""
    names = _architectures(whole)
    if whole.get("is_encoder_decoder"):
        kind = "encoder-decoder models (cross-attention KV)"
    elif names and not any(_generates(name) or name in POOLING_ARCHITECTURES for name in names):
        kind = "models that generate no text, except for decoders whose result is made of the last "
        kind += "token (docs/troubleshooting.md)"
    else:
        return None
    return f"cake does not support {kind}"


def _unmodelled(whole: Config, config: Config) -> str | None:
    """Why the sizes of the model are not known."""
    if any(name.startswith("DeepseekV4") for name in _architectures(whole)):
        return "the compressed KV of DeepSeek V4 is not modelled"
    if int(config.get("index_kpool") or 1) > 1:
        return "an index whose keys stand for several tokens is not modelled"
    if any(config.get(name) for name in _NGRAM_FIELDS):
        return "the weights of n-gram embeddings are not modelled"
    if config.get("moe_layers_enum"):
        return "the experts of Step models are not modelled"
    if _first_of(config, _EXPERT_FIELDS) > 1 and not _first_of(config, _CHOSEN_FIELDS):
        return "experts are not modelled whose number for a token is not known"
    if has_uncounted_layers(config):
        return "layers of these kinds are not modelled"
    return None


def _architectures(whole: Config) -> list[str]:
    return [str(name) for name in whole.get("architectures") or ()]


def _has_window_pool(whole: Config, config: Config) -> bool:
    """Whether SGLang keeps KV of sliding windows in a pool of their own."""
    pools = WINDOW_POOLS | POOLS_BY_CONFIG if config.get("sliding_window") else WINDOW_POOLS
    return bool(config.get("is_hybrid_swa")) or not pools.isdisjoint(_architectures(whole))


def _generates(architecture: str) -> bool:
    """Whether the model generates text, instead of scoring or embedding it."""
    judges = ("ForSequenceClassification", "ForRewardModel", "ForMaskedLM")
    return "LMHead" in architecture or ("For" in architecture and not architecture.endswith(judges))
