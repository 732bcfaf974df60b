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
    PAGE_TOKENS,
    STATES,
    STATES_ENV,
    WINDOW_TOKENS,
    WINDOWS,
    Crowding,
    Hybrid,
    Loading,
    Make,
    Meeting,
    flags_of,
    no_hybrid_alarm,  # noqa: F401
)
from live import Start
from seeing import check_images
from tiny_hybrids import (
    Transformers,
    build_falcon_h1,
    build_gemma_4,
    build_gpt_oss,
    build_granite_4,
    build_kimi_linear,
    build_lfm2,
    build_llama_4,
    build_mellum,
    build_mimo_v2,
    build_nemotron_h,
    build_qwen3_5,
    build_qwen3_next,
    build_step_3_5,
)

MORE_STATES_ENV = STATES_ENV | {"CAKE_TEST_KDA_MAMBA2": "1"}
IMAGES_ENV = STATES_ENV | {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "cake_test_images"}
SINKS_ENV = {"CAKE_TEST_ANY_BACKEND": "1", "CAKE_TEST_SINKS": "1"}
SEEING = (*STATES, *EXTRA_BUFFER, "--mm-attention-backend", "sdpa")
# Not whole blocks: where a chunk ends, a prefix needs no window.
CHUNK_TOKENS = 5 * PAGE_TOKENS
AGAIN = " again"


@dataclass(frozen=True, slots=True)
class Family:
    """How its model is made and served.

    Attributes:
        namespaces: of the store; one for all ranks that hold the same KV.
    """

    build: Callable[[Path], Path]
    env: dict[str, str]
    flags: tuple[str, ...]
    ranks: int = 1
    namespaces: int = 1


FAMILIES = {
    # States, in a multimodal model.
    "qwen3.5": Family(build_qwen3_5, IMAGES_ENV, SEEING),
    # Each rank has the windows, or the states, of its own heads.
    "mellum-2-ranks": Family(
        lambda path: build_mellum(path, window_tokens=WINDOW_TOKENS), {}, WINDOWS, 2, 2
    ),
    # Conv states with channels last. Both ranks have the same latent rows, and states of their own.
    "kimi-linear-2-ranks": Family(
        build_kimi_linear, MORE_STATES_ENV, (*STATES, *EXTRA_BUFFER), ranks=2
    ),
    # Every layer has a state, and K and V.
    "falcon-h1": Family(build_falcon_h1, MORE_STATES_ENV, (*STATES, *NO_BUFFER)),
    # V is narrower than K.
    "mimo-v2": Family(
        lambda path: build_mimo_v2(path, window_tokens=WINDOW_TOKENS), SINKS_ENV, WINDOWS
    ),
    "nemotron-h": Family(build_nemotron_h, MORE_STATES_ENV, (*STATES, *NO_BUFFER)),
    "granite-4": Family(build_granite_4, MORE_STATES_ENV, (*STATES, *NO_BUFFER)),
    "lfm2": Family(build_lfm2, STATES_ENV, STATES),
    "gpt-oss": Family(
        lambda path: build_gpt_oss(path, window_tokens=WINDOW_TOKENS), SINKS_ENV, WINDOWS
    ),
    # Windows of another shape than full attention.
    "gemma-4": Family(
        lambda path: build_gemma_4(path, window_tokens=WINDOW_TOKENS),
        {"CAKE_TEST_ANY_BACKEND": "1"},
        WINDOWS,
    ),
    # A prefix needs the rows of its last chunk, and SGLang keeps as many tokens as a chunk has.
    "llama-4": Family(
        lambda path: build_llama_4(path, chunk_tokens=CHUNK_TOKENS),
        {"CAKE_TEST_CHUNKED_ATTENTION": str(CHUNK_TOKENS)},
        WINDOWS,
    ),
    # Windows with more heads than full attention.
    "step-3.5": Family(
        lambda path: build_step_3_5(path, window_tokens=WINDOW_TOKENS),
        {"CAKE_TEST_ANY_BACKEND": "1"},
        WINDOWS,
    ),
    "qwen3-next-2-ranks": Family(
        build_qwen3_next, STATES_ENV, (*STATES, *EXTRA_BUFFER), ranks=2, namespaces=2
    ),
}


def of_families(*default: str, suffix: str = "") -> pytest.MarkDecorator:
    """Tests of every family. Those that are not in `default` are breadth: their pools are those of
    other families, with other shapes."""
    params = [
        pytest.param(name + suffix, marks=[pytest.mark.breadth] * (name not in default))
        for name in FAMILIES
    ]
    return pytest.mark.parametrize("hybrid", params, indirect=True)


@pytest.fixture(scope="module")
def hybrid(
    request: pytest.FixtureRequest, start: Start, folder: Path, standins: dict[str, str]
) -> Iterator[Hybrid]:
    name, is_second = request.param.removesuffix(AGAIN), request.param.endswith(AGAIN)
    family = FAMILIES[name]
    if (os.cpu_count() or 1) < family.ranks:
        pytest.skip("two ranks need two cores")
    model, store = folder / name / "model", folder / f"store-{name}"
    if not model.exists():
        family.build(model)
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if family.ranks > 1 else {}
    env, more = standins | family.env | ranks, ("--tp", str(family.ranks))
    first = flags_of("both", *more, *family.flags)
    if is_second and not store.exists():  # tests of the first server were not asked for
        with start(model, first, store=store, env=env) as live:
            Hybrid(live, Transformers(model)).ask_and_store(KEPT)
    flags = flags_of("load", *more, *family.flags) if is_second else first
    with start(model, flags, store=store, env=env) as live:
        live.races = not is_second
        assert live.store is not None
        live.store.ranks = family.namespaces
        yield Hybrid(live, Transformers(model), is_second)
        assert len(live.store.namespaces()) == family.namespaces


@of_families("qwen3.5", "mellum-2-ranks", "kimi-linear-2-ranks")
class TestFamily(Meeting):
    pass


@of_families("qwen3.5", "mellum-2-ranks")  # two ranks, and states; both in one server is breadth
class TestFamilyCrowded(Crowding):
    pass


@of_families("qwen3.5", "mellum-2-ranks", suffix=AGAIN)
class TestFamilyAfterRestart(Loading):
    pass


@pytest.mark.parametrize("hybrid", ["qwen3.5" + AGAIN], indirect=True)
def test_family_prompt_with_an_image_is_loaded_and_no_other_image_is_taken_for_it(
    hybrid: Hybrid, folder: Path, prompt: Make
) -> None:
    model = Transformers(folder / "qwen3.5" / "model", seeing=True)
    check_images(hybrid.live, model, prompt, patch_values=3 * 2 * 16**2)
