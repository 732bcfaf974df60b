"""A Qwen3-VL with random weights: prompts of text, with images and with a video give the plain
answers, and no image or video is taken for another one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live import (
    BLOCK,
    CHUNK,
    NEW_TOKENS,
    TOLERANCE,
    VOCAB,
    Answer,
    Live,
    PendingRequest,
    Start,
    abort_at_every_stage,
    assert_same,
    distance,
    falsify,
)
from polling import until

from sglang_cake.demo.models import write_model

Make = Callable[[int], list[int]]

PAD, VIDEO_PAD, START, END = VOCAB - 10, VOCAB - 9, VOCAB - 8, VOCAB - 7
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "12000", "--enable-metrics"),
    *("--mm-attention-backend", "sdpa"),
)


def build_qwen_vl(path: Path, *, hidden: int, layers: int, heads: int, vocab: int) -> Path:
    """Write a random Qwen3-VL to `path`, as `build_llama` does. Its image token is `vocab - 10`,
    and a vision feature goes into the first layer of the text as well (deepstack)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    half = hidden // heads // 2
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": hidden // heads,
            "vocab_size": vocab,
            "max_position_embeddings": 32768,
            "initializer_range": 0.08,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.08,
        },
        image_token_id=vocab - 10,
        video_token_id=vocab - 9,
        vision_start_token_id=vocab - 8,
        vision_end_token_id=vocab - 7,
        tie_word_embeddings=False,
    )
    return write_model(path, Qwen3VLForConditionalGeneration, config, seed=0, dtype="float32")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return build_qwen_vl(folder / "qwen-vl", hidden=128, layers=4, heads=4, vocab=VOCAB)


@pytest.fixture(scope="module")
def images(standins: dict[str, str]) -> dict[str, str]:
    return {**standins, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "cake_test_images"}


@pytest.fixture(scope="module")
def bare(start: Start, model: Path, images: dict[str, str]) -> Iterator[Live]:
    """A server without cake. Its answers are the references, with an empty tree and no cache of
    embeddings: SGLang's own hash is the same for two images of equal bytes and unequal grids."""
    with start(model, FLAGS, env={**images, "SGLANG_VLM_CACHE_SIZE_MB": "0"}) as live:
        yield live


def plain_answer(bare: Live, ids: list[int], *pictures: str, **media: list[str]) -> Answer:
    bare.flush()
    return bare.reference(ids, image_data=list(pictures), **media)


@pytest.fixture(scope="module")
def seeing(start: Start, model: Path, folder: Path, images: dict[str, str]) -> Iterator[Live]:
    flags = (*FLAGS, "--cake-mode", "load")
    with start(model, flags, store=folder / "store-vl", env=images) as live:
        live.races = False
        yield live


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt with images, whose blocks `seeing` has stored."""

    ids: list[int]
    pictures: list[str]


@pytest.fixture(scope="module")
def seen(seeing: Live) -> Seen:
    text = [(i * i * 31 + i * 17) % PAD for i in range(14 * BLOCK + 9)]
    seen = Seen(with_images(text, 150, 600, tokens=80), ["16x20 21", "20x16 22"])
    ask_and_store(seeing, seen.ids, seen.pictures)
    return seen


@pytest.fixture(scope="module")
def later(
    start: Start, model: Path, folder: Path, images: dict[str, str], seen: Seen
) -> Iterator[Live]:
    """As `seeing` after a restart: another process, with its store. Its pool is small."""
    flags = (*FLAGS, "--cake-mode", "load", "--max-total-tokens", "2048")
    with start(model, flags, store=folder / "store-vl", env=images) as live:
        live.races = False
        yield live


@pytest.fixture(scope="module")
def eager(start: Start, model: Path, folder: Path, images: dict[str, str]) -> Iterator[Live]:
    """Mode `auto`, in which last steps begin before their last blocks have arrived."""
    env = {**images, "CAKE_TEST_LAYER_S": "0.005", "XDG_CACHE_HOME": str(folder / "cache-vl")}
    with start(model, FLAGS, store=folder / "store-vl-auto", bandwidth="10MB/s", env=env) as live:
        yield live


def with_images(text: list[int], *places: int, tokens: int = 64, pad: int = PAD) -> list[int]:
    """The prompt, with an image, or a frame of a video, of so many tokens at each of these
    places."""
    ids = list(text)
    for place in places:
        ids[place : place + tokens + 2] = [START, *[pad] * tokens, END]
    return ids


def stored(live: Live) -> int:
    assert live.store is not None
    return len(live.store.blocks())


def ask_and_store(live: Live, ids: list[int], image_data: list[str], **media: list[str]) -> Answer:
    """The answer, when all full blocks of the prompt are stored."""
    before = stored(live)
    answer = live.ask(ids, image_data=image_data, **media)
    until(lambda: stored(live) >= before + len(ids) // BLOCK, "the blocks in the store")
    return answer


def test_multimodal_prompt_of_text_is_loaded_and_gives_the_plain_answer(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    ids = [token % PAD for token in prompt(5 * CHUNK + 7)]
    seeing.ask_and_store(ids)
    answer = seeing.ask_flushed(ids)
    assert_same(answer, bare.reference(ids))
    assert answer.loaded >= 4 * CHUNK


def test_multimodal_last_step_of_text_that_begins_early_gives_the_plain_answer(
    eager: Live, bare: Live, prompt: Make
) -> None:
    ids = [token % PAD for token in prompt(20 * BLOCK + 5)]
    eager.ask_and_store(ids)

    def early() -> Answer | None:
        answer = eager.ask_flushed(ids)
        return answer if answer.meta["cake"]["overlapped_tokens"] else None

    assert_same(until(early, "a last step that begins early"), bare.reference(ids))


def test_multimodal_prompt_with_images_is_loaded_and_gives_the_plain_answer(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(4 * CHUNK + 9)]
    ids = with_images(text, 100, CHUNK + 220, tokens=80)
    pictures = ["16x20 1", "20x16 2"]
    first = ask_and_store(seeing, ids, pictures)
    answer = seeing.ask_flushed(ids, image_data=pictures)
    reference = plain_answer(bare, ids, *pictures)
    assert_same(first, reference)
    assert_same(answer, reference)
    assert answer.loaded >= 3 * CHUNK
    assert answer.loaded + answer.computed == len(ids)


def test_multimodal_images_that_are_computed_and_loaded_at_once_give_the_plain_answer(
    eager: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(6 * CHUNK + 9)]
    ids = with_images(text, 50, 3 * CHUNK + 100, tokens=256)
    pictures = ["32x32 13", "64x16 14"]
    ask_and_store(eager, ids, pictures)

    def raced() -> Answer | None:
        answer = eager.ask_flushed(ids, image_data=pictures)
        assert_same(answer, plain_answer(bare, ids, *pictures))
        assert answer.meta["cake"]["overlapped_tokens"] == 0
        return answer if answer.loaded and answer.computed > BLOCK else None

    until(raced, "a prompt that is partly computed and partly loaded")


def test_multimodal_images_stored_before_a_restart_are_loaded(
    later: Live, bare: Live, seen: Seen
) -> None:
    """The identity of an image has a key in it, which the processes of a user share."""
    answer = later.ask_flushed(seen.ids, image_data=seen.pictures)
    assert_same(answer, plain_answer(bare, seen.ids, *seen.pictures))
    assert answer.loaded == len(seen.ids) // BLOCK * BLOCK
    others = ["16x20 21", "20x16 23"]
    answer = later.ask_flushed(seen.ids, image_data=others)
    assert_same(answer, plain_answer(bare, seen.ids, *others))
    assert answer.loaded == 600 // BLOCK * BLOCK


def test_multimodal_prompts_with_images_that_outgrow_the_pool_give_the_plain_answers(
    later: Live, bare: Live, prompt: Make
) -> None:
    prompts = [
        (
            with_images([token % PAD for token in prompt(16 * BLOCK + i)], 100, 700),
            [f"16x16 {i}"] * 2,
        )
        for i in range(31, 35)
    ]
    for ids, pictures in prompts:
        ask_and_store(later, ids, pictures)
    later.flush()
    asked = [
        PendingRequest(later, ids, new_tokens=12, rid=f"full-{i}", image_data=pictures)
        for i, (ids, pictures) in enumerate(prompts)
    ]
    for asking, (ids, pictures) in zip(asked, prompts, strict=True):
        answer = asking.answer()
        bare.flush()
        assert_same(answer, bare.reference(ids, 12, image_data=pictures))
        assert answer.loaded > 0


def test_multimodal_abort_at_every_stage_of_a_load_leaks_nothing(
    later: Live, bare: Live, seen: Seen
) -> None:
    abort_at_every_stage(later, seen.ids, image_data=seen.pictures)
    answer = later.ask_flushed(seen.ids, image_data=seen.pictures)
    assert_same(answer, plain_answer(bare, seen.ids, *seen.pictures))
    later.flush()  # waits until nothing runs; then SGLang checks every slot
    later.check_log()


def test_multimodal_holes_in_images_are_computed(seeing: Live, bare: Live, prompt: Make) -> None:
    """Chunks, islands and images end at different tokens."""
    text = [token % PAD for token in prompt(3 * CHUNK + 9)]
    ids = with_images(text, 50, CHUNK + 100, tokens=128)
    pictures = ["16x32 11", "32x16 12"]
    assert seeing.store is not None
    before = set(seeing.store.blocks())
    ask_and_store(seeing, ids, pictures)
    new = sorted(set(seeing.store.blocks()) - before, key=lambda file: file.stat().st_mtime_ns)
    seeing.store.remove(*new[1::3])
    answer = seeing.ask_flushed(ids, image_data=pictures)
    assert_same(answer, plain_answer(bare, ids, *pictures))
    assert 0 < answer.loaded <= len(ids) - len(new[1::3]) * BLOCK


def test_multimodal_other_image_order_or_grid_is_not_taken_for_the_stored_one(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(3 * CHUNK)]
    ids = with_images(text, 130, 330)  # behind two blocks, and in the middle of a block
    ask_and_store(seeing, ids, ["16x16 3", "16x16 4"])
    reference = plain_answer(bare, ids, "16x16 3", "16x16 4")
    others = {
        ("16x16 4", "16x16 3"): 2 * BLOCK,
        ("8x32 3", "16x16 4"): 2 * BLOCK,
        ("16x16 3", "16x16 5"): 5 * BLOCK,
        ("16x16 3", "32x8 4"): 5 * BLOCK,
    }
    for pictures, same_tokens in others.items():
        answer = seeing.ask_flushed(ids, image_data=list(pictures))
        assert answer.loaded == same_tokens
        expected = plain_answer(bare, ids, *pictures)
        assert_same(answer, expected)
        assert distance(expected.logprobs, reference.logprobs) > 20 * TOLERANCE


def test_multimodal_video_is_loaded_and_no_other_video_is_taken_for_it(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    """Its frames are one item, with text between them, behind an image."""
    text = [token % PAD for token in prompt(3 * CHUNK + 9)]
    ids = with_images(with_images(text, 20), 130, 200, 330, pad=VIDEO_PAD)
    video, end = "3x16x16 41", len(ids) // BLOCK * BLOCK
    reference = plain_answer(bare, ids, "16x16 40", video_data=[video])
    first = ask_and_store(seeing, ids, ["16x16 40"], video_data=[video])
    assert_same(first, reference)
    for shown, loaded in ((video, end), ("3x16x16 42", 2 * BLOCK), ("3x8x32 41", 2 * BLOCK)):
        answer = seeing.ask_flushed(ids, image_data=["16x16 40"], video_data=[shown])
        assert answer.loaded == loaded
        expected = plain_answer(bare, ids, "16x16 40", video_data=[shown])
        assert_same(answer, expected)
        if shown != video:
            assert distance(expected.logprobs, reference.logprobs) > 20 * TOLERANCE


def test_multimodal_answer_about_an_image_is_loaded_in_the_next_turn(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(2 * BLOCK + 30)]
    ids = with_images(text, 20)
    before = stored(seeing)
    answer = seeing.ask(ids, 2 * BLOCK, image_data=["16x16 6"])
    until(lambda: stored(seeing) >= before + 4, "prompt and answer in the store")
    longer = [*ids, *answer.tokens, *([7] * BLOCK)]
    second = seeing.ask_flushed(longer, image_data=["16x16 6"])
    assert second.loaded == 4 * BLOCK
    assert_same(second, plain_answer(bare, longer, "16x16 6"))


def test_multimodal_hash_of_a_client_decides_no_answer_to_others(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(2 * CHUNK)]
    ids = with_images(text, 10)
    before = seeing.metric("unkeyed_requests_total", reason="media")
    kept = stored(seeing)
    for seed in (7, 8):  # SGLang takes the second image for the first one
        forged = seeing.ask(ids, image_data=[f"16x16 {seed}"], mm_hashes=["abcdef"])
        assert "cake" not in forged.meta
    for seed in (7, 8):
        expected = plain_answer(bare, ids, f"16x16 {seed}")
        assert_same(ask_and_store(seeing, ids, [f"16x16 {seed}"]), expected)
        answer = seeing.ask_flushed(ids, image_data=[f"16x16 {seed}"])
        assert answer.loaded > 0
        assert_same(answer, expected)
    assert stored(seeing) == kept + 2 * (len(ids) // BLOCK)
    count = lambda: seeing.metric("unkeyed_requests_total", reason="media")  # noqa: E731
    until(lambda: count() == before + 2, "both forged requests counted")


def test_multimodal_image_of_another_user_is_not_loaded(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    blocks = 3
    text = [token % PAD for token in prompt(blocks * BLOCK + 5)]
    ids = with_images(text, 10)
    reference = plain_answer(bare, ids, "16x16 9")
    for user, loaded in (("alice", 0), ("bob", 0), ("alice", blocks * BLOCK)):
        before = stored(seeing)
        answer = seeing.ask_flushed(ids, image_data=["16x16 9"], cache_salt=user)
        assert answer.loaded == loaded
        assert_same(answer, reference)
        if not loaded:
            until(lambda count=before: stored(seeing) == count + blocks, "the prompt is stored")


def test_multimodal_control_wrong_image_kv_changes_the_answer(
    seeing: Live, bare: Live, prompt: Make
) -> None:
    text = [token % PAD for token in prompt(2 * CHUNK)]
    ids = with_images(text, 10, tokens=100)
    assert seeing.store is not None
    before = set(seeing.store.blocks())
    ask_and_store(seeing, ids, ["20x20 9"])
    for file in set(seeing.store.blocks()) - before:
        falsify(file)
    answer = seeing.ask_flushed(ids, image_data=["20x20 9"])
    assert answer.loaded > 0
    expected = plain_answer(bare, ids, "20x20 9")
    assert len(answer.tokens) == NEW_TOKENS
    assert distance(answer.logprobs, expected.logprobs) > 20 * TOLERANCE
