"""What a codec does to a language model: errors of KV, and of the text that follows.

The model reads a prefix; the KV of the prefix is rounded to bfloat16, as a server holds it, and
goes through a codec block by block. Then the model reads on what follows, in float32, once with the
KV as it was and once with what was decoded.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from benchmarks.real_texts import real_texts
from benchmarks.train_small_llama import texts
from sglang_cake.codecs.block_arrays import Block, relative_error
from sglang_cake.codecs.catalogue import decode
from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES, HEADER_BYTES
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.core.layout import DTYPE_BYTES, BlockLayout

BLOCK_TOKENS = 128
AT_ONCE_TOKENS = 4096  # of windows of text
BOOTSTRAPS = 1000
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Text:
    """What the model made of one batch of windows with exact KV."""

    blocks: Words  # `[windows, blocks, layers, 2, tokens, channels]`: the prefixes' KV
    after: torch.Tensor  # int64 `[windows, tokens]`: what follows
    log_probs: torch.Tensor  # `[windows, tokens - 1, vocabulary]` of every token but the first


def held_out_windows(tokenizer: Any, *, windows: int, tokens: int) -> torch.Tensor:
    """Of text that the small model was not trained on, int64 `[windows, tokens]`."""
    files = tokenizer.encode_batch(list(texts(held_out=True)))
    held_out = [token for file in files for token in file.ids]
    starts = np.linspace(0, len(held_out) - tokens - 1, windows).astype(int)
    return torch.tensor([held_out[start : start + tokens] for start in starts])


def document_windows(tokenizer: Any, *, tokens: int) -> torch.Tensor:
    """The beginning of each of `real_texts`, int64 `[documents, tokens]`."""
    encoded = [tokenizer.encode(text).ids[:tokens] for text in real_texts().values()]
    return torch.tensor(encoded)


class Judge:
    """A model, and the text that it judges codecs on."""

    def __init__(self, model: Path, windows: torch.Tensor, prefix: int):
        """Args:
        windows: int64 `[windows, tokens]`.
        prefix: tokens of each window that go through codecs, in whole blocks.
        """
        assert prefix % BLOCK_TOKENS == 0, prefix
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        config = self.model.config
        self.heads = (config.num_key_value_heads, config.head_dim)
        parts = (("k", self.heads), ("v", self.heads))
        self.layout = BlockLayout.plain(config.num_hidden_layers, parts, "bfloat16", BLOCK_TOKENS)
        self.theta = float(config.rope_parameters["rope_theta"])
        self.prefix = prefix
        self.batches_of_windows = windows.split(max(1, AT_ONCE_TOKENS // windows.shape[1]))
        with torch.inference_mode():
            self.batches = [self._read(batch) for batch in self.batches_of_windows]

    def blocks(self) -> Words:
        """Of all windows, `[blocks, layers, 2, tokens, channels]`."""
        return np.concatenate(
            [batch.blocks.reshape(-1, *batch.blocks.shape[2:]) for batch in self.batches]
        )

    def _read(self, windows: torch.Tensor) -> Text:
        blocks = kv_blocks(self.model, windows[:, : self.prefix])
        after = windows[:, self.prefix :]
        return Text(blocks, after, self._follow(blocks, after))

    def _follow(self, blocks: Words, after: torch.Tensor) -> torch.Tensor:
        """Log probabilities of `after` but its last token, behind a prefix."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._as_cache(blocks)):
            cache.update(keys, values, layer)
        logits = self.model(after[:, :-1], past_key_values=cache, use_cache=True).logits
        return torch.log_softmax(logits, -1)

    def judge(self, chain: Chain, *, exact_first: bool = True) -> dict[str, Any]:
        """Every figure of a codec. Args: exact_first: the first token of a window is kept."""
        sizes: list[int] = []
        errors: list[tuple[float, float, float]] = []
        apart: list[npt.NDArray[np.float64]] = []  # [windows, 4]
        with torch.inference_mode():
            for text in self.batches:
                decoded, made = self._through(chain, text.blocks, exact_first)
                sizes += made
                errors += self._relative_errors(text.blocks, decoded)
                apart.append(_apart(text, self._follow(decoded, text.after)))
        return _figures(self.layout, sizes, errors, np.concatenate(apart))

    def bare(self) -> dict[str, float]:
        """How well the model reads on with exact KV, and without anything before."""
        losses = []
        with torch.inference_mode():
            for text in self.batches:
                alone = torch.log_softmax(self.model(text.after[:, :-1]).logits, -1)
                losses.append(_apart(text, alone)[:, 2:])
        exact, without = np.concatenate(losses).mean(axis=0)
        return {
            "perplexity": round(math.exp(exact), 3),
            "perplexity_without_prefix": round(math.exp(without), 3),
        }

    def _as_cache(self, blocks: Words) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks as `Text.blocks` -> K and V of each layer, `[windows, heads, tokens, head]`."""
        numbers = torch.from_numpy(blocks).view(torch.bfloat16).float()
        windows, count, layers, _, tokens, channels = blocks.shape
        planes = numbers.permute(2, 3, 0, 1, 4, 5)
        planes = planes.reshape(layers, 2, windows, count * tokens, channels)
        heads = planes.unflatten(-1, self.heads).transpose(3, 4)
        return [(heads[layer, 0], heads[layer, 1]) for layer in range(layers)]

    def _through(self, chain: Chain, blocks: Words, exact_first: bool) -> tuple[Words, list[int]]:
        """What comes back of blocks, and how many bytes each was in a store."""
        decoded = np.empty_like(blocks)
        payload = memoryview(bytearray(self.layout.block_bytes + ENCODED_HEAD_BYTES))
        sizes = []
        for window, index in np.ndindex(blocks.shape[:2]):
            block = memoryview(np.ascontiguousarray(blocks[window, index])).cast("B")
            used = chain.of_first() if index == 0 and exact_first else chain
            size = used.encode(self.layout, block, payload)
            out = memoryview(decoded[window, index]).cast("B")
            decode(self.layout, payload[:size], out)
            sizes.append(HEADER_BYTES + size)
        return decoded, sizes

    def _relative_errors(self, exact: Words, decoded: Words) -> list[tuple[float, float, float]]:
        """Of each block: |decoded - exact| / |exact| of K and of V over all layers, and the measure
        of `--cake-max-error`."""
        found = []
        for window, index in np.ndindex(exact.shape[:2]):
            views = [
                memoryview(np.ascontiguousarray(words[window, index])).cast("B")
                for words in (exact, decoded)
            ]
            one, other = (Block.over(self.layout, view) for view in views)
            shares = []
            for part in one.parts:
                numbers = one.floats(part).astype(np.float64)
                gap = np.linalg.norm(other.floats(part) - numbers)
                shares.append(float(gap / np.linalg.norm(numbers)))
            found.append((shares[0], shares[1], relative_error(self.layout, *views)))
        return found


def kv_blocks(model: Any, windows: torch.Tensor) -> Words:
    """KV of whole blocks of tokens as a server holds it, as `Text.blocks`."""
    kv = DynamicCache()
    for some in windows.split(AT_ONCE_TOKENS // 8, dim=1):
        model.model(some, past_key_values=kv, use_cache=True)
    planes = [torch.stack([_by_token(layer.keys), _by_token(layer.values)]) for layer in kv.layers]
    words = torch.stack(planes).to(torch.bfloat16).view(torch.uint16).numpy()
    # [layers, 2, windows, tokens, channels] -> [windows, blocks, layers, 2, tokens, channels]
    shape = (*words.shape[:3], -1, BLOCK_TOKENS, words.shape[4])
    return np.ascontiguousarray(words.reshape(shape).transpose(2, 3, 0, 1, 4, 5))


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """`[windows, heads, tokens, head]` -> `[windows, tokens, heads * head]`."""
    return heads.transpose(1, 2).flatten(2)


def _apart(text: Text, log_probs: torch.Tensor) -> npt.NDArray[np.float64]:
    """Means of each window: KL, top-1 agreement, loss with exact and with decoded KV."""
    exact, targets = text.log_probs, text.after[:, 1:, None]
    kl = (exact.exp() * (exact - log_probs)).sum(-1).mean(1)
    same = (exact.argmax(-1) == log_probs.argmax(-1)).double().mean(1)
    losses = [-some.gather(-1, targets).squeeze(-1).mean(1) for some in (exact, log_probs)]
    return torch.stack([kl, same, *losses], dim=1).double().numpy()


def _by_window(errors: Sequence[float], apart: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The root of the mean square over the blocks of each window."""
    return np.sqrt(np.mean(np.square(errors).reshape(len(apart), -1), axis=1))


def ranks_agree(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation of ranks."""
    ranks = [np.argsort(np.argsort(some)) for some in zip(*pairs, strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


def _figures(
    layout: BlockLayout,
    sizes: Sequence[int],
    errors: Sequence[tuple[float, float, float]],
    apart: npt.NDArray[np.float64],
) -> dict[str, Any]:
    gaps = apart[:, 3] - apart[:, 2]
    draw = random.Random(0)
    means = sorted(
        float(np.mean([gaps[draw.randrange(len(gaps))] for _ in gaps])) for _ in range(BOOTSTRAPS)
    )
    low, high = means[int(0.025 * BOOTSTRAPS)], means[int(0.975 * BOOTSTRAPS) - 1]
    numbers = layout.block_bytes / DTYPE_BYTES[layout.groups[0].dtype]
    return {
        "bytes_per_token": round(float(np.mean(sizes)) / BLOCK_TOKENS, 2),
        "ratio": round(layout.block_bytes / float(np.mean(sizes)), 4),
        "bits_per_number": round(8 * float(np.mean(sizes)) / numbers, 3),
        "error_k": round(float(np.mean([k for k, _, _ in errors])), 6),
        "error_v": round(float(np.mean([v for _, v, _ in errors])), 6),
        "error": round(float(np.mean([both for _, _, both in errors])), 6),
        "error_most": round(float(np.max([both for _, _, both in errors])), 6),
        "error_by_window": [
            float(f"{e:.4g}") for e in _by_window([e for _, _, e in errors], apart)
        ],
        "kl_by_window": [float(f"{kl:.4g}") for kl in apart[:, 0]],
        "kl": float(f"{apart[:, 0].mean():.3e}"),
        "top1_same": round(float(apart[:, 1].mean()), 5),
        "perplexity": round(math.exp(apart[:, 2].mean()), 4),
        "perplexity_change_percent": round(100 * math.expm1(gaps.mean()), 4),
        "perplexity_change_interval": [round(100 * math.expm1(gap), 4) for gap in (low, high)],
    }
