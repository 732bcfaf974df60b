"""What a codec does to a language model: errors of KV, of attention, and of the text that follows.

The model is the one of `train_small_llama`. It reads a prefix of text that it was never trained on;
the KV of the prefix is rounded to bfloat16, as a server holds it, and goes through a codec block by
block. Then the model reads on, once with the KV as it was and once with what was decoded.
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
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.train_small_llama import CONFIG, texts
from sglang_cake.codec.blocks import Block
from sglang_cake.codec.catalogue import decode
from sglang_cake.codec.chain import Chain
from sglang_cake.codec.encoded import HEAD_BYTES
from sglang_cake.codec.error import relative_error
from sglang_cake.codec.frame import HEADER_BYTES
from sglang_cake.layout import BlockLayout

LAYERS, HEADS, HEAD = CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
BLOCK_TOKENS = 128
LAYOUT = BlockLayout(LAYERS, (("k", (HEADS, HEAD)), ("v", (HEADS, HEAD))), "bfloat16", BLOCK_TOKENS)
THETA = 10000.0  # of CONFIG's RoPE, the default
AT_ONCE = 8  # windows of text
BOOTSTRAPS = 1000
Words = npt.NDArray[np.uint16]

_queries: list[torch.Tensor] = []  # of every layer, while `_remember` is on
_remember = False


def _attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _remember:
        _queries.append(query)
    return sdpa_attention_forward(module, query, *args, **kwargs)


AttentionInterface.register("remembering", _attention)
AttentionMaskInterface.register("remembering", sdpa_mask)


@dataclass(frozen=True)
class Text:
    """What the model made of one batch of windows with exact KV."""

    blocks: Words  # `[windows, blocks, layers, 2, tokens, channels]`: the prefixes' KV
    after: torch.Tensor  # int64 `[windows, tokens]`: what follows
    log_probs: torch.Tensor  # `[windows, tokens - 1, vocabulary]` of every token but the first
    queries: tuple[torch.Tensor, ...]  # of each layer, `[windows, heads, tokens - 1, head]`
    own: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # K and V of what follows, each layer


class Judge:
    """The small model, and the text that it judges codecs on."""

    def __init__(self, model: Path, tokenizer: Any, *, windows: int, prefix: int, after: int):
        """Args: prefix, after: tokens of each window, the prefix in whole blocks."""
        assert prefix % BLOCK_TOKENS == 0, prefix
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="remembering"
        ).eval()
        tokens = [
            token
            for file in tokenizer.encode_batch(list(texts(held_out=True)))
            for token in file.ids
        ]
        starts = np.linspace(0, len(tokens) - prefix - after - 1, windows).astype(int)
        self.windows = torch.tensor([tokens[s : s + prefix + after] for s in starts])
        self.prefix, self.tokens_held_out = prefix, len(tokens)
        with torch.inference_mode():
            self.batches = [self._read(batch) for batch in self.windows.split(AT_ONCE)]

    def blocks(self) -> Words:
        """Of all windows, `[blocks, layers, 2, tokens, channels]`."""
        return np.concatenate(
            [batch.blocks.reshape(-1, *batch.blocks.shape[2:]) for batch in self.batches]
        )

    def _read(self, windows: torch.Tensor) -> Text:
        blocks = kv_blocks(self.model, windows[:, : self.prefix])
        after = windows[:, self.prefix :]
        log_probs, queries, own = self._follow(blocks, after)
        return Text(blocks, after, log_probs, queries, own)

    def _follow(self, blocks: Words, after: torch.Tensor) -> tuple[Any, Any, Any]:
        """Log probabilities, queries and KV of `after` but its last token, behind a prefix."""
        global _remember
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(_as_cache(blocks)):
            cache.update(keys, values, layer)
        _queries.clear()
        _remember = True
        logits = self.model(after[:, :-1], past_key_values=cache, use_cache=True).logits
        _remember = False
        own = tuple(
            (layer.keys[:, :, self.prefix :], layer.values[:, :, self.prefix :])
            for layer in cache.layers
        )
        return torch.log_softmax(logits, -1), tuple(_queries), own

    def judge(self, chain: Chain) -> dict[str, Any]:
        """Every figure of a codec."""
        sizes: list[int] = []
        errors: list[tuple[float, float, float]] = []
        apart: list[npt.NDArray[np.float64]] = []  # [windows, 4]
        attention: list[float] = []
        with torch.inference_mode():
            for text in self.batches:
                decoded, made = _through(chain, text.blocks)
                sizes += made
                errors += _relative_errors(text.blocks, decoded)
                attention += self._attention_errors(text, decoded)
                log_probs, _, _ = self._follow(decoded, text.after)
                apart.append(_apart(text, log_probs))
        return _figures(sizes, errors, attention, np.concatenate(apart))

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

    def _attention_errors(self, text: Text, decoded: Words) -> list[float]:
        """Of each layer: |output - exact| / |exact|, for the queries that exact KV led to."""
        found = []
        pairs = zip(_as_cache(text.blocks), _as_cache(decoded), text.queries, text.own, strict=True)
        for exact, lossy, query, own in pairs:
            one, other = (self._attend(query, kv, own) for kv in (exact, lossy))
            found.append(float((other - one).norm() / one.norm()))
        return found

    def _attend(self, query: torch.Tensor, kv: Any, own: Any) -> torch.Tensor:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(kv, own, strict=True))
        rows, columns = query.shape[2], keys.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def kv_blocks(model: Any, windows: torch.Tensor) -> Words:
    """KV of whole blocks of tokens as a server holds it, as `Text.blocks`."""
    kv = model(windows, use_cache=True).past_key_values
    planes = [torch.stack([_by_token(layer.keys), _by_token(layer.values)]) for layer in kv.layers]
    words = torch.stack(planes).to(torch.bfloat16).view(torch.uint16).numpy()
    # [layers, 2, windows, tokens, channels] -> [windows, blocks, layers, 2, tokens, channels]
    shape = (*words.shape[:3], -1, BLOCK_TOKENS, words.shape[4])
    return np.ascontiguousarray(words.reshape(shape).transpose(2, 3, 0, 1, 4, 5))


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """`[windows, heads, tokens, head]` -> `[windows, tokens, heads * head]`."""
    return heads.transpose(1, 2).flatten(2)


def _as_cache(blocks: Words) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks as `Text.blocks` -> K and V of each layer, `[windows, heads, tokens, head]`."""
    numbers = torch.from_numpy(blocks).view(torch.bfloat16).float()
    windows, count, layers, _, tokens, channels = blocks.shape
    planes = numbers.permute(2, 3, 0, 1, 4, 5).reshape(layers, 2, windows, count * tokens, channels)
    heads = planes.unflatten(-1, (HEADS, HEAD)).transpose(3, 4)
    return [(heads[layer, 0], heads[layer, 1]) for layer in range(layers)]


def _through(chain: Chain, blocks: Words) -> tuple[Words, list[int]]:
    """What comes back of blocks, and how many bytes each was in a store."""
    decoded = np.empty_like(blocks)
    payload = memoryview(bytearray(LAYOUT.block_bytes + HEAD_BYTES))
    sizes = []
    for window, index in np.ndindex(blocks.shape[:2]):
        block = memoryview(np.ascontiguousarray(blocks[window, index])).cast("B")
        size = chain.encode(LAYOUT, block, payload)
        out = memoryview(decoded[window, index]).cast("B")
        decode(LAYOUT, payload[:size], out)
        sizes.append(HEADER_BYTES + size)
    return decoded, sizes


def _relative_errors(exact: Words, decoded: Words) -> list[tuple[float, float, float]]:
    """Of each block: |decoded - exact| / |exact| of K and of V over all layers, and of the worst
    plane, which is the measure of `--cake-max-error`."""
    found = []
    for window, index in np.ndindex(exact.shape[:2]):
        views = [
            memoryview(np.ascontiguousarray(words[window, index])).cast("B")
            for words in (exact, decoded)
        ]
        one, other = (Block.over(LAYOUT, view) for view in views)
        shares = []
        for part in one.parts:
            numbers = one.floats(part).astype(np.float64)
            shares.append(
                float(np.linalg.norm(other.floats(part) - numbers) / np.linalg.norm(numbers))
            )
        found.append((shares[0], shares[1], relative_error(LAYOUT, *views)))
    return found


def _apart(text: Text, log_probs: torch.Tensor) -> npt.NDArray[np.float64]:
    """Means of each window: KL, top-1 agreement, loss with exact and with decoded KV."""
    exact, targets = text.log_probs, text.after[:, 1:, None]
    kl = (exact.exp() * (exact - log_probs)).sum(-1).mean(1)
    same = (exact.argmax(-1) == log_probs.argmax(-1)).double().mean(1)
    losses = [-some.gather(-1, targets).squeeze(-1).mean(1) for some in (exact, log_probs)]
    return torch.stack([kl, same, *losses], dim=1).double().numpy()


def _figures(
    sizes: Sequence[int],
    errors: Sequence[tuple[float, float, float]],
    attention: Sequence[float],
    apart: npt.NDArray[np.float64],
) -> dict[str, Any]:
    gaps = apart[:, 3] - apart[:, 2]
    draw = random.Random(0)
    means = sorted(
        float(np.mean([gaps[draw.randrange(len(gaps))] for _ in gaps])) for _ in range(BOOTSTRAPS)
    )
    low, high = means[int(0.025 * BOOTSTRAPS)], means[int(0.975 * BOOTSTRAPS) - 1]
    return {
        "bytes_per_token": round(float(np.mean(sizes)) / BLOCK_TOKENS, 2),
        "ratio": round(LAYOUT.block_bytes / float(np.mean(sizes)), 4),
        "error_k": round(float(np.mean([k for k, _, _ in errors])), 6),
        "error_v": round(float(np.mean([v for _, v, _ in errors])), 6),
        "error_worst": round(float(np.max([worst for _, _, worst in errors])), 6),
        "attention_error": round(float(np.mean(attention)), 6),
        "kl": float(f"{apart[:, 0].mean():.3e}"),
        "top1_same": round(float(apart[:, 1].mean()), 5),
        "perplexity": round(math.exp(apart[:, 2].mean()), 4),
        "perplexity_change_percent": round(100 * math.expm1(gaps.mean()), 4),
        "perplexity_change_interval": [round(100 * math.expm1(gap), 4) for gap in (low, high)],
    }
