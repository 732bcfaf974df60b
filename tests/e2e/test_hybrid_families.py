"""Families of models with end states, whose pools differ.

The first server of a family computes and loads at once, so it shows meets. The second one finds
what the first one has stored. `test_hybrids.py` has more situations, with one family for windows
and one for states.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hybrids import (
    EXTRA_BUFFER,
    KEPT,
    NO_BUFFER,
    STATES,
    STATES_ENV,
    WINDOW_TOKENS,
    WINDOWS,
    Hybrid,
    Loading,
    Make,
    Meeting,
    flags_of,
    no_hybrid_alarm,  # noqa: F401
)
from live import BLOCK, CHUNK, NEW_TOKENS, TOLERANCE, VOCAB, Answer, Start, distance, until
from tiny_hybrids import (
    Expected,
    Transformers,
    build_falcon_h1,
    build_gemma_4,
    build_gpt_oss,
    build_granite_4,
    build_kimi_linear,
    build_lfm2,
    build_mellum,
    build_nemotron_h,
    build_qwen3_5,
    build_qwen3_next,
)

MORE_STATES_ENV = STATES_ENV | {"CAKE_TEST_KDA_MAMBA2": "1"}
IMAGES_ENV = STATES_ENV | {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "cake_test_images"}
SEEING = (*STATES, *EXTRA_BUFFER, "--mm-attention-backend", "sdpa")
SECOND = " again"


@dataclass(frozen=True, slots=True)
class Family:
    """How its model is made and served.

    Attributes:
        second: flags of the second server; None: there is none.
    """

    build: Callable[[Path], Path]
    env: dict[str, str]
    first: tuple[str, ...]
    second: tuple[str, ...] | None = None
    ranks: int = 1


FAMILIES = {
    # States, in a multimodal model. It is the first one: pytest orders parameters by their place,
    # and the test with an image has this family alone.
    "qwen3.5": Family(build_qwen3_5, IMAGES_ENV, SEEING, SEEING),
    # Conv states with channels last; blocks have latent rows.
    "kimi-linear": Family(
        build_kimi_linear, MORE_STATES_ENV, (*STATES, *EXTRA_BUFFER), (*STATES, *NO_BUFFER)
    ),
    "nemotron-h": Family(
        build_nemotron_h, MORE_STATES_ENV, (*STATES, *NO_BUFFER), (*STATES, *NO_BUFFER)
    ),
    "granite-4": Family(
        build_granite_4, MORE_STATES_ENV, (*STATES, *NO_BUFFER), (*STATES, *NO_BUFFER)
    ),
    # Every layer has a state, and K and V.
    "falcon-h1": Family(
        build_falcon_h1, MORE_STATES_ENV, (*STATES, *NO_BUFFER), (*STATES, *NO_BUFFER)
    ),
    "lfm2": Family(build_lfm2, STATES_ENV, STATES, STATES),
    "gpt-oss": Family(
        lambda path: build_gpt_oss(path, window_tokens=WINDOW_TOKENS),
        {"CAKE_TEST_ANY_BACKEND": "1", "CAKE_TEST_SINKS": "1", "TORCHDYNAMO_DISABLE": "1"},
        WINDOWS,
        WINDOWS,
    ),
    # Windows of another shape than full attention.
    "gemma-4": Family(
        lambda path: build_gemma_4(path, window_tokens=WINDOW_TOKENS),
        {"CAKE_TEST_ANY_BACKEND": "1"},
        WINDOWS,
        WINDOWS,
    ),
    # Each rank has the windows, or the states, of its own heads.
    "mellum-2-ranks": Family(
        lambda path: build_mellum(path, window_tokens=WINDOW_TOKENS), {}, WINDOWS, WINDOWS, ranks=2
    ),
    "qwen3-next-2-ranks": Family(build_qwen3_next, STATES_ENV, (*STATES, *EXTRA_BUFFER), ranks=2),
}
# In the order of the families, so that the servers of a family run one after the other.
LAST = [name + SECOND if each.second else name for name, each in FAMILIES.items()]


@pytest.fixture(scope="module")
def hybrid(
    request: pytest.FixtureRequest, start: Start, folder: Path, standins: dict[str, str]
) -> Iterator[Hybrid]:
    name, is_second = request.param.removesuffix(SECOND), request.param.endswith(SECOND)
    family = FAMILIES[name]
    if (os.cpu_count() or 1) < family.ranks:
        pytest.skip("two ranks need two cores")
    model, store = folder / name / "model", folder / f"store-{name}"
    if not model.exists():
        family.build(model)
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if family.ranks > 1 else {}
    env, more = standins | family.env | ranks, ("--tp", str(family.ranks))
    first = flags_of("both", *more, *family.first)
    if is_second and not store.exists():  # tests of the first server were not asked for
        with start(model, first, store=store, env=env) as live:
            Hybrid(live, Transformers(model)).ask_and_store(KEPT)
    flags = flags_of("load", *more, *(family.second or ())) if is_second else first
    with start(model, flags, store=store, env=env) as live:
        live.races = not is_second
        assert live.store is not None
        live.store.ranks = family.ranks
        yield Hybrid(live, Transformers(model), is_second)


@pytest.mark.parametrize("hybrid", FAMILIES, indirect=True)
class TestFamily(Meeting):
    pass


@pytest.mark.parametrize("hybrid", LAST, indirect=True)
class TestFamilyAfterRestart(Loading):
    pass


@pytest.mark.parametrize("hybrid", ["qwen3.5" + SECOND], indirect=True)
def test_family_prompt_with_an_image_is_loaded_and_no_other_image_is_taken_for_it(
    hybrid: Hybrid, folder: Path, prompt: Make
) -> None:
    import torch

    pad, before, after = VOCAB - 10, VOCAB - 8, VOCAB - 7
    text = [token % pad for token in prompt(11 * BLOCK)]
    ids = [*text[:10], before, *[pad] * 64, after, *text[10:]]
    model = Transformers(folder / "qwen3.5" / "model", seeing=True)

    def by_transformers(ids: list[int], seed: int) -> Expected:
        feature = torch.randn(256, 3 * 2 * 16**2, generator=torch.Generator().manual_seed(seed))
        return model.answer(
            ids,
            NEW_TOKENS,
            pixel_values=feature,
            image_grid_thw=torch.tensor([[1, 16, 16]]),
            mm_token_type_ids=(torch.tensor([ids]) == pad).int(),
        )

    def ask(ids: list[int], seed: int, expected: Expected) -> Answer:
        answer = hybrid.live.ask_flushed(ids, image_data=[f"16x16 {seed}"])
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE
        return answer

    one, other = (by_transformers(ids, seed) for seed in (1, 2))
    assert distance(one.logprobs, other.logprobs) > 20 * TOLERANCE
    end = len(ids) // BLOCK * BLOCK
    assert ask(ids, 1, one).loaded == 0
    until(lambda: ask(ids, 1, one).loaded == end, "the prompt and its end loaded")
    assert ask(ids, 2, other).loaded == 0
    longer = ids + text[: CHUNK + 7]
    assert ask(longer, 1, by_transformers(longer, 1)).loaded == end
