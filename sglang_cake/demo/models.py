"""Random models, made without a network: a Llama, and a byte-level tokenizer."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Some clients (SGLang's own test kits among them) insist on a chat template.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def built_once(path: Path, build: Callable[[Path], object]) -> Path:
    """The folder `path`. If there is none, `build` makes it beside, and it is renamed when it is
    complete: an interrupted build is never used as a model."""
    if not path.is_dir():
        building = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        try:
            build(building)
            building.rename(path)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return path


def build_llama(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    max_tokens: int = 32768,
) -> Path:
    """Write a random Llama with its tokenizer to `path`; the same arguments give the same files.

    The embeddings are untied and the weights large (0.08), which makes the output depend strongly
    on the whole prompt: with the usual initialisation, wrong KV hardly changes a random model's
    tokens, and a check of the output would prove nothing.

    Args:
        vocab: at least 256; tokens from 256 up are never produced by the tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return write_model(path, LlamaForCausalLM, config, seed=seed, dtype=dtype)


def write_model(
    path: Path,
    kind: Any,
    config: Any,
    *,
    seed: int = 0,
    dtype: str = "float32",
    change: Callable[[Any], None] = lambda model: None,
) -> Path:
    """Write a random model and its tokenizer to `path`, and return it.

    Args:
        kind: class of transformers that makes the model of its `config`.
        change: may change the weights of the model before they are written.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    change(model)
    path.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE
    )
