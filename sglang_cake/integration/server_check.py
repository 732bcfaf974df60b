"""The server that flags describe, on this machine, for `sglang-cake doctor`. None is started.

SGLang's plug-ins are not loaded here, so cake's hooks do not act. Nothing is downloaded.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import HostArena
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import flags
from sglang_cake.integration.identity.identity import ModelSource
from sglang_cake.integration.memory.host_pools import PIN_BYTES, pin
from sglang_cake.integration.support_matrix import (
    FAMILIES,
    MEDIA,
    MEDIA_ARCHITECTURES,
    ModelTraits,
)

_PLUGINS = "sglang.srt.plugins"


# By `--kv-cache-dtype`, where it is not the dtype of the model. A scale is for 32 or 16 values.
_VALUE_BYTES = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), 1),
    "mxfp8": 1 + 1 / 32,
    **dict.fromkeys(("nvfp4", "fp4_mx_block16"), 1 / 2 + 1 / 16),
}


@dataclass(frozen=True, slots=True)
class ResolvedServer:
    """A server as SGLang resolves its flags on this machine.

    Attributes:
        device: `cpu`, `cuda`, ...
        ranks: processes with a KV pool on this machine.
        tp_size: ranks that share the heads of the model.
        chunk_tokens: the most that a step computes.
        page_tokens: tokens of a page of the KV pool.
        pool_tokens: size of a KV pool, if it is set.
        kv_value_bytes: bytes of a value in the KV pool, with its part of a scale.
        kinds: the kinds of the model, by the support table.
    """

    device: str
    ranks: int
    tp_size: int
    chunk_tokens: int
    page_tokens: int
    pool_tokens: int | None
    kv_value_bytes: float
    kinds: str


def plugin_fault() -> str | None:
    """Why SGLang would not load cake; None if it would."""
    names = [point.name for point in entry_points(group=_PLUGINS)]
    if flags.BACKEND not in names:
        return "SGLang finds no plug-in cake: install sglang-cake in this environment"
    allowed = envs.SGLANG_PLUGINS.get()
    if allowed and flags.BACKEND not in (name.strip() for name in allowed.split(",")):
        return f"SGLANG_PLUGINS={allowed} leaves cake out: add cake to it"
    return None


def read_command_line(argv: Sequence[str]) -> tuple[ServerArgs, CakeConfig]:
    """The settings in the flags of `sglang serve`. Exits with 2, after SGLang's usage, for a flag
    that does not exist.

    Raises: ConfigError for a value of cake's flags that is not possible, or a `--config` file that
        SGLang cannot read.
    """
    parser = argparse.ArgumentParser(prog="sglang-cake doctor")
    ServerArgs.add_cli_args(parser)
    flags.add_flags(None, parser)
    if argv and not argv[0].startswith("-"):  # as in `sglang serve MODEL`
        argv = ["--model-path", *argv]
    if "--config" in argv:
        try:
            argv = ConfigArgumentMerger(parser).merge_config_with_args(list(argv))
        except Exception as error:  # ValueError, OSError, and those of PyYAML
            raise ConfigError(f"--config: {' '.join(str(error).split())}") from None
    args = parser.parse_args(argv)
    fields = [field.name for field in record_fields(ServerArgs) if hasattr(args, field.name)]
    record = ServerArgs(**{name: getattr(args, name) for name in fields})
    return record, flags.read_settings(flags.given_flags(args))


def setting_faults(record: ServerArgs, config: CakeConfig) -> list[str]:
    """The faults of the settings, whatever the model and the store are."""
    reason = flags.reason_as_given(record, config)
    given = [] if reason is None else [reason]
    return [*given, *flags.machine_faults(config)]


def config_file(record: ServerArgs) -> Path | None:
    """The `config.json` of the model; None if this machine does not have it."""
    try:
        source = ModelSource(record.model_path, record.revision)  # not in `--download-dir`
        file = source.folder() / "config.json"
        return file if file.is_file() else None
    except (ConfigError, OSError):  # OSError: a folder that may not be entered
        return None


def config_elsewhere(record: ServerArgs, *, modelscope: bool) -> str | None:
    """Where SGLang reads the configuration of a model that needs no `config.json` on this machine;
    None: it reads that file.

    Args: modelscope: whether SGLang asks ModelScope for names of models.
    """
    path = record.model_path
    if "://" in path:
        return "a URL"
    # A name on Hugging Face has a colon before a quantisation: `owner/repository:Q4_K_M`.
    if os.path.isfile(path) or path.endswith(".gguf") or ":" in path:
        return "a GGUF file"
    return "ModelScope" if modelscope and not os.path.exists(path) else None


def resolve(record: ServerArgs, config: CakeConfig) -> ResolvedServer:
    """Resolve the settings as a launcher does. The model's configuration must be on this machine.

    Raises: ConfigError, one line: why cake, or else SGLang, would refuse.
    """
    if record.radix_cache_backend is None:
        record.radix_cache_backend = flags.BACKEND
    try:
        record.resolve_once()
        reason = flags.reason_when_resolved(record, config)
    except Exception as error:  # whatever stops SGLang, in its own words if cake has none
        reason = flags.reason_despite_failure(record, config)
        reason = reason or f"SGLang does not take this: {_first_line(error)}"
    if reason is not None:
        raise ConfigError(reason)
    view = resolving_view(record)
    model = model_config_of(record)
    copies = 1 if view.enable_dp_attention else view.dp_size
    return ResolvedServer(
        device=view.device,
        ranks=max(1, view.tp_size * copies // view.nnodes),
        tp_size=view.tp_size,
        chunk_tokens=flags.chunk_tokens(view),
        page_tokens=view.page_size,
        pool_tokens=view.max_total_tokens,
        kv_value_bytes=_VALUE_BYTES.get(view.kv_cache_dtype, model.dtype.itemsize),
        kinds=_kinds(ModelTraits.of(model), (model.hf_config.architectures or ["?"])[0]),
    )


def _kinds(traits: ModelTraits, architecture: str) -> str:
    found = [row for row in FAMILIES if row.trait and getattr(traits, row.trait)]
    if architecture not in MEDIA_ARCHITECTURES:
        found = [row for row in found if row.name != MEDIA]
    rows = [f"{row.name} (proven: {row.proven})" for row in found or FAMILIES[:1]]
    return f"{architecture}: {'; '.join(rows)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gpus() -> list[str]:
    """Names of the GPUs that PyTorch sees, in the order of their numbers."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def gpu_memory_bytes() -> int:
    """Memory of the first GPU."""
    return torch.cuda.get_device_properties(0).total_memory


def can_pin(size_bytes: int) -> bool:
    """Whether the GPU takes this much host memory as pinned. It is freed again."""
    arena = HostArena([PIN_BYTES] * -(-size_bytes // PIN_BYTES), prefault=False)
    return pin(arena, torch.device("cuda")) == len(arena.buffers)
