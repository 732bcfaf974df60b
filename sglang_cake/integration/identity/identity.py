"""The fields of the namespace, read from the server and from its files.

Digests of weights and adapters are computed in the background if that takes more than a moment.
All ranks of a group learn a digest in the same step. Nothing is loaded or stored before the digest
of the weights is known. If it cannot be known, the namespace belongs to this server alone.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import secrets
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import LABEL, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.integration.compat import module_of, other_plugins
from sglang_cake.integration.identity import content, kv_settings
from sglang_cake.integration.identity.content import ContentChanged, Files, content_digest
from sglang_cake.integration.memory.kv_shard import KvShard
from sglang_cake.integration.support_matrix import plugin_algorithm

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("sglang_cake")

NamespaceFields = dict[str, str]
PRIVATE = "private-"
# Files of up to this size in all are hashed at once, which takes about a quarter of a second. So
# the digests of small models and of adapters are known when the first request comes.
SHORT_BYTES = 256 << 20
# Kinds of quantisation that leave activations as they are on every GPU.
WEIGHT_ONLY = ("awq", "bitsandbytes", "gguf", "gptq")
# Packages with kernels, which SGLang installs on GPUs.
KERNEL_PACKAGES = (
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sgl-kernel",
    "sglang-kernel",
    "tilelang",
    "triton",
)
# Names of the jobs for the model: the digest of its weights, and what no update changes.
WEIGHTS = "weights"
CONFIGURATION = "configuration"


# ---- what the server was started with ----


def server_fields(
    ctx: "TreeCacheBuildContext",
    layout: BlockLayout,
    shard: KvShard,
    *,
    codec: str,
    head_groups: int | None = None,
    end_states: str | None = None,
    drafts: "Sequence[LoadedDraft]" = (),
) -> NamespaceFields:
    """All fields except those about the content of files.

    Args:
        layout: the layout of stored blocks: blocks of this rank's pool, or their slices.
        shard: the shard of this rank.
        head_groups: number of groups of KV heads that are stored apart. The fields are then those
            of all groups: `group_namespaces` adds the group. None: blocks are stored whole.
        codec: the encoding of the blocks.
        end_states: form of the end states of this rank's pools; None: the model has none.
        drafts: draft models whose KV is in the blocks.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    values = resolving_view(ctx.server_args)
    model = ctx.model_config
    model_class = type(ctx.tp_worker.model_runner.model)
    fields: dict[str, object] = {
        LABEL: os.path.basename(os.path.normpath(model.model_path)),
        "format": kv_settings.file_format(values.load_format),
        "implementation": _implementation(model_class),
        "weight_version": values.weight_version,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "layout": layout.describe(),
        "page_tokens": ctx.params.page_size,
        "codec": codec,
    }
    if head_groups is None:
        fields |= {"tp_rank": shard.index, "tp_size": shard.count}
    else:
        fields["head_groups"] = head_groups
    if end_states is not None:
        fields["end_states"] = end_states
    if (ranks := shard.end_rank[1]) > 1:  # in one namespace, with keys of their own
        fields["end_ranks"] = ranks
    if "context_len" in _source(model_class):  # few models read it, for their RoPE
        fields["context_length"] = model.context_len
    if values.enable_deterministic_inference:  # KV is shared only if it is equal bit by bit
        fields["software"] = _software()
        fields["device"] = _device_name(ctx)
    # With --enable-deterministic-inference, `tp_size` is the number of all ranks: it decides the
    # order of sums.
    fields |= kv_settings.counted_arguments(values, _defaults(ctx))
    fields |= kv_settings.counted_environment(os.environ)
    fields |= _attention_fields(ctx, layout, drafts)
    if form := _device_form(ctx, layout):
        fields["device_form"] = form
    models = [model, *(each.runner.model_config for each in drafts)]
    if dequantised := _dequantised(ctx, models, values.moe_runner_backend):
        fields["dequantised"] = dequantised
    loaded = [ctx.tp_worker.model_runner.model, *(each.runner.model for each in drafts)]
    if any(requantised := [_requantised(each) for each in loaded]):
        fields["requantised"] = "; ".join(requantised)
    hasher = ctx.tp_worker.model_runner.ngram_embedding_manager.engram_hasher
    if hasher is not None:  # it hashes tokens by their text, which the tokenizer knows
        fields["ngram_tokens"] = hashlib.sha256(hasher.token_map.cpu().numpy()).hexdigest()
    if plugins := other_plugins():  # they may have replaced any function of SGLang
        fields["plugins"] = ", ".join(
            f"{name} {version(dist) if dist else ''} {_implementation(loaded)}"
            for name, (loaded, dist) in sorted(plugins.items())
        )
    if remote := _remote_code():
        fields["remote_code"] = remote
    if (plugin := plugin_algorithm(values.speculative_algorithm)) is not None:
        # The KV of accepted tokens is what its worker leaves.
        fields["plugin_algorithm"] = f"{plugin.name} {_implementation(plugin.factory)}"
    if drafts:
        models = [each.runner.model_config for each in drafts]
        fields["draft_algorithm"] = values.speculative_algorithm
        fields["draft_dtype"] = " ".join(str(each.dtype).removeprefix("torch.") for each in models)
        fields["draft_implementation"] = " ".join(
            _implementation(type(each.runner.model)) for each in drafts
        )
        fields |= kv_settings.counted_arguments(values, _defaults(ctx), {"draft"})
    return {name: str(value) for name, value in fields.items()}


def group_namespaces(namespace: Namespace, groups: range | None) -> list[Namespace]:
    """The namespaces of the blocks of a rank, in the order of heads.

    Args:
        namespace: seeds the keys, which are the same for all groups.
        groups: as from `KvShard.head_groups`.
    """
    if groups is None:
        return [namespace]
    return [Namespace((*namespace.fields, ("head_group", str(group)))) for group in groups]


def rope_theta(config: Any, model: torch.nn.Module) -> float | None:
    """The base of the model's RoPE; None without RoPE, or if RoPE rotates only a part of a head, or
    pairs of neighbouring channels as in Command-R."""
    if not _rotates_halves(model):
        return None
    found = getattr(config, "rope_parameters", None) or {}
    theta = found.get("rope_theta", getattr(config, "rope_theta", None))
    share = found.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if isinstance(theta, int | float) and theta > 1 and share in (None, 1):
        return float(theta)
    return None


def _rotates_halves(model: torch.nn.Module) -> bool:
    if not hasattr(model, "attention_instances"):
        return all(getattr(module, "is_neox_style", True) for module in model.modules())
    # Of SGLang's Transformers backend. There, a function beside the layers rotates.
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    found = [
        function
        for file in files
        for name, function in vars(file).items()
        if name.startswith("rotate_half")
    ]
    head = torch.arange(4.0, device="cpu").reshape(1, 1, 1, 4)
    try:
        turned = [function(head).flatten().tolist() for function in found]
    except Exception:  # code of a model's folder may be anything
        return False
    return bool(turned) and all(each == [-2, -3, 0, 1] for each in turned)


def _attention_fields(
    ctx: "TreeCacheBuildContext", layout: BlockLayout, drafts: "Sequence[LoadedDraft]"
) -> NamespaceFields:
    """The attention backends, if SGLang's differ in more than rounding for these models.

    | part of attention | backends that leave it out |
    |---|---|
    | queries of the model's dtype with K and V in FP8 | FlashAttention, trtllm_mha, Triton |
    | K and V are divided by their scales before they are stored | torch_native, not FlashInfer |
    | the same with MLA | all but Triton |
    | a cap of the scores (Gemma 2, Grok) | torch_native, trtllm_mha |
    | a temperature that depends on the length (Grok) | all but Triton |
    | the chunks that a token sees (Llama 4) | all but FlashAttention |
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    models = [ctx.tp_worker.model_runner.model, *(each.runner.model for each in drafts)]
    layers = [layer for model in models for layer in _attention_layers(model)]
    if (
        not _has_fp8(layout)
        and not any(map(_has_scales, layers))
        and not any(
            layer.use_irope
            or (layer.logit_cap or 0) > 0
            or (layer.xai_temperature_len or 0) > 0  # None, 0 or -1: there is none
            for layer in layers
        )
    ):
        return {}
    values = resolving_view(ctx.server_args)
    return kv_settings.counted_arguments(values, _defaults(ctx), {"attention"})


def _has_fp8(layout: BlockLayout) -> bool:
    """Whether K or V are numbers in FP8. An index, and packed bytes, have kernels of their own."""
    return any(
        group.dtype.startswith("float8") and not any("index" in name for name, _ in group.parts)
        for group in layout.groups
    )


def _attention_layers(model: torch.nn.Module) -> "list[RadixAttention]":
    from sglang.srt.layers.radix_attention import RadixAttention

    return [layer for layer in model.modules() if isinstance(layer, RadixAttention)]


def _has_scales(layer: "RadixAttention") -> bool:
    """Whether K or V has a scale other than one."""
    found = (layer.k_scale, layer.v_scale)
    scales = [torch.as_tensor(each) for each in found if each is not None]
    # With `--offload-mode meta` they have no value.
    return any(scale.is_meta or bool(scale.ne(1).any()) for scale in scales)


def _device_form(ctx: "TreeCacheBuildContext", layout: BlockLayout) -> str:
    """The kind of device, where it decides what bytes of equal shape mean; "" on NVIDIA's GPUs.

    A state of linear attention is [K, V] by SGLang's kernels for CPUs, and [V, K] by all others.
    Kernels for AMD's GPUs have forms of their own for packed numbers, and for an index, which some
    of them rotate.
    """
    has_bytes = any(group.dtype == "uint8" for group in layout.groups)
    runner = ctx.tp_worker.model_runner
    if not (has_bytes or ctx.is_hybrid_ssm):
        return ""
    if runner.device != "cuda":
        return str(runner.device)
    if torch.version.hip is None:
        return ""
    writers = ("use_aiter_fused_fp8_writer", "use_gfx950_fused_indexer")
    layers = list(runner.model.modules())
    used = [name for name in writers if any(getattr(layer, name, False) for layer in layers)]
    return " ".join([torch.cuda.get_device_properties().gcnArchName, *used])


def _software() -> str:
    """The versions of SGLang, PyTorch and the installed packages that bring kernels."""
    from sglang.version import __version__

    found = [f"sglang {__version__}", f"torch {torch.__version__}"]
    for name in KERNEL_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _device_name(ctx: "TreeCacheBuildContext") -> str:
    runner = ctx.tp_worker.model_runner
    return torch.cuda.get_device_name() if runner.device == "cuda" else str(runner.device)


def _dequantised(ctx: "TreeCacheBuildContext", models: Sequence[Any], moe_runner: str) -> str:
    """The number formats whose weights SGLang dequantises here: formats that this GPU cannot
    multiply, for which it picks kernels such as Marlin's, and MXFP4 with a MoE runner of Triton.
    Activations are not quantised then, as they are elsewhere. Or the kind of device, if it has
    kernels of its own that treat activations in another way; "" if there is nothing to tell."""
    quantised = [each for each in models if each.quantization]
    names = [str(each.quantization) for each in quantised]
    device = str(ctx.tp_worker.model_runner.device)
    if device != "cuda":
        # Kernels for CPUs quantise the activations of AWQ and GPTQ, and not those of FP8.
        return "" if set(names) <= {"w8a8_int8"} else device
    if all(name.startswith(WEIGHT_ONLY) for name in names):
        return ""
    has_fp4 = any(  # of most formats the name does not tell which numbers the weights are
        each.is_fp4_experts or not ("int8" in name or "fp8" in name)
        for each, name in zip(quantised, names, strict=True)
    )
    if torch.version.hip is not None:  # only some multiply FP4, with other activations
        return torch.cuda.get_device_properties().gcnArchName.split(":")[0] if has_fp4 else ""
    capability = torch.cuda.get_device_capability()
    lacking = []
    if capability < (8, 9) and not all("int8" in name for name in names):
        lacking.append("fp8")
    by_triton = "mxfp4" in names and moe_runner in ("triton", "triton_kernel")
    if (capability < (10, 0) or by_triton) and has_fp4:
        lacking.append("fp4")
    return " ".join(lacking)


def _requantised(model: torch.nn.Module) -> str:
    """The names of the layers whose weights in FP8 are others than on most GPUs, since SGLang has
    quantised them, or those of the files again, for the kernels that it picks here; "" if there is
    none.

    | weights in the files | weights in memory |
    |---|---|
    | BF16 | one scale for a layer: AMD, Ada with CUDA before 12.4; elsewhere one for each channel |
    | blocks of 128 x 128 | the same with scales that are powers of two: DeepGEMM on Blackwell |
    | MXFP8 | blocks of 128 x 128, on GPUs that cannot multiply MXFP8 |
    | a scale for each projection of a layer | one scale for all of them: RTX 50 |
    | experts of `w8a8_fp8` | cast to the FP8 of MI300, whose steps and range are others |
    """
    # A layer with adapters has the one with the weights in it.
    found = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if _is_requantised(module)
    }
    return " ".join(sorted(found))


def _is_requantised(layer: torch.nn.Module) -> bool:
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod, W8A8FP8MoEMethod

    method: Any = getattr(layer, "quant_method", None)
    if isinstance(method, W8A8FP8MoEMethod):
        # Other methods double the scales for this form, so their weights keep their values.
        found = layer.parameters(recurse=False)
        return any(each.dtype == torch.float8_e4m3fnuz for each in found)
    # The methods of `w8a8` call it `quantization_config`.
    config = getattr(method, "quant_config", getattr(method, "quantization_config", None))
    if config is None:
        return False
    if getattr(config, "use_mxfp8", False):
        return not getattr(method, "use_mxfp8", True)
    if any(getattr(each, "format_ue8m0", False) for each in layer.parameters(recurse=False)):
        # Powers of two in the files stay what they are, and so do the weights.
        return getattr(config, "scale_fmt", None) != "ue8m0"
    if not isinstance(method, Fp8LinearMethod | W8A8Fp8LinearMethod):
        return False
    scale = getattr(layer, "weight_scale", None)  # not of blocks: `weight_scale_inv`
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
        return False
    # Configurations of some mixed formats (INT4 with FP8) have no such attribute.
    in_files = getattr(config, "is_checkpoint_fp8_serialized", None)
    projections: Any = getattr(layer, "logical_widths", ())
    return in_files is False or (bool(in_files) and len(projections) > 1)


def _implementation(made: Any) -> str:
    """The name of a class or a function, with a digest of its code if it is not part of SGLang."""
    name = getattr(made, "__name__", type(made).__name__)
    if module_of(made).split(".")[0] == "sglang":
        return str(name)
    try:
        folder, code = _code_of(made)
        texts = [os.fsencode(each.relative_to(folder)) + b"\0" + each.read_bytes() for each in code]
        if not texts:
            raise ConfigError(f"there is no code in {folder}")
    except (ConfigError, OSError, TypeError) as error:
        logger.warning(
            "cake: the code of %s is unknown, so no other process uses its KV: %s", name, error
        )
        return f"{name} {uuid.uuid4().hex}"
    digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts))
    return f"{name} {digest.hexdigest()}"


def _code_of(made: Any) -> tuple[Path, list[Path]]:
    """The folder of the package that a class or a function belongs to, and its files, all of which
    it may import. A module in no package has the files beside it, too, unless those are of other
    distributions.

    Raises: ConfigError, OSError, TypeError if they are not known.
    """
    file = inspect.getsourcefile(made)
    if file is None:
        raise OSError(f"there is no source of {made}")
    folder = Path(file).parent
    package, _, within = module_of(made).partition(".")
    # `transformers_modules` has the code of all models that were ever loaded.
    if package != "transformers_modules":
        roots = getattr(sys.modules.get(package), "__path__", ())
        found = [Path(root) for root in roots if Path(file).is_relative_to(root)]
        if not found and not within and next(folder.glob("*.dist-info"), None) is not None:
            return folder, [Path(file)]
        folder = next(iter(found), folder)
    return folder, sorted(content.code_files(folder))


def _remote_code() -> str:
    """A digest of the code that transformers has run from the folders of models and tokenizers,
    with all that it imports from there; "" if there is none. An `auto_map` may name code of another
    repository than the model's."""
    from transformers.dynamic_module_utils import get_relative_import_files

    texts: set[bytes] = set()
    try:
        for name, module in sys.modules.copy().items():
            file = getattr(module, "__file__", None)
            if file is None or not name.startswith("transformers_modules."):
                continue
            for each in map(Path, [file, *get_relative_import_files(file)]):
                # Folders differ between machines.
                texts.add(os.fsencode(each.name) + b"\0" + each.read_bytes())
    except (OSError, ValueError) as error:
        logger.warning("cake: code is unknown, so no other process uses its KV: %s", error)
        return uuid.uuid4().hex
    digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in sorted(texts)))
    return digest.hexdigest() if texts else ""


def _source(model_class: type) -> str:
    try:
        return inspect.getsource(sys.modules[model_class.__module__])
    except (OSError, TypeError):
        return "context_len"  # the source is not available, so the length counts


def _defaults(ctx: "TreeCacheBuildContext") -> dict[str, object]:
    from sglang.srt.arg_groups.arg_utils import record_fields

    return {each.name: each.default for each in record_fields(type(ctx.server_args))}


# ---- the files that SGLang loads ----


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where SGLang loads a model's weights from.

    Attributes:
        path: a folder, a file, or a name on Hugging Face.
        streamed_from: the URL of an object store that the weights are read from instead; then the
            folder has the rest of the model.
    """

    path: str
    revision: str | None = None
    download_dir: str | None = None
    streamed_from: str | None = None

    @classmethod
    def of(cls, model: "ModelConfig", download_dir: str | None) -> "ModelSource":
        """The source of a model whose configuration SGLang has read."""
        url = getattr(model, "model_weights", None)  # set for the URL of an object store only
        return cls(model.model_path, model.revision, download_dir, url)

    @property
    def config_places(self) -> tuple["ModelSource", ...]:
        """Where SGLang reads the model's configuration. `--download-dir` is for weights, and for
        what describes their quantisation: the rest is in the default cache of Hugging Face."""
        if self.download_dir is None or self.is_local:
            return (self,)
        return replace(self, download_dir=None), self

    @property
    def is_local(self) -> bool:
        """Whether the files are there before the model is loaded."""
        return Path(self.path).exists()

    def folder(self) -> Path:
        """The folder that SGLang loads from: that folder itself, the folder of that file, or the
        local snapshot of a model on Hugging Face.

        Raises: ConfigError if there is none, or if it comes from ModelScope; OSError.
        """
        if self.is_local:
            path = Path(self.path)
            return path if path.is_dir() else path.parent
        if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
            raise ConfigError(f"{self.path!r} comes from ModelScope")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = snapshot_download(
                self.path,
                revision=self.revision,
                cache_dir=self.download_dir,
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
            raise ConfigError(f"there is no local copy of {self.path!r}") from error
        return Path(folder)

    def weights(self) -> Files:
        """The weight files as they are now. Raises: ConfigError, OSError."""
        if self.streamed_from is not None:  # files of the folder may look like weights
            raise ConfigError(f"the weights are no files, but come from {self.streamed_from}")
        return content.file_states(content.weight_files(self.path, self.folder()))

    def configuration(self, *, code: bool) -> Files:
        """The files that define the computation. Args, Raises: as `content.config_files`."""
        return content.file_states(content.config_files(self.folder(), code=code))

    def weights_or_none(self) -> Files | None:
        """`weights`, or None if there are none or they cannot be read."""
        try:
            return self.weights()
        except (ConfigError, OSError):
            return None

    def is_changed(self, before: Files | None, after: Files) -> bool:
        """Whether files are others than before the load, which may have had to download some."""
        if self.is_local:
            return before != after
        return before is not None and not before.items() <= after.items()


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that SGLang has loaded.

    Attributes:
        runner: SGLang's `ModelRunner` of it.
        weights: its weight files before the load; None if the load had to download them.
    """

    runner: Any
    source: ModelSource
    weights: Files | None

    @property
    def pool(self) -> Any:
        """Its KV pool, which has the slots of the target's."""
        return self.runner.token_to_kv_pool

    @property
    def states(self) -> Any:
        """The pool of its recurrent states, which may be the target's; None: it has none."""
        return getattr(self.runner.req_to_token_pool, "mamba_pool", None)


@dataclass(slots=True)
class LoadedFiles:
    """Files as they were when SGLang loaded them. The hooks of loading write it, also before there
    is a tree.

    Attributes:
        model_recorded: whether the load of the model was observed.
        weights: the weight files before the load; None if the load had to download them.
        configs: by `config_places`, the files of a model's configuration before SGLang read them;
            None if it had to download them.
        beside: the files of `kv_settings.content_paths` at the same time; None if they cannot be
            read.
        drafts: models that propose tokens with KV of their own, in the order of their loads.
        adapters: files by LoRA id; None if they are unknown.
        on_adapter: called with each LoRA id that is loaded.
    """

    model_recorded: bool = False
    weights: Files | None = None
    configs: dict[ModelSource, Files | None] = field(default_factory=dict)
    beside: list[Files] | None = None
    drafts: list[LoadedDraft] = field(default_factory=list)
    adapters: dict[str, Files | None] = field(default_factory=dict)
    on_adapter: Callable[[str], None] | None = None

    def reads(self, source: ModelSource, values: "ServerArgs") -> None:
        """SGLang is about to read the configuration of a model, or has the record of an earlier
        read already, which stays."""
        for place in source.config_places:
            if place in self.configs:
                continue
            try:
                found = place.configuration(code=bool(values.trust_remote_code))
            except (ConfigError, OSError):
                found = None
            self.configs[place] = found
        if self.beside is None:
            with contextlib.suppress(OSError):
                self.beside = _files_beside(values)


def _files_beside(values: "ServerArgs") -> list[Files]:
    return [
        content.file_states(content.all_files(path)) for path in kv_settings.content_paths(values)
    ]


LOADED = LoadedFiles()  # a process has one model, with its draft models


# ---- digests, computed in the background ----


@dataclass(slots=True)
class DigestJob:
    """Computes namespace fields that depend on the content of files.

    Attributes:
        name: for the log. Of two jobs with one name, only the later one counts.
        compute: returns the fields; None if they cannot be known. Raises ContentChanged,
            ConfigError, OSError or ValueError if they cannot be known, and that is to be logged.
        size_bytes: how much `compute` reads.
        adapter: the LoRA id, if the files are those of an adapter.
        fields: the result; None if the fields cannot be known.
        private_name: a new name for content that cannot be known: the same on all ranks of the
            group, and of no other group.
        tensors: names of all tensors of a model, if known.
    """

    name: str
    compute: Callable[["DigestJob"], NamespaceFields | None]
    size_bytes: int = 0
    adapter: str | None = None
    fields: NamespaceFields | None = None
    private_name: str = ""
    tensors: frozenset[str] | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Set `fields`, if they can be known, and `done`."""
        try:
            self.fields = self.compute(self)
        except (ContentChanged, ConfigError, OSError, ValueError) as error:
            if not self.cancelled.is_set():
                logger.warning("cake: the content of the %s is unknown: %s", self.name, error)
        except Exception:
            logger.exception("cake: the content of the %s is unknown", self.name)
        finally:
            self.done.set()


class DigestJobs:
    """The unfinished jobs of this process, which end with it. All ranks of a group start the same
    jobs in the same order, and receive the results in the same step. The scheduler thread owns it.

    Args:
        reduce_min: in-place MIN over an int64 CPU tensor across the ranks; None for a single rank.
    """

    def __init__(self, reduce_min: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_min = reduce_min
        self._unfinished: dict[str, DigestJob] = {}

    def start(self, job: DigestJob) -> None:
        """Run the job: at once if there is little to read, else in the background. Cancels an
        unfinished job of the same name."""
        self.cancel(job.name)
        self._unfinished[job.name] = job
        if job.size_bytes <= SHORT_BYTES:
            job.run()
        else:  # in a daemon: a hung disk must not keep the process from ending
            threading.Thread(target=job.run, name="cake-identify", daemon=True).start()

    def wait(self) -> None:
        """Return when all jobs of this rank are done."""
        for job in self._unfinished.values():
            job.done.wait()

    def cancel(self, name: str) -> None:
        """Stop the job of this name, if there is one. Its result is never returned."""
        job = self._unfinished.pop(name, None)
        if job is not None:
            job.cancelled.set()

    def take_finished(self) -> list[DigestJob]:
        """Jobs that are done on every rank, each returned once. `fields` is None on all ranks if
        one rank does not know them, or if two know other ones: the KV of each rank depends on the
        weights of all.

        Every rank must call this at the same point of the same step.
        """
        if not self._unfinished:
            return []
        jobs = list(self._unfinished.values())
        tensor = torch.tensor([_vote(job) for job in jobs], dtype=torch.int64)
        if self._reduce_min is not None:
            self._reduce_min(tensor)
        finished = []
        for job, (level, least, most, *name) in zip(jobs, tensor.tolist(), strict=True):
            if level:
                del self._unfinished[job.name]
                job.private_name = PRIVATE + "".join(f"{number:016x}" for number in name)
                job.fields = job.fields if level == 2 and least == -most else None
                finished.append(job)
        return finished


def _vote(job: DigestJob) -> list[int]:
    """What the ranks reduce of a job: 0: it is running; 1: the fields are unknown; 2: they are
    known; a number of them, and its negative; two random numbers."""
    done = job.done.is_set()
    text = repr(sorted((job.fields or {}).items())) if done else ""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    level = done + (done and job.fields is not None)
    return [level, number, -number, secrets.randbits(62), secrets.randbits(62)]


def model_jobs(
    source: ModelSource, values: "ServerArgs", defaults: Mapping[str, object], loaded: LoadedFiles
) -> tuple[DigestJob, DigestJob]:
    """The jobs for the model that the server was started with: all but its weights, and its
    weights. An update of the weights cancels only the second one.

    Args:
        values: server arguments, resolved.
        defaults: the defaults of all server arguments.
    """
    weights = Files()
    configs: list[Files] = []
    beside: list[Files] = []
    drafts: list[Files] = []
    private = kv_settings.private_reason(values, defaults)
    unreadable: str | None = None
    try:
        weights = source.weights()
        if not loaded.model_recorded or source.is_changed(loaded.weights, weights):
            private = private or "files changed while they were loaded"
        configs = _configuration(source, values, loaded)
        beside = _files_beside(values)
        if beside != (loaded.beside or []):
            raise ContentChanged("files beside the model changed while it was loaded")
        for draft in loaded.drafts:
            found = draft.source.weights()
            if draft.source.is_changed(draft.weights, found):
                private = private or "files of the draft model changed while they were loaded"
            drafts += [found, *_configuration(draft.source, values, loaded)]
    except (ConfigError, ContentChanged, OSError) as error:
        unreadable = str(error)
    if private is not None:
        logger.warning(
            "cake: the content of the weights is unknown, so no other server uses their KV: %s",
            private,
        )

    def compute(job: DigestJob) -> NamespaceFields:
        if unreadable is not None:
            raise ConfigError(unreadable)
        job.tensors = content.tensor_names(weights)
        fields = {"config": " ".join(content_digest(each, job.cancelled) for each in configs)}
        if beside:
            fields["beside"] = " ".join(content_digest(each, job.cancelled) for each in beside)
        if drafts:
            fields["draft"] = " ".join(content_digest(each, job.cancelled) for each in drafts)
        return fields

    def compute_weights(job: DigestJob) -> NamespaceFields | None:
        if unreadable is not None:
            raise ConfigError(unreadable)
        if private is not None:
            return None
        return {"weights": content_digest(weights, job.cancelled)}

    others = sum(map(content.unhashed_bytes, [*configs, *beside, *drafts]))
    weights_bytes = 0 if private is not None else content.unhashed_bytes(weights)
    return (
        DigestJob(CONFIGURATION, compute, others),
        DigestJob(WEIGHTS, compute_weights, weights_bytes),
    )


def _configuration(source: ModelSource, values: "ServerArgs", loaded: LoadedFiles) -> list[Files]:
    """The files of the configuration that SGLang has read, by place. Raises: ContentChanged if they
    are others now; ConfigError, OSError."""
    found = []
    for place in source.config_places:
        files = place.configuration(code=bool(values.trust_remote_code))
        if place.is_changed(loaded.configs.get(place), files):
            raise ContentChanged(f"the configuration in {source.path} changed while it was loaded")
        found.append(files)
    return found


def update_job(files: Files | None, complete: frozenset[str] | None) -> DigestJob:
    """The job for weights that were loaded into the running server.

    Args:
        files: the same before and after the load; None if the source is unknown.
        complete: names of all tensors of the model. If the files lack one of them, it keeps its old
            value, so the files do not tell the content of the model.
    """

    def compute(job: DigestJob) -> NamespaceFields | None:
        if files is None:
            return None
        names = content.tensor_names(files)
        if names is None or complete is None or not names >= complete:
            raise ContentChanged("the files do not hold all of the model's tensors")
        return {"weights": content_digest(files, job.cancelled)}

    return DigestJob(WEIGHTS, compute, 0 if files is None else content.unhashed_bytes(files))


def adapter_job(lora_id: str, files: Files | None, settings: str) -> DigestJob:
    """The job for an adapter: its files, and the settings that it was loaded with."""

    def compute(job: DigestJob) -> NamespaceFields | None:
        if files is None:
            return None
        return {"adapter": f"{content_digest(files, job.cancelled)} {settings}".strip()}

    size_bytes = 0 if files is None else content.unhashed_bytes(files)
    return DigestJob(f"files of adapter {lora_id}", compute, size_bytes, adapter=lora_id)


# ---- the namespace of this process ----


class Identity:
    """Keeps the namespace up to date with what this process computes with.

    The scheduler thread owns it. All ranks of a group make the same calls.
    """

    def __init__(
        self,
        ctx: "TreeCacheBuildContext",
        fields: NamespaceFields,
        *,
        reduce_min: Callable[[torch.Tensor], None] | None,
        on_known: Callable[[Namespace], None],
        loaded: LoadedFiles = LOADED,
    ) -> None:
        """Args:
        fields: the server's part of the namespace, from `server_fields`.
        reduce_min: see `DigestJobs`.
        on_known: called by `poll` with each new namespace.
        loaded: the files that SGLang has loaded.
        """
        from sglang.srt.arg_groups.overrides import resolving_view

        self._fields = fields
        self._on_known = on_known
        self._loaded = loaded
        self._model = ctx.model_config
        self._runner = ctx.tp_worker.model_runner
        self._had_scales = False
        self._had_hidden_tensors = False
        self._look_at_model()
        self._values = resolving_view(ctx.server_args)
        self._defaults = _defaults(ctx)
        self._is_single_rank = reduce_min is None
        self._jobs = DigestJobs(reduce_min)
        self._configuration: DigestJob | None = None  # since `start`
        self._weights: str | None = None  # None: not known
        self._rest: NamespaceFields | None = None  # None: not known yet
        self._lost = False
        self._adapters: dict[str, str] = {}
        self._source = ModelSource.of(ctx.model_config, self._values.download_dir)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights whose memory is released are as before when it is taken again: SGLang has
        a copy on the CPU, or releases no memory."""
        values = self._values
        return bool(values.enable_weights_cpu_backup or not values.enable_memory_saver)

    @property
    def is_private(self) -> bool:
        """Whether the namespace belongs to this server alone, or is not known."""
        if self._weights is None or self._rest is None:
            return True
        return any(text.startswith(PRIVATE) for text in (self._weights, *self._rest.values()))

    def wait(self) -> None:
        """Wait for all jobs, and take their results."""
        self._jobs.wait()
        self.poll()

    def start(self) -> None:
        """Start the jobs for the model and the adapters that SGLang has loaded so far."""
        jobs = model_jobs(self._source, self._values, self._defaults, self._loaded)
        self._configuration = jobs[0]
        for job in jobs:
            self._start(job)
        self._loaded.on_adapter = self.adapter_loaded
        for lora_id in self._loaded.adapters:
            self.adapter_loaded(lora_id)

    def update_source(self, path: str) -> ModelSource:
        """Where an update of weights is loaded from. For it, SGLang uses the default cache of
        Hugging Face."""
        return ModelSource(path, self._source.revision)

    def weights_changing(self) -> None:
        """Other weights are about to be loaded, so the digest of the old ones is not needed."""
        self._jobs.cancel(WEIGHTS)
        self._weights = None
        self._look_at_model()

    def tensors_lost(self) -> None:
        """Tensors of the model that no file has are lost, so no update from files makes its content
        known again."""
        self._lost = True

    def weights_changed(
        self, files: Files | None, load_format: str | None, version: str | None
    ) -> None:
        """Other weights were loaded.

        Args:
            files: the source of the weights; None if it is unknown.
            load_format: as in `--load-format`; None if it is unknown.
            version: the user's name for the weights; None: that of the start.
        """
        self._fields["weight_version"] = version or str(self._values.weight_version)
        known = None if load_format is None else kv_settings.file_format(load_format)
        if known is not None:
            self._fields["format"] = known
        self._look_at_model()
        if (
            known is None
            or self._had_scales
            or self._had_hidden_tensors
            or self._model.quantization is not None  # not each method can repack weights again
            or self._loaded.drafts  # those may have changed too
            or kv_settings.private_setting(self._values, self._defaults) is not None
        ):
            files = None
        begun = self._configuration
        complete = None if begun is None or self._lost else begun.tensors
        self._start(update_job(files, complete))

    def _look_at_model(self) -> None:
        """Note what an update from files leaves as it was: scales, which SGLang keeps in a table
        (NVFP4) and in CUDA graphs, and tensors of layers that LoRA wraps (experts, scales of
        weights). Such a tensor has another name then, so `load_weights` skips it."""
        model = self._runner.model
        self._had_scales |= any(map(_has_scales, _attention_layers(model)))
        self._had_hidden_tensors |= any(
            ".base_layer." in name for name, _ in model.named_parameters()
        )

    def adapter_loaded(self, lora_id: str) -> None:
        """SGLang has loaded a LoRA adapter."""
        self._adapters.pop(lora_id, None)
        manager = self._runner.lora_manager
        settings = kv_settings.adapter_settings(self._values, self._defaults, manager)
        self._start(adapter_job(lora_id, self._loaded.adapters[lora_id], settings))

    def adapter(self, lora_id: str) -> str | None:
        """The digest of the adapter, for keys; None while it is not known."""
        return self._adapters.get(lora_id)

    def poll(self) -> None:
        """Take the results of finished jobs. Called once a step, on all ranks."""
        for job in self._jobs.take_finished():
            if job.adapter is not None:
                self._adapters[job.adapter] = (job.fields or {}).get("adapter", job.private_name)
                for lora_id in self._adapters.keys() - self._loaded.adapters.keys():
                    del self._adapters[lora_id]
                continue
            if job.name == WEIGHTS:
                self._weights = (job.fields or {}).get("weights", job.private_name)
            else:
                self._rest = job.fields or {"config": job.private_name}
            if self._weights is not None and self._rest is not None:
                fields = {**self._fields, "weights": self._weights, **self._rest}
                self._on_known(Namespace(tuple(fields.items())))

    def _start(self, job: DigestJob) -> None:
        self._jobs.start(job)
        if self._is_single_rank:  # several ranks take the result in their next step
            self.poll()
