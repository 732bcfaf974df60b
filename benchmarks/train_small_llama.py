"""Trains the small Llama whose KV the codecs are judged on.

    python -m benchmarks.train_small_llama [--steps 450] [--out benchmarks/.work/small-llama]

KV of random weights is noise: it has no outlier channels and no smooth neighbours, and says nothing
about a codec. So a Llama is trained for some minutes on text that every machine with Python has:
the sources of the standard library. Tokens are byte pairs learned from the same text. Nothing is
drawn from the clock: the same Python, PyTorch and number of threads give the same model. One file
in sixteen is held out, and only these are measured on.
"""

import argparse
import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.facts import ROOT

OUT = ROOT / "benchmarks" / ".work" / "small-llama"
VOCAB = 1024
HELD_OUT = 16  # every so manieth file is never trained on
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# (share of the steps, tokens of a sequence, sequences of a step): long ones only at the end, when
# there is something to attend to; attention costs most there.
PHASES = ((0.85, 256, 8), (0.15, 1024, 2))
STEPS, WARM_UP_STEPS, LEARNING_RATE, THREADS = 450, 20, 3e-3, 2


def sources() -> list[Path]:
    """The standard library's own modules, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    return [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]


def texts(*, held_out: bool) -> Iterator[str]:
    """The text to train on, or the other."""
    for index, path in enumerate(sources()):
        if (index % HELD_OUT == 0) is held_out:
            yield path.read_text(encoding="utf-8", errors="replace")


def make_tokenizer() -> Tokenizer:
    """Byte pairs of the text to train on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts(held_out=False), trainer)
    return tokenizer


def tokens_of(tokenizer: Any, *, held_out: bool) -> torch.Tensor:
    """All files one after the other, int64 `[tokens]`."""
    encoded = tokenizer.encode_batch(list(texts(held_out=held_out)))
    return torch.tensor([token for file in encoded for token in file.ids])


def train(tokens: torch.Tensor, steps: int) -> tuple[LlamaForCausalLM, list[float]]:
    """In float32. Returns the model and the loss of every step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    # Muon for what multiplies activations: fewer steps to the same loss than AdamW.
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    begun_s = time.monotonic()
    for step, (length, count) in enumerate(_steps(steps)):
        for group in [group for one in optimizers for group in one.param_groups]:
            group["lr"] = _learning_rate(step, steps)
        starts = torch.randint(len(tokens) - length, (count,), generator=draw)
        batch = torch.stack([tokens[s : s + length] for s in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 19:
            recent = sum(losses[-20:]) / 20
            spent_s = time.monotonic() - begun_s
            print(f"step {step + 1}/{steps}, {spent_s:.0f} s: loss {recent:.3f}", flush=True)
    return model.eval(), losses


def _learning_rate(step: int, steps: int) -> float:
    cosine = (1 + math.cos(math.pi * step / steps)) / 2
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * cosine)


def _steps(steps: int) -> Iterator[tuple[int, int]]:
    for share, length, count in PHASES:
        for _ in range(round(share * steps)):
            yield length, count


def recipe(steps: int) -> str:
    """What the model at hand was made by; another recipe is another model."""
    text = Path(__file__).read_text() + f"{steps} {torch.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def small_llama(out: Path, steps: int) -> Path:
    """The folder of the trained model; trained now if it is not there."""
    mark = out / "recipe"
    if mark.is_file() and mark.read_text() == recipe(steps):
        return out
    torch.set_num_threads(THREADS)
    tokenizer = make_tokenizer()
    tokens = tokens_of(tokenizer, held_out=False)
    print(f"{len(tokens)} tokens to train on", flush=True)
    model, _ = train(tokens, steps)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)
    mark.write_text(recipe(steps))
    return out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    print(small_llama(args.out, args.steps))


if __name__ == "__main__":
    main()
