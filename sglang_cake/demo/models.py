"""Random models, made without a network: Llama or DeepSeek-V2, and a byte-level tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BYTE_SYMBOLS = 256
# Some clients (SGLang's own test kits among them) insist on a chat template.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
    write_model(path, LlamaForCausalLM, config, seed=seed, dtype=dtype)
    return path


def build_deepseek(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    latent: int,
    head_dim: int = 32,
    rope_dim: int = 32,
    dtype: str = "float32",
    max_tokens: int = 8192,
) -> Path:
    """Write a random dense DeepSeek-V2 to `path`, as `build_llama` does.

    Args:
        latent, rope_dim: values of one token's KV in a layer.
        head_dim: of queries and values, without the part that is turned.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=512,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=layers,
        n_group=1,
        topk_group=1,
    )
    write_model(path, DeepseekV2ForCausalLM, config, dtype=dtype)
    # SGLang reads these fields, and this version of transformers does not write them.
    file = path / "config.json"
    facts = json.loads(file.read_text())
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": max_tokens,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    facts |= {
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "rope_theta": 10000.0,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 10000.0},
    }
    file.write_text(json.dumps(facts))
    return path


def write_model(
    path: Path,
    kind: Any,
    config: Any,
    *,
    seed: int = 0,
    dtype: str = "float32",
    change: Callable[[Any], None] = lambda model: None,
) -> None:
    """Write a random model and its tokenizer to `path`.

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


def kv_token_bytes(path: Path, dtype: str) -> int:
    """Bytes of KV that a server with `--dtype` keeps for one token of the model at `path`."""
    config = json.loads((path / "config.json").read_text())
    config = config.get("text_config", config)
    if dtype == "auto":
        stored = config.get("dtype") or config.get("torch_dtype") or "float16"
        dtype = "float16" if stored == "float32" else stored
    size = 4 if dtype in ("float32", "float") else 2
    layers: int = config["num_hidden_layers"]
    if "kv_lora_rank" in config:  # MLA keeps one latent row a layer
        return layers * size * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads: int = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return layers * size * 2 * int(kv_heads) * int(head_dim)
