"""Which settings of SGLang change the bytes of KV: server arguments as kv_settings.toml classifies
them, environment variables by the patterns below."""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Set
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang_cake.core.service_links import without_service_links
from sglang_cake.integration.compat import default_value

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.server_args import ServerArgs

_CLASSES: Final[dict[str, frozenset[str]]] = {
    name: frozenset(names.split())
    for name, names in tomllib.loads(
        files(__package__).joinpath("kv_settings.toml").read_text("utf-8")
    ).items()
}

COUNTED: Final[frozenset[str | None]] = frozenset({"counted", None})

# Values that count, of arguments in the class `some_values`.
_OTHER_KV = re.compile(r"marlin|humming|_q8$|^fake$")

# Load formats that read only files which `content.weight_files` lists. Formats with an equal value
# read the same weights from the same files. `npcache` reads a copy that an earlier load has made.
FILE_FORMATS = {
    "auto": "auto",
    "safetensors": "safetensors",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
    "pt": "pt",
    "gguf": "gguf",
    "mistral": "mistral",
    "layered": "auto",
    "bitsandbytes": "bitsandbytes",
    "sharded_state": "sharded_state",
}

# A variable that matches _ENVIRONMENT counts, unless it matches _UNRELATED_ENVIRONMENT: places,
# logs, traces, tests, timeouts, and modes that are refused. Those without SGLANG choose the bits of
# activations and of sums over ranks.
_ENVIRONMENT = re.compile(
    r"(SGLANG|SGL|ROCM_QUICK_REDUCE|AITER_FORCE|AITER_SITUV2)_|FLASHINFER_NVFP4_"
    r"|DEEP_NORMAL_MODE_USE_INT8_QUANT$"
)
_UNRELATED_ENVIRONMENT = re.compile(
    r"""SGL(ANG)?_(
      CAKE_ | LOG_ | TEST_ | TRACE_ | OTLP_ | PROFILE | TORCH_PROFILER | MEM_PROFILE | RECORD_
    | CUDA_COREDUMP | PYSPY | CRASH_ | IS_IN_CI | DISAGG | HICACHE_ | MOONCAKE_ | ENCODER_
    | MORI_(?!(DISPATCH|COMBINE)_DTYPE$)
    | (ENABLE_)?FAILED_SESSION_
    | GRPC_ | JIT_ | DG_CACHE | CACHE_DIR$ | CUTE_AOT_CACHE | WEIGHT_CACHE_ | KV_CANARY_(?!PERTURB)
    | GRAMMAR_ | EXA_ | TOOL_ | SCHEDULER_ | PREFILL_DELAYER_ | MM_ | VLM_ | VIT_ | IMAGE_ | RESIZE_
    | REQ_ | REQUEST_ | ZMQ_ | TCP_STORE | PORT$ | BACKUP_PORT | RAY_ | RUST_ | TIMEOUT_ | UVICORN_
    | WARMUP_TIMEOUT$ | HTTP_SERVER_ | ENABLE_HEALTH | EXPOSE_ | DIAG_ | ROLE_NAMESPACES
    | USE_CPU_ENGINE$ | USE_MODELSCOPE$ | PLUGINS$ | PLATFORM$ | PATCH_TOKENIZER$
    | IS_FIRST_RANK_ON_NODE$ | DISTRIBUTED_INIT | ONE_VISIBLE_DEVICE | SET_CPU_AFFINITY$
    | (AUTO_)?NUMA_BIND | LOAD_SNAPSHOT | PREFETCH_BLOCK_SIZE | SORT_WEIGHT_FILES$
    | ALLOW_OVERWRITE_LONGER_CONTEXT_LEN$ | ENABLE_STRICT_MEM_CHECK | ENABLE_TREE_CACHE_SANITY
    | DEBUG_MEMORY_POOL$ | RUN_ID$ | SKIP_SGL_KERNEL_VERSION_CHECK$ | FORCE_SHUTDOWN$
    | KILLPG | EMPTY_CACHE_INTERVAL$ | MAX_NEW_TOKENS_LIMIT$ | CLIP_MAX_NEW_TOKENS | RETRACT_
    | INIT_NEW_TOKEN_RATIO$ | MIN_NEW_TOKEN_RATIO | NEW_TOKEN_RATIO | ENABLE_METRICS
    | CPU_OMP_THREADS_BIND$ | (CPU|IO)_WORKERS$ | DP_RANK$ | HOST_IP$ | LOCAL_IP | NCCL_SO_PATH$
    | HEALTH_CHECK_TIMEOUT$ | WAIT_ | DETOKENIZER_ | RINGBUFFER_ | SKIP_P2P_CHECK$ | ROUTING_KEY
    | OLLAMA_ | NSYS_ | DUMP_LOADER_DIR$ | EXTERNAL_MM | EXTERNAL_MODEL_PACKAGE$
    | BLOCK_NONZERO_RANK_CHILDREN$ | DISABLE_OUTLINES_DISK_CACHE$ | ENABLE_TORCH_COMPILE$
    | FLASHINFER_WORKSPACE_SIZE$ | USE_BREAKABLE_CUDA_GRAPH$ | USE_CUDA_IPC_TRANSPORT$
    | USE_IPC_POOL_HANDLE_CACHE$
    )""",
    re.VERBOSE,
)


def argument_class(argument: str) -> str | None:
    """The class of a server argument in kv_settings.toml; None if the file does not have it."""
    if argument.startswith("_"):
        return "unrelated"
    return next((name for name, members in _CLASSES.items() if argument in members), None)


def counted_arguments(
    values: "ServerArgs", defaults: Mapping[str, object], classes: Set[str | None] = COUNTED
) -> dict[str, str]:
    """Server arguments that are fields of the namespace. An unclassified argument is a field too,
    with a digest of its value.

    Args:
        values: resolved; an attribute for each argument.
        defaults: the defaults of all arguments of SGLang.
        classes: the classes of arguments in kv_settings.toml.
    """
    if values.enable_deterministic_inference:
        classes |= {"attention", "rounding", "some_values"}
    found = {name: _text(getattr(values, name)) for name in sorted(defaults)}
    kinds = {name: argument_class(name) for name in found}
    return {
        name: text if kinds[name] else _digest(text)
        for name, text in found.items()
        if kinds[name] in classes or (kinds[name] == "some_values" and _OTHER_KV.search(text))
        if text != _text(defaults[name])
    }


def adapter_settings(
    values: "ServerArgs", defaults: Mapping[str, object], manager: "LoRAManager"
) -> str:
    """What changes the meaning of an adapter's files: server arguments that have no default value,
    and what `manager` has made of the others. It applies an adapter's part for experts only if some
    adapter of the start targets both of their projections."""
    names = ("lora_strict_loading", "lora_use_virtual_experts", "max_lora_rank")
    found = {name: _text(getattr(values, name)) for name in names}
    changed = [f"{n}={v}" for n, v in found.items() if v != _text(defaults[n])]
    if manager.experts_shared_outer_loras:
        changed.append("experts_shared_outer_loras")
    return " ".join([*changed, f"target_modules={_text(manager.target_modules)}"])


def counted_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that are fields of the namespace, with a digest of each value. The
    values themselves are not stored, since the store may be on another machine."""
    return {
        name: _digest(value)
        for name, value in sorted(without_service_links(environ).items())
        if _ENVIRONMENT.match(name)
        and not _UNRELATED_ENVIRONMENT.match(name)
        and not _is_default(name)
    }


def _is_default(variable: str) -> bool:
    """Whether the variable has SGLang's default value. SGLang sets some variables to it itself."""
    from sglang.srt.environ import EnvField, envs

    found = getattr(type(envs), variable, None)
    return isinstance(found, EnvField) and found.get() == default_value(found)


def file_format(load_format: object) -> str | None:
    """A name for the load format. Formats with one name load the same weights from the same files.
    None: the weights do not come from files that `content.weight_files` lists."""
    return FILE_FORMATS.get(_text(load_format))


def private_reason(values: "ServerArgs", defaults: Mapping[str, object]) -> str | None:
    """Why the content of the weights is unknown; None if the model's files determine it."""
    if file_format(values.load_format) is None:
        return f"--load-format {_text(values.load_format)} does not load the model's files"
    of_draft = values.speculative_draft_load_format
    if of_draft is not None and file_format(of_draft) is None:
        return f"--speculative-draft-load-format {_text(of_draft)} does not load the model's files"
    extra = values.model_loader_extra_config
    if _text(extra) not in ("", "{}", "None") and not _only_speed(extra):
        return "--model-loader-extra-config may name other weights"
    return private_setting(values, defaults)


def private_setting(values: "ServerArgs", defaults: Mapping[str, object]) -> str | None:
    """Why no files determine the content of the weights, those of an update included; None if some
    do."""
    for name in sorted(_CLASSES["private"] & set(defaults)):
        if (value := getattr(values, name)) and _text(value) != _text(defaults[name]):
            return f"--{name.replace('_', '-')} may change the weights"
    return None


def content_paths(values: "ServerArgs") -> list[Path]:
    """Files and folders outside the model's folder that its weights or configuration come from."""
    named = (getattr(values, name) for name in sorted(_CLASSES["content"]))
    return [Path(path) for path in named if path]


def _only_speed(extra: Any) -> bool:
    """Whether a loader's extra configuration only changes how fast it reads."""
    try:
        options = extra if isinstance(extra, dict) else json.loads(extra)
    except ValueError:
        return False
    speed = {"enable_multithread_load", "num_threads", "concurrency", "memory_limit"}
    return isinstance(options, dict) and set(options) <= speed


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _text(value: object) -> str:
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, Set):  # its own order is another one in each process
        value = sorted(map(str, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
