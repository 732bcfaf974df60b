"""Tokens and logprobs are the same with and without the store, whichever blocks are stored."""

from collections.abc import Callable

import pytest
from live import BLOCK, CHUNK, TOLERANCE, Answer, Live, assert_same, distance, falsify
from polling import until

Make = Callable[[int], list[int]]

LENGTHS = (
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK,
    2 * CHUNK + BLOCK,  # wholly stored: exactly 9 blocks
    2047,
)


def skip_most_races(both: Live, value: int, raced: tuple[int, ...]) -> None:
    """In mode both, speed decides what is loaded: there, values are only other prompts."""
    if both.races and value not in raced:
        pytest.skip("in mode both it is one more prompt")


@pytest.mark.parametrize("tokens", LENGTHS)
def test_stored_prompt_of_any_length_gives_the_plain_answer(
    both: Live, plain: Live, prompt: Make, tokens: int
) -> None:
    skip_most_races(both, tokens, (BLOCK + 1, 2 * CHUNK + BLOCK, 2047))
    ids = prompt(tokens)
    reference = plain.reference(ids)
    assert_same(both.ask(ids), reference)
    both.store.until_stored(ids)
    answer = both.ask_flushed(ids)
    assert_same(answer, reference)
    if tokens > 2 * BLOCK:
        assert answer.loaded > 0 or both.races
    assert answer.loaded + answer.computed == tokens
    assert answer.cached == answer.loaded


@pytest.mark.parametrize("tail", [1, BLOCK - 1, BLOCK + 1, CHUNK + 7])
def test_stored_document_with_a_new_question_gives_the_plain_answer(
    both: Live, plain: Live, prompt: Make, tail: int
) -> None:
    skip_most_races(both, tail, (1, CHUNK + 7))
    document = prompt(10 * BLOCK + 11)
    both.ask_and_store(document)
    ids = document + prompt(tail)
    answer = both.ask_flushed(ids)
    assert_same(answer, plain.reference(ids))
    assert answer.loaded > 0 or both.races


@pytest.mark.parametrize("on_device", [BLOCK // 2, 3 * BLOCK, 5 * BLOCK + 1])
def test_stored_prompt_partly_on_the_device_loads_from_the_rest(
    both: Live, plain: Live, prompt: Make, on_device: int
) -> None:
    skip_most_races(both, on_device, (5 * BLOCK + 1,))
    ids = prompt(16 * BLOCK + 3)
    both.ask_and_store(ids)
    both.ask_flushed(ids[:on_device], 1)
    answer = both.ask(ids)
    assert_same(answer, plain.reference(ids))
    matched = answer.meta["cake"]["matched_tokens"]
    assert matched >= on_device - 1
    assert answer.loaded > 0 or both.races
    assert matched + answer.loaded + answer.computed == len(ids)


def test_islands_between_holes_are_attached_and_holes_stored_again(
    both: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(24 * BLOCK + 9)
    files = both.ask_and_store(ids)
    both.store.remove(*(files[block] for block in (7, 12, 13, 18, 22)))
    answer = both.ask_flushed(ids)
    assert_same(answer, plain.reference(ids))
    attaches = [e for e in both.events(answer.meta["id"]) if e["event"] == "attach"]
    assert len(attaches) >= 2 or both.races
    both.store.until_stored(ids)  # the holes are filled again


def test_corrupt_block_in_the_store_is_computed_counted_and_set_aside(
    both: Live, plain: Live, prompt: Make
) -> None:
    if both.races:
        pytest.skip("that each block is read is certain in mode load only")
    ids = prompt(20 * BLOCK + 1)
    files = both.ask_and_store(ids)
    before = both.metric("load_failures_total", reason="corrupt")
    payload, header = files[18], files[19]
    for file, offset in ((payload, 5000), (header, 50)):
        raw = bytearray(file.read_bytes())
        raw[offset] ^= 1
        file.write_bytes(raw)
    assert_same(both.ask_flushed(ids), plain.reference(ids))
    assert both.store.set_aside(payload)
    assert both.store.set_aside(header)
    until(lambda: both.metric("load_failures_total", reason="corrupt") >= before + 2, "counted")
    both.store.until_stored(ids)
    assert_same(both.ask_flushed(ids), plain.reference(ids))


@pytest.mark.parametrize("start_len", [0, 300, 700])
def test_input_logprobs_of_a_stored_prompt_equal_the_plain_server(
    both: Live, plain: Live, prompt: Make, start_len: int
) -> None:
    skip_most_races(both, start_len, (300,))
    ids = prompt(12 * BLOCK + 2)
    both.ask_and_store(ids)
    answer = both.ask_flushed(ids, logprob_start_len=start_len)
    assert_same(answer, plain.ask_flushed(ids, logprob_start_len=start_len))
    assert answer.loaded <= start_len  # tokens with logprobs must be computed
    assert len(answer.input_logprobs) == len(ids) - start_len


def test_generated_tokens_are_stored_and_loaded_in_the_next_turn(
    both: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(4 * BLOCK)
    first = both.ask(ids, BLOCK + 2)
    conversation = ids + first.tokens[:-1]
    both.store.until_stored(conversation)
    turn = conversation + first.tokens[-1:] + prompt(20)
    answer = both.ask_flushed(turn)
    assert_same(answer, plain.reference(turn))
    if not both.races:  # else the lookup may be answered after the prefill
        assert answer.loaded > 0
        found = next(e for e in both.events(answer.meta["id"]) if e["event"] == "found")
        assert found["stored_blocks"] >= len(conversation) // BLOCK


def test_stored_kv_loaded_and_stored_again_is_bit_identical(both: Live, prompt: Make) -> None:
    """Loaded KV is written again from the device: the files must be the same."""
    if both.races:
        pytest.skip("how many blocks are loaded is certain in mode load only")
    ids = prompt(12 * BLOCK)
    files = both.ask_and_store(ids)
    loaded = both.ask_flushed(ids, 1)
    stored = [file.read_bytes() for file in files]
    both.store.remove(*files)
    assert both.ask(ids, 1).cached == len(ids) - 1  # from the device
    both.store.until_stored(ids)
    first = -(-loaded.meta["cake"]["meet_token"] // BLOCK)
    assert first < len(files) - 1
    for file, before in list(zip(files, stored, strict=True))[first:-1]:
        assert file.read_bytes() == before


def test_mode_both_computes_and_loads_one_prompt_to_the_plain_answer(
    racing: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(40 * BLOCK + 5)
    files = racing.ask_and_store(ids)
    answer = _from_both_ends(racing, ids)
    assert_same(answer, plain.reference(ids))
    assert CHUNK <= answer.meta["cake"]["meet_token"] < len(ids)
    for file in files:  # the control
        falsify(file)
    lie = _from_both_ends(racing, ids)
    racing.store.remove(*files)
    assert distance(lie.logprobs, plain.reference(ids).logprobs) > 20 * TOLERANCE


def _from_both_ends(live: Live, ids: list[int], tries: int = 20) -> Answer:
    """Ask until a part is computed and a part is loaded. On a busy machine all blocks may be loaded
    before the first chunk is computed."""
    for _ in range(tries):
        answer = live.ask_flushed(ids)
        if answer.computed >= CHUNK and answer.loaded >= 2 * BLOCK:
            return answer
    raise AssertionError("never from both ends")


def test_exactness_check_falsified_kv_changes_the_answer(
    both: Live, plain: Live, prompt: Make
) -> None:
    """Negative control: valid files with the KV of other positions must change the answer."""
    if both.races:
        pytest.skip("that wrong blocks are used is certain in mode load only")
    ids = prompt(14 * BLOCK)
    files = both.ask_and_store(ids)
    reference = plain.reference(ids)
    for file in files:
        falsify(file)
    lie = both.ask_flushed(ids)
    both.store.remove(*files)
    assert lie.loaded > 0
    assert distance(lie.logprobs, reference.logprobs) > 20 * TOLERANCE
    with pytest.raises(AssertionError):
        assert_same(lie, reference)
    assert_same(both.ask_flushed(ids), reference)
