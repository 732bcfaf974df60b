"""The images, videos and audio of a request, as its keys cover them.

SGLang tells media apart by 64 bits of a hash, which a client may choose (`mm_hashes`), and which do
not cover the grid of an image. Its tree and its cache of embeddings find KV and embeddings by these
bits. So the KV of a request with images may be that of other images, and must not be stored.

Here each item gets an identity first: 32 bytes that no client can compute, made from a digest of
all that the model sees of the item. SGLang derives its own numbers from the identity, so its tree
and its cache tell the items apart, too. An item that got none, or whose identity was changed since,
leaves its request to SGLang.
"""

import hashlib
import hmac
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.core.keys import NO_MEDIA, Media, MediaItem
from sglang_cake.integration.boundary import register
from sglang_cake.integration.request.request_metadata import tenant_key

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import (
        MultimodalDataItem,
        MultimodalInputs,
        MultimodalProcessorOutput,
        Req,
    )
    from sglang.srt.managers.scheduler import Scheduler

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DIGESTS = "cake_media_digests"  # attribute of SGLang's `MultimodalInputs`: one for each item


def install() -> None:
    """Register the hook. Call while plugins are being loaded."""
    register(f"{_SCHEDULER}._get_multimodal_inputs", _prepared, HookType.AROUND)


def _prepared(original: Any, scheduler: "Scheduler", mm_inputs: Any) -> Any:
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    coordinator = getattr(scheduler.tree_cache, "coordinator", None)
    keys_media = coordinator is not None and coordinator.keys.covers_media
    digests = None
    if keys_media and isinstance(mm_inputs, MultimodalProcessorOutput):
        digests = identify(mm_inputs)
    found = original(scheduler, mm_inputs)
    if digests is not None:
        setattr(found, _DIGESTS, digests)
    return found


def identify(processed: "MultimodalProcessorOutput") -> list[bytes] | None:
    """Give all items of a request their identities, in the place of SGLang's hashes.

    Returns: the digest of each item that SGLang keeps; None: the items stay as they are.
    """
    from sglang.srt.environ import envs

    if envs.SGLANG_MM_SKIP_COMPUTE_HASH.get():
        return None
    padded, rows = processed.padded_input_ids, processed.mrope_positions
    items = [item for item in processed.mm_items if item.is_valid()]
    digests = []
    for item in items:
        digest = item_digest(item) if _is_hash_sglangs(item, padded) else None
        if digest is None or not item.offsets:
            return None
        digests.append(digest)
    for item, digest in zip(items, digests, strict=True):
        item.set_identity(_identity(digest, item, rows))
    if padded is not None:
        processed.padded_input_ids = processed.build_padded_input_ids(padded, items)
    return digests


def _is_hash_sglangs(item: "MultimodalDataItem", padded: list[int] | None) -> bool:
    """Whether the item has no hash, or not that of a client, on which a router may rely. SGLang
    takes a client's hash after it has put its own numbers into the prompt."""
    if item.identity is not None or (item.hash is None and item.pad_value is None):
        return True
    return padded is not None and _is_padded(item, array("q", padded))


def item_digest(item: "MultimodalDataItem") -> bytes | None:
    """32 bytes that stand for all that the model sees of an item: the processor's output, with
    dtypes and shapes, and the values beside it (grids, time stamps, masks).

    None for an item whose features are final embeddings, or not tensors in host memory.
    """
    from sglang.srt.multimodal.cache import CONTENT_HASH_PREFIX, build_artifact_key
    from sglang.srt.multimodal.modality import MultimodalInputFormat

    if item.format is not MultimodalInputFormat.NORMAL or item.precomputed_embeddings is not None:
        return None
    parts = item.feature if isinstance(item.feature, list) else [item.feature]
    if not parts:
        return None
    hashed = hashlib.sha256()
    for part in parts:
        tensor = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return None
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(raw.numpy().data)
    try:
        digest = build_artifact_key(
            CONTENT_HASH_PREFIX + hashed.hexdigest(),
            modality=item.modality.name,
            processor_fingerprint="sglang_cake media v1",
            preprocess_kwargs=item.model_specific_data,
        )
    except (ValueError, RuntimeError):  # a value that SGLang cannot put into a key
        return None
    return bytes.fromhex(digest.removeprefix(CONTENT_HASH_PREFIX))


def forget_embeddings() -> None:
    """Empty SGLang's cache of embeddings: neither an update of weights nor /flush_cache does. The
    next KV of an image would be that of the old vision tower, under the name of the new weights."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def media_numbers() -> int:
    """From here on are the numbers that SGLang puts in the place of media; tokens are below."""
    from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

    return int(MM_PAD_SHIFT_VALUE)


def media_of(req: "Req") -> Media | None:
    """The media of the request; None: they cannot be identified, so the request has no keys.

    A request without media must not have the numbers that SGLang puts in the place of media: a
    client may send them as tokens.
    """
    found = req.multimodal_inputs
    media = NO_MEDIA if found is None else _media(found, req.origin_input_ids)
    if media is None:
        return None
    text = media.without_pads(req.origin_input_ids) if media.items else req.origin_input_ids
    largest = np.frombuffer(text, dtype=np.int64).max(initial=0)
    return media if largest < media_numbers() else None


def _media(found: "MultimodalInputs", tokens: "array[int]") -> Media | None:
    digests = getattr(found, _DIGESTS, None)
    if digests is None or len(digests) != len(found.mm_items):
        return None
    # These say more about a prompt than its items. The models that use them are not reviewed.
    others = (
        found.token_modalities,
        found.vision_position_ids,
        found.media_nums_per_sample,
        found.visible_frame_counts,
    )
    if any(each is not None for each in others):
        return None
    items = []
    for item, digest in zip(found.mm_items, digests, strict=True):
        if not _is_padded(item, tokens):
            return None
        if item.identity != _identity(digest, item, found.mrope_positions):
            return None
        items.append(MediaItem(digest, tuple((start, end + 1) for start, end in item.offsets)))
    bounds = [bound for item in items for span in item.spans for bound in span]
    if bounds != sorted(bounds):
        return None
    if found.mrope_positions is None:
        return Media(tuple(items))
    return _with_positions(tuple(items), found, len(tokens))


def _is_padded(item: "MultimodalDataItem", tokens: "array[int]") -> bool:
    """Whether the item's numbers, and nothing else, are in its place."""
    return bool(item.offsets) and all(
        0 <= start <= end < len(tokens)
        and tokens[start : end + 1] == array("q", item.padding_sequence(end + 1 - start))
        for start, end in item.offsets
    )


def _with_positions(
    items: tuple[MediaItem, ...], found: "MultimodalInputs", tokens: int
) -> Media | None:
    """`Media` with M-RoPE positions. None if those of text do not go on one by one, from 0 on and
    also after the prompt: SGLang's tree knows only the positions in an identity."""
    rows, delta = found.mrope_positions, found.mrope_position_delta
    if rows is None or rows.dim() != 2 or rows.shape[1] < tokens:
        return None
    if delta is None or delta.numel() != 1:
        return None
    rows, shift = rows.cpu().to(torch.int64), int(delta.item())
    # SGLang appends the positions of the answer if it computes the request again.
    ahead = torch.arange(tokens - 1, rows.shape[1]) + shift
    if not torch.equal(rows[:, tokens - 1 :], ahead.expand(rows.shape[0], -1)):
        return None
    rows = rows[:, :tokens]
    is_text = torch.ones(tokens + 1, dtype=torch.bool)  # the first one is before the prompt
    for start, stop in (span for item in items for span in item.spans):
        is_text[start + 1 : stop + 1] = False
    steps = torch.diff(rows, prepend=torch.full((rows.shape[0], 1), -1))
    if not bool((steps[:, is_text[1:] & is_text[:-1]] == 1).all()):
        return None
    positions = (array("q", row.numpy().tobytes()) for row in rows)
    return Media(items, tuple(positions), shift)


def _identity(digest: bytes, item: "MultimodalDataItem", rows: torch.Tensor | None) -> bytes:
    """32 bytes, from the item's digest and from how positions go on around and inside its tokens.

    Args: rows: M-RoPE positions of the prompt; None: each position is the index.
    """
    message = b"media" + digest
    if rows is not None:
        for start, end in item.offsets:
            before = max(0, start - 1)
            origin = rows[:1, before : before + 1] if start else -1
            steps = (rows[:, before : end + 2] - origin).to(torch.int64).cpu()
            message += f" {start - before} {tuple(steps.shape)} ".encode() + steps.numpy().tobytes()
    return hmac.digest(tenant_key(), message, "sha256")
