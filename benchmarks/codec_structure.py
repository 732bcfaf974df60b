"""Whether KV has what codecs live on: channels that are always large, and neighbours alike.

Of every layer's K and V, as they are stored:

- the largest channel over the median one, by the root of the mean square over all tokens;
- how much a channel's number goes with that of the token before: the correlation, mean over the
  channels.

KV of random weights, on the same text, stands beside: what is as large there, no model has learned.
"""

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.codec_quality import Judge, Words, kv_blocks

TRAINED, RANDOM = "trained", "random weights"


def structure(blocks: Words) -> list[dict[str, float]]:
    """Of each layer. Args: blocks: bfloat16 `[blocks, layers, 2, tokens, channels]`."""
    found = []
    for layer in range(blocks.shape[1]):
        row: dict[str, float] = {}
        for name, planes in zip("kv", blocks[:, layer].swapaxes(0, 1), strict=True):
            numbers = (planes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            sizes = np.sqrt(np.mean(np.square(numbers), axis=(0, 1)))
            row[f"{name}_largest_to_median"] = round(float(sizes.max() / np.median(sizes)), 2)
            around = numbers - numbers.mean(axis=(0, 1))
            together = (around[:, 1:] * around[:, :-1]).mean(axis=(0, 1))
            alike = together / np.maximum(np.square(around).mean(axis=(0, 1)), 1e-30)
            row[f"{name}_neighbours"] = round(float(alike.mean()), 3)
        found.append(row)
    return found


def structures(judge: Judge) -> dict[str, Any]:
    """Of the trained model, and of one with the same shape and random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(judge.model.config).eval()
    with torch.inference_mode():
        made = [kv_blocks(model, some[:, : judge.prefix]) for some in judge.batches_of_windows]
    random = np.concatenate([blocks.reshape(-1, *blocks.shape[2:]) for blocks in made])
    return {TRAINED: structure(judge.blocks()), RANDOM: structure(random)}
