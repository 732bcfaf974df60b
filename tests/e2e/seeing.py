"""Prompts with an image: it is loaded, and no other image is taken for it."""

from collections.abc import Callable

from live import BLOCK, CHUNK, NEW_TOKENS, TOLERANCE, VOCAB, Answer, Live, distance, falsify
from polling import until
from tiny_hybrids import Expected, Transformers

PAD, BEFORE, AFTER = VOCAB - 10, VOCAB - 8, VOCAB - 7  # tokens of an image, and around it
SIDE = 16  # patches; four of them are a token


def check_images(
    live: Live, model: Transformers, prompt: Callable[[int], list[int]], *, patch_values: int
) -> None:
    """Ask for prompts with two images. The answers are those of transformers, and with wrong KV
    they are not.

    Args:
        live: with `cake_test_images`, in mode `load`.
        patch_values: of one patch.
    """
    import torch

    assert live.store is not None
    text = [token % PAD for token in prompt(11 * BLOCK)]
    ids = [*text[:10], BEFORE, *[PAD] * (SIDE**2 // 4), AFTER, *text[10:]]

    def by_transformers(ids: list[int], seed: int) -> Expected:
        random_of = torch.Generator().manual_seed(seed)
        return model.answer(
            ids,
            NEW_TOKENS,
            pixel_values=torch.randn(SIDE**2, patch_values, generator=random_of),
            image_grid_thw=torch.tensor([[1, SIDE, SIDE]]),
            mm_token_type_ids=(torch.tensor([ids]) == PAD).int(),
        )

    def ask(ids: list[int], seed: int, expected: Expected) -> Answer:
        answer = live.ask_flushed(ids, image_data=[f"{SIDE}x{SIDE} {seed}"])
        assert answer.tokens == expected.tokens
        assert distance(answer.logprobs, expected.logprobs) <= TOLERANCE
        return answer

    one, other = (by_transformers(ids, seed) for seed in (1, 2))
    assert distance(one.logprobs, other.logprobs) > 20 * TOLERANCE
    end = len(ids) // BLOCK * BLOCK
    before = set(live.store.blocks())
    assert ask(ids, 1, one).loaded == 0
    until(lambda: ask(ids, 1, one).loaded == end, "the prompt loaded up to its end")
    files = set(live.store.blocks()) - before
    assert ask(ids, 2, other).loaded == 0
    longer = ids + text[: CHUNK + 7]
    assert ask(longer, 1, by_transformers(longer, 1)).loaded == end
    for file in files:  # the control
        falsify(file)
    lie = live.ask_flushed(ids, image_data=[f"{SIDE}x{SIDE} 1"])
    assert lie.loaded == end
    assert distance(lie.logprobs, one.logprobs) > 20 * TOLERANCE
