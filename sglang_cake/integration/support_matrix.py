"""The supported and the refused models and settings. Each reason for a refusal is one line,
reported before a model is loaded.

SGLang changes settings while it resolves them: the page size, and the radix cache, which is off for
some models. So `unsupported` checks the settings as they were given, and again when they are
resolved. `check_context` checks once more in the scheduler process, which has the actual pools.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_cake.config import CakeConfig
from sglang_cake.core.codec_names import LOSSY, RAW
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.pooling_models import POOLING_ARCHITECTURES
from sglang_cake.integration.memory.kv_shard import wrong_head_groups

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The kinds of a model that decide what KV it has, and whether tokens alone are its key."""

    is_hybrid_swa: bool = False
    is_hybrid_ssm: bool = False
    is_encoder_decoder: bool = False
    is_attention_free: bool = False  # keeps states, and no KV
    is_windows_only: bool = False  # sliding windows in all layers, in a pool of their own
    is_prompt_aware: bool = False  # a token of an answer sees the prompt and a window of the answer
    is_generation: bool = True
    pools_last_token: bool = False  # its result is made of the last token, and attention is causal
    is_multimodal: bool = False
    is_sparse: bool = False  # keeps an index beside K and V
    is_compressed: bool = False  # keeps KV of several tokens as one
    is_compressed_index: bool = False  # keeps index keys of several tokens as one
    is_ngram: bool = False  # embeds the tokens before a token with it
    is_ngram_table: bool = False  # and finds them in a table that only some steps fill
    is_mla: bool = False
    # From this length on, a prompt changes the RoPE of its whole batch; None: never.
    batch_rope_tokens: int | None = None

    @property
    def has_end_states(self) -> bool:
        """Whether a prefix needs more than the KV of its blocks."""
        return self.is_hybrid_swa or self.is_hybrid_ssm

    @property
    def has_windows_and_states(self) -> bool:
        """Whether an end state has two parts."""
        return self.is_hybrid_swa and self.is_hybrid_ssm

    @classmethod
    def of(cls, model: "ModelConfig") -> "ModelTraits":
        """The traits as SGLang itself derives them from the model's configuration."""
        from sglang.srt.configs.hybrid_arch import glm5_next_config, mambaish_config
        from sglang.srt.configs.model_config import (
            AttentionArch,
            is_deepseek_dsa,
            is_deepseek_v4,
            is_minimax_sparse,
        )

        config = model.hf_config
        recurrent = mambaish_config(model) or glm5_next_config(model)
        return cls(
            is_hybrid_swa=bool(model.is_hybrid_swa),
            is_hybrid_ssm=recurrent is not None,
            is_encoder_decoder=bool(model.is_encoder_decoder),
            is_attention_free=getattr(recurrent, "full_attention_layer_ids", None) == [],
            is_windows_only=getattr(model, "full_attention_layer_ids", None) == [],
            is_prompt_aware=PROMPT_AWARE in (config.architectures or ()),
            is_generation=bool(model.is_generation),
            pools_last_token=not model.is_generation and pools_last_token(model),
            is_multimodal=bool(model.is_multimodal),
            is_sparse=bool(is_deepseek_dsa(config) or is_minimax_sparse(config)),
            is_compressed=bool(is_deepseek_v4(config)),
            is_compressed_index=bool(getattr(model.hf_text_config, "indexer_n_heads", None)),
            is_ngram=bool(model.use_ngram_embedding or model.use_engram),
            is_ngram_table=bool(model.use_ngram_embedding),
            is_mla=model.attention_arch == AttentionArch.MLA,
            batch_rope_tokens=batch_rope_tokens(model),
        )


def batch_rope_tokens(model: "ModelConfig") -> int | None:
    """The length from which on a prompt changes the RoPE of its whole batch; None if none may.

    Then equal tokens may have unequal KV. With longrope, if one prompt is longer than the original
    context, SGLang rotates the keys of the whole batch by the long factors
    (Phi3LongRoPEScaledRotaryEmbedding). With dynamic RoPE, SGLang rotates all prompts alike, and
    models of the Transformers backend by the longest prompt (`dynamic_rope_update`).
    """
    config = model.hf_text_config
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [found, *(part for part in found.values() if isinstance(part, dict))]
    for rope in kinds:  # for the whole model, or one for each kind of layer
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope" or (kind == "dynamic" and is_of_transformers(model)):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            original = original or config.max_position_embeddings
            return int(original) if model.context_len > original else None
    return None


def is_of_transformers(model: "ModelConfig") -> bool:
    """Whether SGLang runs the model by its Transformers backend."""
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    return bool(get_resolved_model_impl(model) == ModelImpl.TRANSFORMERS)


# The architecture whose decoding sees the tokens of the prompt and a window of the answer.
PROMPT_AWARE = "UnlimitedOCRForCausalLM"

MEDIA = "multimodal, requests with images or videos"


class Family(NamedTuple):
    """A kind of models that is served.

    Attributes:
        trait: the attribute of `ModelTraits` that tells these models; None: all others.
        name: as in README's table.
        proven: how tests ran it, and with which models.
    """

    trait: str | None
    name: str
    proven: str


# A model of several kinds is served if all of them are.
FAMILIES = (
    Family(None, "MHA, GQA", "server on a CPU: Llama"),
    Family("is_mla", "MLA", "server on a CPU: DeepSeek V2"),
    Family("is_multimodal", "multimodal, requests of text", "server on a CPU: Qwen3-VL"),
    Family(
        "is_multimodal",
        MEDIA,
        "server on a CPU: Qwen3-VL, Qwen3-VL with a video, Qwen3.5, Qwen2.5-VL, GLM-4.1V",
    ),
    Family(
        "pools_last_token",
        "embeddings, rewards and classes, of the last token",
        "server on a CPU: Llama, Llama of the Transformers backend",
    ),
    Family(
        "is_compressed",
        "compressed attention",
        "components on a CPU: DeepSeek V4, DeepSeek V4 with online sums, DeepSeek V4.1, "
        "DeepSeek V4.1 with bounded replay, DeepSeek V4.1 with windows of requests, the same "
        "with DSPARK",
    ),
    Family(
        "is_hybrid_swa",
        "sliding windows in a pool of their own",
        "server on a CPU: gpt-oss, Gemma 4, Llama 4, MiMo V2, Step 3.5, Mellum",
    ),
    Family(
        "is_hybrid_ssm",
        "Mamba and linear attention",
        "server on a CPU: Qwen3-Next, Qwen3.5, Kimi Linear, Nemotron-H, Granite 4, Falcon-H1, LFM2",
    ),
    Family(
        "has_windows_and_states",
        "sliding windows and states together",
        "components on a CPU: pools of both",
    ),
    Family(
        "is_sparse",
        "sparse attention with an index",
        "components on a CPU: DSA, DSA with a pooled index, MiniMax M3",
    ),
    Family(
        "is_compressed_index",
        "sparse attention with a compressed index, beside linear attention",
        "components on a CPU: QSA, QSA in a tree with states",
    ),
    Family("is_ngram", "n-gram embeddings", "components on a CPU: LongCat-Flash-Lite's table"),
)

# What is not supported, and what helps if something does, by the attribute of `ModelTraits` that
# tells these models. The first one that fits is reported.
REFUSED = {
    "is_encoder_decoder": "encoder-decoder models (cross-attention KV)",
    "is_attention_free": "models without attention (a prefix is one state, without KV)",
    "is_prompt_aware": "models whose answers see all of the prompt and a window of themselves "
    "(their KV depends on where a prompt ends)",
    "is_windows_only": "sliding windows in all layers, in a pool of their own: set "
    "--disable-hybrid-swa-memory",
}

# The algorithms of speculative decoding that are served, as for `--speculative-algorithm`, and
# whether a draft model keeps KV of its own.
SPECULATION = {
    "NGRAM": False,
    "STANDALONE": True,
    "EAGLE": True,
    "EAGLE3": True,
    "NEXTN": True,
    "FROZEN_KV_MTP": False,  # SGLang's, for NEXTN with Gemma 4
    "DFLASH": True,
    "DSPARK": True,
    "UNO": False,  # drafts by an adapter, in slots that the model itself fills again
}


def has_draft_kv(args: "ServerArgs") -> bool:
    """Whether these settings make a draft model with KV of its own. False for an algorithm that is
    not served."""
    name = args.speculative_algorithm
    if (found := SPECULATION.get((name or "").upper())) is not None:
        return found
    plugin = plugin_algorithm(name)
    return plugin is not None and bool(plugin.has_draft_kv())


def plugin_algorithm(name: str | None) -> "CustomSpecAlgo | None":
    """The algorithm of speculative decoding that a plug-in of SGLang has registered by this name;
    None: it is SGLang's own, or nobody's."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        found = SpeculativeAlgorithm.from_string(name)
    except ValueError:
        return None
    return None if isinstance(found, SpeculativeAlgorithm) else found


def _is_unknown(algorithm: str | None) -> bool:
    known = algorithm is None or algorithm.upper() in SPECULATION
    return not known and plugin_algorithm(algorithm) is None


# Models whose image and video tokens were reviewed: the KV of such a token is a function of
# its item, of the tokens before it and of its position, however the prompt is cut into chunks. (In
# Gemma 3, for example, the tokens of an image see each other only as far as one chunk has them.)
MEDIA_ARCHITECTURES = frozenset(
    {
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "InternVLChatModel",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)


def pools_last_token(model: "ModelConfig") -> bool:
    """Whether the result of a model that generates no text is made of its last token, as far as its
    configuration tells."""
    from sglang.srt.configs.model_config import ModelImpl

    names = model.hf_config.architectures
    is_reviewed = bool(names) and POOLING_ARCHITECTURES.issuperset(names)
    if is_reviewed and model.model_impl != ModelImpl.TRANSFORMERS:
        return True
    if not is_of_transformers(model):
        return False
    # The checkpoint says it, for SGLang's EmbeddingMixin.
    return str(getattr(model.hf_config, "pooling_type", "LAST")).upper() != "CLS"


# Field of SGLang's ServerArgs, the values that cake does not support, and the reason.
_Rule = tuple[str, Callable[[Any], bool], str]


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _off(field: str, reason: str) -> _Rule:
    """The rule of a setting that must not be set."""
    return field, bool, f"{reason}: remove {_flag(field)}"


def _one(field: str, kind: str) -> _Rule:
    """The rule of a number of ranks that must be one."""
    return field, lambda n: n > 1, f"does not support {kind} parallelism: set {_flag(field)} 1"


RULES: tuple[_Rule, ...] = (
    (
        "device",
        lambda name: name is not None and not name.startswith(("cpu", "cuda")),
        "copies KV on CPUs and in CUDA: set --device cpu or cuda, or remove --enable-cake",
    ),
    _off("disable_radix_cache", "needs the radix cache"),
    _off("disaggregation_decode_enable_offload_kvcache", "takes the place of offloading"),
    _off("encoder_only", "does not support encoder servers"),
    _one("pp_size", "pipeline"),
    _one("attn_cp_size", "context"),
    _one("dcp_size", "context"),
    (
        "speculative_algorithm",
        _is_unknown,
        f"does not know what this speculative algorithm keeps: set --speculative-algorithm to one "
        f"of {', '.join(SPECULATION)}, or to one of a plug-in",
    ),
    _off("enable_mis", "does not support multi-item scoring"),
    _off("enable_hisparse", "does not support HiSparse"),
    _off("enable_pdmux", "does not support PD multiplexing"),  # its scheduler loop never polls
    _off("dllm_algorithm", "does not support diffusion LLMs"),
    _off("enable_hierarchical_cache", "takes the place of HiCache"),
    _off("enable_lmcache", "takes the place of LMCache"),
    _off("enable_flexkv", "takes the place of FlexKV"),
    _off("enable_unified_cache_external_linker", "takes the place of other linkers"),
    _off("enable_kv_cache_sharding", "does not support sharded KV"),
    _off("prefill_only_disable_kv_cache", "needs the KV cache"),
    # SGLang keeps these by slot, in memory that no block has.
    _off("enable_return_routed_experts", "cannot return experts of loaded tokens"),
    _off("enable_return_indexer_topk", "cannot return the index of loaded tokens"),
    (
        "kv_canary",
        lambda mode: mode not in (None, "none"),
        "fills slots that SGLang's canary has no notes of: remove --kv-canary",
    ),
    # A session keeps its KV outside the tree, so loaded KV cannot be attached to it.
    _off("enable_streaming_session", "does not support streaming sessions"),
)

# Attention backends of a group's members: those that pass the layer gate before they read KV.
_GROUP_BACKENDS = {"cpu": "torch_native", "cuda": "flashinfer"}


def unsupported(
    args: "ServerArgs", model: ModelTraits | None, block_tokens: int | None
) -> str | None:
    """Why cake does not support these settings, in one line; None if it does.

    Args:
        args: SGLang's ServerArgs or a view of it, raw or resolved.
        model: None while the model's configuration has not been read. If it is given, `args` are
            resolved, and were supported as the user gave them.
        block_tokens: None: none are set.
    """
    # The model is checked first: for some kinds SGLang turns off what the rules below require.
    kind = None if model is None else unsupported_model(model)
    if kind is not None:
        return kind
    if may_decode_for_others(args):
        if not args.disaggregation_decode_enable_radix_cache:
            return (
                "cake stores what the radix cache of a decode server has: set "
                "--disaggregation-decode-enable-radix-cache, or remove --enable-cake"
            )
        if model is not None and model.is_hybrid_swa:
            return (
                "cake does not support sliding windows on a decode server: remove --enable-cake; "
                "prefill servers that do not change roles may have it"
            )
    for field, is_unsupported, reason in RULES:
        if is_unsupported(getattr(args, field)):
            if model is not None and field == "disable_radix_cache":
                why = "for this model"
                if args.enable_deterministic_inference:
                    why += ", or for --enable-deterministic-inference with its attention backend"
                return (
                    f"cake needs the radix cache, which SGLang turns off {why}: remove "
                    "--enable-cake"
                )
            return f"cake {reason}"
    if model is not None and not model.is_generation and has_draft_kv(args):
        return (
            "cake cannot store draft models beside models that generate no text, for which SGLang "
            "computes no drafts: remove --speculative-algorithm"
        )
    return _unsupported_ngrams(args, model) or _page_mismatch(args.page_size, block_tokens)


def may_decode_for_others(args: "ServerArgs") -> bool:
    """Whether this is a decode server, or may become one."""
    if args.disaggregation_mode == "null":
        return False
    return bool(args.disaggregation_mode == "decode" or args.enable_pd_role_switch)


def _unsupported_ngrams(args: "ServerArgs", model: ModelTraits | None) -> str | None:
    """SGLang fills its table of earlier tokens before steps that only prefill, and when it samples
    (NgramEmbeddingManager). After all other steps KV is that of other tokens."""
    if model is None or not model.is_ngram_table:
        return None
    remedy = None
    if may_decode_for_others(args):
        remedy = "remove --enable-cake on decode servers; prefill servers may have it"
    elif args.enable_mixed_chunk:
        remedy = "remove --enable-mixed-chunk"
    elif args.speculative_algorithm is not None:
        remedy = "remove --speculative-algorithm"
    if remedy is None:
        return None
    return f"cake cannot store n-gram embeddings that SGLang takes from a stale table: {remedy}"


def unsupported_group(args: "ServerArgs", model: ModelTraits, config: CakeConfig) -> str | None:
    """Why this server cannot be a member of a KV-Runahead group; None if it can, or if the settings
    name no group.

    Args: args: resolved.
    """
    if config.runahead_peers is None:
        return None
    reason = _unfit_device(args, model)
    if args.disaggregation_mode != "null":
        reason = "does not support prefill/decode disaggregation: remove --disaggregation-mode"
    if model.is_multimodal or not model.is_generation:
        reason = "does not support multimodal and embedding models: serve another model"
    if model.has_end_states:
        reason = "does not support models with pools for sliding windows or recurrent states"
    if args.speculative_algorithm is not None:
        reason = "does not support speculative decoding: remove --speculative-algorithm"
    if args.enable_deterministic_inference:  # spans end on other tokens than SGLang's chunks do
        reason = "does not support --enable-deterministic-inference: remove it"
    if reason is None and config.runahead_transport == "cuda-ipc" and args.device != "cuda":
        reason = "needs --device cuda for --cake-runahead-transport cuda-ipc: set tcp or mooncake"
    if reason is not None:
        return f"KV-Runahead {reason}, or remove --cake-runahead-peers"
    for field in ("tp_size", "dp_size"):
        if getattr(args, field) > 1:
            return f"KV-Runahead needs one server a worker: set {_flag(field)} 1"
    return None


def _unfit_device(args: "ServerArgs", model: ModelTraits) -> str | None:
    backend = _GROUP_BACKENDS.get(args.device)
    if backend is None:
        return "runs with --device cpu or cuda: set one of them"
    if model.is_sparse or model.is_ngram:
        return "does not support models with an index or of n-grams: use another model"
    if (args.prefill_attention_backend or args.attention_backend) != backend:
        return f"needs --attention-backend {backend} with --device {args.device}: set it"
    if args.device == "cpu":
        return None
    if args.cuda_graph_config.prefill.backend != "disabled":
        return "stops a forward between layers, and a graph cannot be: disable prefill CUDA graphs"
    if model.is_mla:
        return "supports MLA models on CPUs only: set --device cpu"
    return None


def unsupported_codec(args: "ServerArgs", model: ModelTraits, config: CakeConfig) -> str | None:
    """Why the codec cannot encode the KV cache that these settings make; None if it can.

    A quantized checkpoint may imply an 8-bit KV cache without a flag. That is known only in the
    scheduler process, where the codec is checked again.

    Args: args: resolved; `auto` is the model's own dtype.
    """
    if config.codec not in LOSSY:
        return None
    if model.is_sparse:
        why = "takes K and V only, and this model keeps an index beside them"
    elif has_draft_kv(args):
        why = "takes K and V of one model only, and a draft model has its own"
    elif args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        why = f"has no bits to lose with --kv-cache-dtype {args.kv_cache_dtype}"
    else:
        return None
    return f"cake's codec {config.codec} {why}: set --cake-codec raw, zstd or auto"


def unsupported_head_groups(
    args: "ServerArgs", model: ModelTraits, config: CakeConfig
) -> str | None:
    """Why the KV of this server cannot be stored in groups of heads; None if it can, or if the
    settings name no groups.

    Args: args: resolved.
    """
    if config.head_groups is None or (model.is_mla and not model.has_end_states):
        return None  # pools of MLA are looked at in the scheduler process
    ranks = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
    if config.head_groups % ranks:
        return wrong_head_groups(config.head_groups, ranks)
    if config.head_groups == ranks:
        return None
    if model.has_end_states:
        return (
            "cake cannot divide sliding windows and recurrent states by heads: set "
            f"--cake-head-groups {ranks}, or remove it"
        )
    if args.enable_deterministic_inference:
        return (
            "another number of tensor-parallel ranks rounds KV differently, and "
            f"--enable-deterministic-inference excludes that: set --cake-head-groups {ranks}, or "
            "remove it"
        )
    return None


def unsupported_when_resolved(
    args: "ServerArgs", model: ModelTraits, config: CakeConfig
) -> str | None:
    """Why cake does not support a server with this model; None if it does. Args: args: resolved."""
    return (
        unsupported(args, model, config.block_tokens)
        or unsupported_group(args, model, config)
        or unsupported_codec(args, model, config)
        or unsupported_head_groups(args, model, config)
    )


def check_context(
    ctx: "TreeCacheBuildContext", config: CakeConfig, drafts: Sequence[Any] = ()
) -> None:
    """The last check, in a scheduler process, with the actual settings and pools.

    Args: drafts: the draft models that this process has loaded.

    Raises: ConfigError, one line.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    params = ctx.params
    reason = None
    if ctx.disable_radix_cache or params.disable:
        reason = "cake needs the radix cache, which SGLang turned off for this model or these flags"
    elif (reason := unsupported_pools(ctx, config)) is None:
        view = resolving_view(ctx.server_args)
        traits = ModelTraits.of(ctx.model_config)
        reason = (
            unsupported_when_resolved(view, traits, config)
            or _page_mismatch(params.page_size, config.block_tokens)
            or unsupported_drafts(view, drafts, params.req_to_token_pool)
            or unsupported_vectors(traits, ctx.tp_worker)
        )
    if reason is not None:
        raise ConfigError(reason)


def unsupported_drafts(args: "ServerArgs", drafts: Sequence[Any], requests: Any) -> str | None:
    """Why the draft models of this process cannot be restored with a prompt; None if they can, or
    if there are none. Without its KV of a prompt, a draft model proposes wrong tokens, so that a
    hit would be slower than a miss.

    Args: drafts: as `LoadedDraft`. requests: the pool of requests of the model itself.
    """
    from sglang.srt.environ import envs

    from sglang_cake.integration.compat import drops_states_beyond_answers

    if has_draft_kv(args) != bool(drafts):
        return (
            f"cake did not see the draft model of {args.speculative_algorithm} being loaded: "
            "remove --speculative-algorithm"
        )
    own = getattr(requests, "mamba_pool", None)
    if args.speculative_algorithm and own is not None and not drops_states_beyond_answers():
        return (
            "cake does not support speculative decoding with recurrent states of SGLang 0.5.22: "
            "install 0.5.23"
        )
    for draft in drafts:
        if draft.states in (None, own):
            continue
        # whether a request's states have the same slot in both pools
        slots = draft.runner.req_to_token_pool.req_index_to_mamba_index_mapping
        if slots is not requests.req_index_to_mamba_index_mapping:
            return (
                "cake does not support a draft model with recurrent states in slots of its own: "
                "remove --speculative-algorithm"
            )
    unset = None
    skips = drafts and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()
    if skips and (args.speculative_adaptive or args.speculative_num_steps == 0):
        unset = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
    # Then the KV of the last accepted tokens is written in the next step, after it has been saved.
    defers = getattr(envs, "SGLANG_DSPARK_DEFER_CONTEXT_KV", None)  # not in 0.5.22
    if args.speculative_algorithm == "DSPARK" and defers is not None and defers.get():
        unset = "SGLANG_DSPARK_DEFER_CONTEXT_KV"
    if unset is not None:
        return f"cake needs the KV of the draft model for all tokens: unset {unset}"
    return None


def unsupported_vectors(traits: ModelTraits, worker: Any) -> str | None:
    """Why the KV of a loaded model that generates no text depends on later tokens; None if it does
    not. Of a model of the Transformers backend, only its layers tell.

    Args: worker: SGLang's TpModelWorker.
    """
    if traits.is_generation:
        return None
    layers = getattr(worker.model_runner.model, "attention_instances", {})
    if any(layer.is_cross_attention for layer in layers.values()):  # SGLang's mark for both ways
        return "cake does not support models that see later tokens: remove --enable-cake"
    return None


def keys_media(ctx: "TreeCacheBuildContext") -> bool:
    """Whether the model's images, videos and audio may be keyed: it was reviewed, and is the one of
    SGLang itself; and SGLang tells media apart by more than 30 bits, as from 0.5.23 on."""
    from sglang.srt.managers.schedule_batch import MultimodalDataItem

    if not hasattr(MultimodalDataItem, "set_identity"):
        return False
    # Not that of the architecture: with another implementation, media must not be cut.
    model = type(ctx.tp_worker.model_runner.model)
    return model.__name__ in MEDIA_ARCHITECTURES and model.__module__.startswith("sglang.")


def unsupported_pools(ctx: "TreeCacheBuildContext", config: CakeConfig) -> str | None:
    """Why the pools of sliding windows and of recurrent states cannot be stored; None if they can,
    or if there are none."""
    from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.unified_hybrid_swa import (
        UnifiedMambaSWATokenToKVPoolAllocator,
        UnifiedSWATokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.mem_cache.unified_memory_pool import UnifiedHybridReqToTokenPool

    params = ctx.params
    if (ctx.is_hybrid_swa or ctx.is_hybrid_ssm) and config.lossy:
        return (
            "cake stores windows and recurrent states as they are, and its codec "
            f"{config.codec} is lossy: set --cake-codec raw or zstd"
        )
    allocator = params.token_to_kv_pool_allocator
    if ctx.is_hybrid_swa:
        if type(allocator) not in (
            SWATokenToKVPoolAllocator,
            UnifiedSWATokenToKVPoolAllocator,
            UnifiedMambaSWATokenToKVPoolAllocator,
        ):
            return f"cake does not support sliding windows in a {type(allocator).__name__}"
        reason = _unsupported_windows(allocator.get_kvcache(), params)
    else:
        reason = _unsupported_version(allocator.get_kvcache())
    if reason is not None:
        return f"cake does not support {reason}"
    if ctx.is_hybrid_ssm:
        pool = params.req_to_token_pool
        if type(pool) not in (
            HybridReqToTokenPool,
            HybridMambaDecodeReqToTokenPool,
            UnifiedHybridReqToTokenPool,
        ):
            return f"cake does not support recurrent states in a {type(pool).__name__}"
        if pool.mamba_ckpt_pool is not None:
            return "cake does not support int8 states: remove --enable-int8-mamba-checkpoint"
        states = pool.mamba_pool
        # States in 16 bits take up what is in the ring at each step.
        lags = (
            getattr(states, "replayssm_spec_write_pos", None) is not None
            and states.mamba_cache.temporal.itemsize > 2
        )
        if lags and not pool.enable_mamba_extra_buffer:
            return (
                "cake does not support states that lag behind accepted tokens: set "
                "--mamba-radix-cache-strategy extra_buffer or --mamba-ssm-dtype bfloat16, or "
                "remove --enable-linear-replayssm-spec"
            )
    return None


def _unsupported_version(pool: Any) -> str | None:
    """The pool of a model that needs a later SGLang, and that version; None for all others."""
    if hasattr(pool, "request_window") and not hasattr(pool, "pd_kv_layout"):
        return "DeepSeek V4 of SGLang 0.5.22: install 0.5.23"
    return None


def _unsupported_windows(pool: Any, params: Any) -> str | None:
    """What of this pool's windows is not supported, and what helps; None if they are pages of the
    tree, with all that a prefix needs in them."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_memory_pool import UnifiedSWAKVPool

    if params.token_to_kv_pool_allocator.swa_req_ring:  # on ROCm
        return "windows that belong to requests: unset SGLANG_HACK_FLASHMLA_BACKEND"
    if not getattr(params, "swa_gates_prefix_match", True):  # on ROCm, and not in 0.5.22
        return (
            "windows of requests beside those of a draft model in the tree: remove "
            "--enable-encoder-swa-bounded-replay or --speculative-algorithm"
        )
    if type(pool) in (SWAKVPool, UnifiedSWAKVPool):
        return None
    if type(pool) is not DeepSeekV4TokenToKVPool:
        return f"a {type(pool).__name__}: set --disable-hybrid-swa-memory"
    if (reason := _unsupported_version(pool)) is not None:
        return reason
    if not params.page_size == pool.swa_page_size == pool.swa_kv_pool.page_size:
        return "windows in smaller pages than KV: unset SGLANG_OPT_SM120_DIRECT_SWA_KV"
    if params.sliding_window_size > params.page_size:
        return f"windows of several pages: set --page-size {params.sliding_window_size}"
    return None


def may_overlap(ctx: "TreeCacheBuildContext", config: CakeConfig) -> bool:
    """Whether a last step may begin before the last loads have ended. Conditions:

    - The server has one rank, so no other rank has to agree.
    - Stored blocks have the format of the memory.
    - The server runs on a CPU, and its attention backend passes the layer gate at each layer. On a
      GPU this would save 0.6 % of the time to first token (docs/scheduling.md, simulated).
    - The mode is `auto`. The other modes, which benchmarks compare with, stay as in the paper.
    - The model needs no end states, which the first layers of a last step would read at once.
    - No decode server waits for the KV: SGLang would send the prefix before the step has it.
    - No tokens are proposed, and the model generates text: no test has run anything else.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    if config.mode != "auto" or config.codec != RAW or ctx.tp_size > 1:
        return False
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
        return False
    args = resolving_view(ctx.server_args)
    if args.disaggregation_mode != "null" or args.speculative_algorithm is not None:
        return False
    traits = ModelTraits.of(ctx.model_config)
    return args.device == "cpu" and traits.is_generation and _unfit_device(args, traits) is None


def unsupported_model(model: ModelTraits) -> str | None:
    """Why a model is refused, whatever the settings; None: it is not."""
    for trait, reason in REFUSED.items():
        if getattr(model, trait):
            return f"cake does not support {reason}"
    if model.batch_rope_tokens is not None:
        return (
            "cake does not support longrope beyond the original context, nor dynamic RoPE with "
            "the Transformers backend, where a prompt's KV depends on its batch: set "
            f"--context-length {model.batch_rope_tokens}"
        )
    if not (model.is_generation or model.pools_last_token):
        return (
            "cake does not support models that generate no text, except for decoders whose result "
            "is made of the last token (docs/troubleshooting.md)"
        )
    return None


def _page_mismatch(page_size: int | None, block_tokens: int | None) -> str | None:
    if page_size is None or block_tokens is None or block_tokens % page_size == 0:
        return None
    near = max(1, round(block_tokens / page_size)) * page_size
    return (
        f"cake stores whole pages, and {block_tokens} tokens are no multiple of the page size "
        f"{page_size}: set --cake-block-tokens {near}"
    )
