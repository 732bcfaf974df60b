"""What keys cover of images: SGLang's own items, before and after SGLang prepares them."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.multimodal.modality")  # from SGLang 0.5.23 on media have keys

from coordinator_harness import BLOCK, CoordinatorHarness, FakeReq
from registered_hooks import hooks_of
from sglang.srt.environ import envs
from sglang.srt.managers.mm_utils import (
    extend_mrope_positions_for_retracted_request,
    pad_mm_tokens,
)
from sglang.srt.managers.schedule_batch import (
    MultimodalDataItem,
    MultimodalInputs,
    MultimodalProcessorOutput,
)
from sglang.srt.multimodal.modality import Modality, MultimodalInputFormat

from sglang_cake.core.keys import NO_MEDIA, KeyChain, KeySeed, Media
from sglang_cake.integration.request import media
from sglang_cake.integration.request.media import identify, item_digest, media_of

IMAGE_TOKEN = 7
TEXT = array("q", range(100, 140))
HOOKS = hooks_of(media.install)


def image(number: int = 1, **changes: Any) -> MultimodalDataItem:
    """An item as Qwen-VL's processor makes it."""
    generator = torch.Generator().manual_seed(number)
    fields = {
        "modality": Modality.IMAGE,
        "feature": torch.randn(16, 6, generator=generator),
        "model_specific_data": {"image_grid_thw": torch.tensor([[1, 4, 4]])},
    }
    return MultimodalDataItem(**fields | changes)


def mrope(tokens: int, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Positions as of Qwen-VL: an image advances them by less than its tokens."""
    rows, at = [], 0
    starts = dict(spans)
    token = 0
    while token < tokens:
        if token in starts:
            size = starts[token] - token
            rows += [(at, at + n // 2, at + n % 2) for n in range(size)]
            token, at = starts[token], at + 2
        else:
            rows.append((at, at, at))
            token, at = token + 1, at + 1
    return torch.tensor(rows).T.contiguous()


def processed(
    *items: MultimodalDataItem, places: tuple[int, ...] = (20, 27), size: int = 4, **changes: Any
) -> tuple[MultimodalProcessorOutput, "array[int]"]:
    """Images of `size` tokens in a text, as the tokenizer process sends it."""
    tokens = TEXT[:]
    spans = [(start, start + size) for start in places[: len(items)]]
    for item, (start, stop) in zip(items, spans, strict=True):
        item.offsets = [(start, stop - 1)]
        tokens[start:stop] = array("q", [IMAGE_TOKEN]) * size
    rows = mrope(len(tokens), spans)
    fields = {
        "mrope_positions": rows,
        "mrope_position_delta": (rows.max() + 1 - len(tokens)).reshape(1, 1),
    }
    output = MultimodalProcessorOutput(
        mm_items=list(items), input_ids=tokens.tolist(), im_token_id=IMAGE_TOKEN, **fields | changes
    )
    return output, tokens


def prepared(output: MultimodalProcessorOutput, *, keys_media: bool = True) -> MultimodalInputs:
    """What SGLang's scheduler makes of it, with the hook of this package."""
    coordinator = SimpleNamespace(keys=SimpleNamespace(covers_media=keys_media))
    scheduler: Any = SimpleNamespace(tree_cache=SimpleNamespace(coordinator=coordinator))
    original = lambda _, mm_inputs: MultimodalInputs.from_processor_output(mm_inputs)  # noqa: E731
    found: MultimodalInputs = HOOKS["_get_multimodal_inputs"](original, scheduler, output)
    return found


def request(output: MultimodalProcessorOutput, tokens: "array[int]", **changes: Any) -> FakeReq:
    found = prepared(output, **changes)
    return FakeReq("r", pad_mm_tokens(tokens, found), multimodal_inputs=found)


def requested(*items: MultimodalDataItem, **changes: Any) -> FakeReq:
    return request(*processed(*items, **changes))


def keys(req: FakeReq, block_tokens: int = 4) -> list[bytes]:
    found = media_of(req)
    assert found is not None
    seed = KeySeed(b"n" * 32)
    return list(KeyChain(seed, block_tokens, found).of(req.origin_input_ids + req.output_ids))


def text_keys(block_tokens: int = 4) -> list[bytes]:
    return list(KeyChain(KeySeed(b"n" * 32), block_tokens).of(TEXT))


# ---- equal and unequal media ----


def test_media_equal_images_have_equal_keys_and_text_before_them_those_of_text() -> None:
    one, other = (keys(requested(image(1), image(2))) for _ in range(2))
    assert one == other
    assert one[:5] == text_keys()[:5]  # the first image begins at token 20
    assert not set(one[5:]) & set(text_keys()[5:])


def flip(item: MultimodalDataItem) -> None:
    item.feature.view(torch.int32)[3, 2] ^= 1


CHANGES: dict[str, Callable[[MultimodalDataItem], None]] = {
    "one bit of a pixel": flip,
    "dtype": lambda item: setattr(item, "feature", item.feature.view(torch.int32)),
    "shape": lambda item: setattr(item, "feature", item.feature.reshape(12, 8)),
    "grid": lambda item: item.set("image_grid_thw", torch.tensor([[1, 2, 8]])),
    "dtype of the grid": lambda item: item.set("image_grid_thw", torch.tensor([[1.0, 4, 4]])),
    "time stamps": lambda item: item.set("second_per_grid_ts", [0.5]),
    "modality": lambda item: setattr(item, "modality", Modality.VIDEO),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_media_changed_item_changes_keys_from_its_block_on(
    change: Callable[[MultimodalDataItem], None],
) -> None:
    changed = image(2)
    change(changed)
    before = keys(requested(image(1), image(2)))
    output, tokens = processed(image(1), changed)
    found = prepared(output)
    padded = pad_mm_tokens(tokens, found)
    start, end = changed.offsets[0]  # pads are not known to `pad_mm_tokens` for a video
    padded[start : end + 1] = array("q", changed.padding_sequence(end + 1 - start))
    after = keys(FakeReq("r", padded, multimodal_inputs=found))
    assert before[:6] == after[:6]  # the second image begins at token 27
    assert not set(before[6:]) & set(after[6:])


def test_media_images_in_another_order_or_place_have_other_keys() -> None:
    found = [
        keys(requested(image(1), image(2))),
        keys(requested(image(2), image(1))),
        keys(requested(image(1), image(1))),
        keys(requested(image(1), image(2), places=(21, 27))),
        keys(requested(image(1), image(2), places=(20, 28))),
    ]
    last = {each[-1] for each in found}
    assert len(last) == len(found)


def test_media_other_positions_change_keys_from_their_block_on() -> None:
    rows = mrope(len(TEXT), [(20, 24)])
    changed = rows.clone()
    changed[1, 22] += 1
    one, other = (keys(requested(image(1), mrope_positions=each)) for each in (rows, changed))
    assert one[:5] == other[:5]
    assert not set(one[5:]) & set(other[5:])


def test_media_features_in_a_list_or_an_array_are_told_apart() -> None:
    part = torch.arange(12.0)
    forms: list[Any] = [part, [part], [part[:6], part[6:]], part.numpy(), part.reshape(3, 4)]
    digests = [item_digest(image(feature=form)) for form in forms]
    assert None not in digests
    assert digests[0] == digests[1] == digests[3]  # one tensor, whatever holds it
    assert len(set(digests)) == 3
    assert item_digest(image(feature=part.expand(2, 12))) is not None  # not contiguous


# ---- what SGLang's tree and cache of embeddings see ----


def test_media_sglangs_numbers_come_from_the_identity() -> None:
    """Equal bytes under two grids: SGLang's own hash is the same, and its tree would mix them."""
    one, other = image(1), image(1, model_specific_data={"image_grid_thw": torch.ones(1, 3)})
    own = [
        MultimodalInputs.from_processor_output(processed(i)[0]).mm_items[0] for i in (one, other)
    ]
    assert own[0].hash == own[1].hash
    one, other = image(1), image(1, model_specific_data={"image_grid_thw": torch.ones(1, 3)})
    ours = [prepared(processed(i)[0]).mm_items[0] for i in (one, other)]
    assert ours[0].hash != ours[1].hash
    assert not set(ours[0].padding_values()) & set(ours[1].padding_values())


def test_media_other_positions_are_other_numbers_in_sglangs_tree() -> None:
    """Equal frames at another rate: SGLang's tree would mix their KV."""
    rows = mrope(len(TEXT), [(20, 24)])
    later = rows.clone()
    later[:, 24:] += 1
    delta = torch.tensor([[int(later.max()) + 1 - len(TEXT)]])
    one = requested(image(1))
    other = requested(image(1), mrope_positions=later, mrope_position_delta=delta)
    assert one.origin_input_ids[:20] == other.origin_input_ids[:20]
    assert one.origin_input_ids[20] != other.origin_input_ids[20]
    first = requested(image(1), places=(0,))
    later = first.multimodal_inputs.mrope_positions + 3
    delta = torch.tensor([[int(later.max()) + 1 - len(TEXT)]])
    other = requested(image(1), places=(0,), mrope_positions=later, mrope_position_delta=delta)
    assert first.origin_input_ids[0] != other.origin_input_ids[0]
    moved = requested(image(1), places=(26,))
    assert moved.origin_input_ids[26:30] == one.origin_input_ids[20:24]  # one embedding for both


def test_media_positions_of_text_that_do_not_go_on_one_by_one_have_no_keys() -> None:
    for start in (0, 5, 30):
        rows = mrope(len(TEXT), [(20, 24)])
        rows[:, start:] += 1
        delta = (rows.max() + 1 - len(TEXT)).reshape(1, 1)
        found = requested(image(1), mrope_positions=rows, mrope_position_delta=delta)
        assert media_of(found) is None


def test_media_identity_is_not_the_digest_that_a_client_can_compute() -> None:
    item = image(1)
    digest = item_digest(item)
    assert identify(processed(item)[0]) == [digest]
    assert item.identity != digest
    assert item_digest(image(1)) == digest


def test_media_identity_of_sglang_is_replaced() -> None:
    """Kimi's: it names the source of the image, not what the model sees."""
    found = []
    for number in (1, 2):
        item = image(number)
        item.set_identity(b"k" * 32)
        found.append(keys(requested(item))[-1])
    assert found[0] != found[1]
    assert found[0] == keys(requested(image(1)))[-1]


# ---- what has no keys ----


class Proxy:
    """Stands for a tensor in the memory of a GPU, or of another process."""


def hashed_before() -> MultimodalDataItem:
    item = image(1)
    item.set_hash(12345)  # as SGLang does with `mm_hashes` of a client
    return item


UNKEYED: dict[str, Callable[[], MultimodalDataItem]] = {
    "hash of a client": hashed_before,
    "hash without pads": lambda: image(1, hash=12345),
    "features elsewhere": lambda: image(1, feature=Proxy()),
    "features on a device": lambda: image(1, feature=torch.empty(16, 6, device="meta")),
    "some features elsewhere": lambda: image(1, feature=[torch.ones(3), Proxy()]),
    "no features": lambda: image(1, feature=None),
    "a value of an unknown kind": lambda: image(1, model_specific_data={"x": Proxy()}),
    "final embeddings": lambda: image(1, format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING),
    "embeddings beside": lambda: image(1, precomputed_embeddings=torch.ones(4, 8)),
    "processor output of a client": lambda: image(1, format=MultimodalInputFormat.PROCESSOR_OUTPUT),
}


@pytest.mark.parametrize("make", UNKEYED.values(), ids=UNKEYED)
def test_media_item_that_cannot_be_told_leaves_its_request_to_sglang(
    make: Callable[[], MultimodalDataItem],
) -> None:
    item = make()
    output, _ = processed(image(2), item)
    before = (item.hash, item.identity, item.pad_value)
    assert identify(output) is None
    assert (item.hash, item.identity, item.pad_value) == before
    assert output.mm_items[0].identity is None


def test_media_without_the_hook_or_of_an_unreviewed_model_has_no_keys() -> None:
    output, tokens = processed(image(1))
    assert media_of(request(output, tokens, keys_media=False)) is None
    output, tokens = processed(image(1))
    found = MultimodalInputs.from_processor_output(output)
    req = FakeReq("r", pad_mm_tokens(tokens, found), multimodal_inputs=found)
    assert media_of(req) is None


def padded_before(item: MultimodalDataItem) -> tuple[MultimodalProcessorOutput, "array[int]"]:
    """As the processor of Qwen3-VL does it, with a hash of the source of the image."""
    item.set_hash(99)
    output, tokens = processed(item)
    output.padded_input_ids = output.build_padded_input_ids(output.input_ids, [item])
    return output, tokens


def test_media_padded_before_gets_the_numbers_of_its_identity() -> None:
    output, tokens = padded_before(image(1))
    found = prepared(output)
    assert found.padded_input_ids == list(pad_mm_tokens(tokens, found))
    req = FakeReq("r", array("q", found.padded_input_ids), multimodal_inputs=found)
    assert keys(req) == keys(requested(image(1)))


def test_media_padded_before_with_the_hash_of_a_client_stays_as_it_is() -> None:
    item = image(1)
    output, _ = padded_before(item)
    item.set_hash(12345)  # as SGLang does with `mm_hashes`
    padded = output.padded_input_ids
    assert identify(output) is None
    assert item.identity is None
    assert output.padded_input_ids == padded


def test_media_never_hashed_has_no_keys() -> None:
    with envs.SGLANG_MM_SKIP_COMPUTE_HASH.override(True):
        assert identify(processed(image(1))[0]) is None


def test_media_identity_changed_later_has_no_keys() -> None:
    req = requested(image(1))
    assert media_of(req) is not None
    req.multimodal_inputs.mm_items[0].set_identity(b"i" * 32)
    tokens = processed(image(1))[1]
    req.origin_input_ids = pad_mm_tokens(tokens, req.multimodal_inputs)  # with the new numbers
    assert media_of(req) is None


def test_media_more_items_than_digests_have_no_keys() -> None:
    req = requested(image(1))
    req.multimodal_inputs.merge(requested(image(2)).multimodal_inputs)
    assert media_of(req) is None


@pytest.mark.parametrize(
    "name",
    ["token_modalities", "vision_position_ids", "media_nums_per_sample", "visible_frame_counts"],
)
def test_media_with_facts_of_unreviewed_models_has_no_keys(name: str) -> None:
    req = requested(image(1))
    setattr(req.multimodal_inputs, name, [1])
    assert media_of(req) is None


def test_media_pads_that_are_not_those_of_the_item_have_no_keys() -> None:
    for at, number in ((21, 5), (21, 10**6), (3, 10**6)):
        req = requested(image(1))
        req.origin_input_ids[at] = number
        assert media_of(req) is None
    req = requested(image(1))
    req.multimodal_inputs.mm_items[0].offsets = None
    assert media_of(req) is None
    req = requested(image(1))
    req.multimodal_inputs.mm_items[0].offsets = [(len(TEXT) - 2, len(TEXT) + 1)]
    assert media_of(req) is None


def test_media_items_out_of_order_have_no_keys() -> None:
    """SGLang gives embeddings to tokens in the order of the items."""
    req = requested(image(1), image(2))
    found = req.multimodal_inputs
    found.mm_items.reverse()
    found.cake_media_digests.reverse()
    assert media_of(req) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"mrope_position_delta": None},
        {"mrope_position_delta": torch.tensor([[1]])},
        {"mrope_position_delta": torch.tensor([[1], [2]])},
        {"mrope_positions": torch.zeros(3, 10, dtype=torch.int64)},
        {"mrope_positions": torch.zeros(3, 1, 40, dtype=torch.int64)},
    ],
)
def test_media_positions_that_do_not_tell_those_of_the_answer_have_no_keys(
    changes: dict[str, Any],
) -> None:
    req = requested(image(1))
    for name, value in changes.items():
        setattr(req.multimodal_inputs, name, value)
    assert media_of(req) is None


def test_media_text_with_numbers_of_media_has_no_keys() -> None:
    """A client sends the numbers that stand for another client's image."""
    numbers = requested(image(1)).origin_input_ids
    assert media_of(FakeReq("r", numbers)) is None
    assert media_of(FakeReq("r", TEXT)) is NO_MEDIA
    assert media_of(FakeReq("r", array("q"))) is NO_MEDIA


# ---- answers ----


def test_media_answer_has_the_keys_of_the_next_prompt() -> None:
    """The answer's positions go on behind those of the prompt, in every way that SGLang makes
    them: as it generates, after a retraction, and in the prompt of the next turn."""
    req = requested(image(1))
    req.output_ids = array("q", range(900, 912))
    generated = keys(req)
    rows = req.multimodal_inputs.mrope_positions
    req.multimodal_inputs.mrope_positions = extend_mrope_positions_for_retracted_request(rows, 12)
    assert keys(req) == generated
    output, tokens = processed(image(1))
    longer = tokens + req.output_ids
    output.mrope_positions = mrope(len(longer), [(20, 24)])
    output.mrope_position_delta = (output.mrope_positions.max() + 1 - len(longer)).reshape(1, 1)
    assert keys(request(output, longer)) == generated


def test_media_model_without_mrope_has_the_index_as_position() -> None:
    req = requested(image(1), mrope_positions=None, mrope_position_delta=None)
    found = media_of(req)
    assert found is not None
    assert found.positions == ()
    assert keys(req)[-1] != keys(requested(image(1)))[-1]


def test_media_of_no_items_with_plain_positions_has_the_keys_of_text() -> None:
    rows = torch.arange(len(TEXT)).expand(3, -1)
    req = requested(mrope_positions=rows, mrope_position_delta=torch.tensor([[0]]))
    assert keys(req) == text_keys()


# ---- in the scheduler ----


def test_coordinator_images_are_loaded_by_their_own_keys_only() -> None:
    with CoordinatorHarness() as harness:
        req = requested(image(1))
        chain = KeyChain(KeySeed(b"n" * 32), BLOCK, media_of(req) or Media())
        stored = chain.of(req.origin_input_ids)
        harness.store({key: harness.block(block) for block, key in enumerate(stored)})
        for number, found in ((1, (True, True)), (2, (True, False))):
            req = replace(requested(image(number)), rid=f"r{number}")
            harness.arrive(req)
            record = harness.coordinator.live[req.rid]
            harness.coordinator.poll([req.rid])
            assert record.agreed.stored == found
            assert not record.may_overlap
            harness.coordinator.release(req.rid)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"multimodal_inputs": MultimodalInputs(mm_items=[])}, "media"),
        ({"origin_input_ids": array("q", [1, 10**6])}, "media"),
        ({"input_embeds": [[0.5]]}, "embeddings"),
        ({"positional_embed_overrides": object()}, "embeddings"),
        ({"session": object()}, "session"),
    ],
)
def test_coordinator_request_that_keys_do_not_cover_is_counted(
    changes: dict[str, Any], reason: str
) -> None:
    with CoordinatorHarness() as harness:
        harness.arrive(replace(FakeReq("r", TEXT), **changes))
        assert harness.coordinator.live.get("r") is None
        counts = harness.counters.snapshot()
        assert counts["unkeyed_requests", reason] == 1
        assert sum(counts["unkeyed_requests", each] for each in ("media", "session")) <= 1


def test_media_hook_fails_and_sglang_prepares_the_items_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MultimodalDataItem, "set_identity", lambda *_: 1 / 0)
    output, _ = processed(image(1))
    found = prepared(output)
    assert found.mm_items[0].pad_value is not None
    assert not hasattr(found, "cake_media_digests")
