"""Whose KV this is: the facts that go into the namespace, read from the running server."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from sglang_cake.errors import ConfigError
from sglang_cake.layout import BlockLayout
from sglang_cake.namespace import Namespace

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json", "hf_quant_config.json")
# Up to this size a file is hashed whole; above it, by samples of every tensor and its times.
WHOLE_FILE_BYTES = 1 << 30
_SAMPLE_BYTES = 4096
_SAMPLES = 256


@lru_cache(maxsize=64)
def weights_digest(path: str, revision: str | None = None) -> str:
    """Digest of what the weight files hold, in hex.

    Files up to 1 GiB count with every byte. Larger ones count with size, modification time, header
    and three samples of each tensor: a copy of such a model is a new namespace, which only costs
    hits; another model with the same shapes never passes for it.

    Raises: ConfigError if there is no weight file at `path` (a folder, a file, or the name of a
    model in the local Hugging Face cache).
    """
    folder = _local_folder(path, revision)
    files = sorted(f for pattern in _WEIGHTS for f in folder.glob(pattern))
    if Path(path).is_file():
        files = [Path(path)]
    if not files:
        raise ConfigError(
            f"cake finds no weight files in {folder}: it cannot tell whose KV this is"
        )
    digest = hashlib.sha256()
    for file in files + [folder / name for name in _CONFIGS if (folder / name).is_file()]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_file_digest(file))
    return digest.hexdigest()


def namespace_of(
    ctx: "TreeCacheBuildContext",
    layout: BlockLayout,
    *,
    weights: str,
    weight_version: str,
    codec: str,
) -> Namespace:
    """The namespace of this rank's KV under the given weights, encoded as `codec` says."""
    args, model = ctx.server_args, ctx.model_config
    hf_config = json.dumps(model.hf_text_config.to_dict(), sort_keys=True, default=str)
    facts: dict[str, object] = {
        "model": os.path.basename(os.path.normpath(model.model_path)),
        "weights": weights,
        "weight_version": weight_version,
        "config": hashlib.sha256(hf_config.encode()).hexdigest(),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": args.quantization,
        "kv_scales": getattr(args, "quantization_param_path", None),
        "layout": layout.describe(),
        "page_tokens": ctx.params.page_size,
        "tp_rank": ctx.tp_rank,
        "tp_size": ctx.tp_size,
        "pp_rank": ctx.params.pp_rank,
        "pp_size": ctx.params.pp_size,
        "codec": codec,
    }
    return Namespace(tuple((name, str(value)) for name, value in facts.items()))


def rope_theta(config: Any) -> float | None:
    """The base of the model's RoPE; None if it has none, or turns only a part of each head."""
    found = getattr(config, "rope_parameters", None) or {}
    theta = found.get("rope_theta", getattr(config, "rope_theta", None))
    share = found.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if isinstance(theta, int | float) and theta > 1 and share in (None, 1):
        return float(theta)
    return None


def unrepeatable_weights() -> str:
    """A digest for weights that were pushed into the running server: nobody can name them again."""
    return f"pushed-{uuid.uuid4().hex}"


def _local_folder(path: str, revision: str | None) -> Path:
    if Path(path).exists():
        return Path(path) if Path(path).is_dir() else Path(path).parent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise ConfigError(f"cake finds no local copy of the weights of {path!r}") from error


def _file_digest(file: Path) -> bytes:
    digest = xxhash.xxh3_128()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_BYTES:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
            return bytes(digest.digest())
        digest.update(str(file.stat().st_mtime_ns).encode())
        for start in _samples(file, size):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BYTES))
    return bytes(digest.digest())


def _samples(file: Path, size: int) -> Iterator[int]:
    """Offsets to sample: begin, middle and end of every tensor, or evenly over the file."""
    tensors = _tensor_spans(file) if file.suffix == ".safetensors" else []
    for start, stop in tensors:
        yield from (start, (start + stop) // 2, max(start, stop - _SAMPLE_BYTES))
    if not tensors:
        yield from range(0, size, max(1, size // _SAMPLES))


def _tensor_spans(file: Path) -> list[tuple[int, int]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    base = 8 + length
    spans = [(0, base)]  # the header itself
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            spans.append((base + start, base + stop))
    return spans
