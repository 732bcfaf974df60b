"""Last steps that begin before their last blocks have arrived, in a real server.

The layers of the server are slowed down, so a step takes longer than loading the last blocks. The
last step can begin when the first bytes of the last blocks have arrived.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from live import (
    BLOCK,
    CHUNK,
    DEADLINE_S,
    TOLERANCE,
    Answer,
    Live,
    PendingRequest,
    Start,
    assert_same,
    distance,
    falsify,
)
from polling import until
from shared_store import SharedStore

from benchmarks.harness.slow_link import SlowLink
from sglang_cake.codecs.frame import HEADER_BYTES

Make = Callable[[int], list[int]]
DOCUMENT = 20 * BLOCK
FLAGS = ("--dtype", "float32", "--max-total-tokens", "12000", "--enable-metrics")


@dataclass(frozen=True, slots=True)
class SlowStoreServer:
    """A server whose store is behind a slow link."""

    live: Live
    link: SlowLink

    def until_repeated(self, ask: Callable[[], Answer]) -> Answer:
        """Ask until a block of a last step that had begun failed to arrive."""
        before = self.live.metric("overlap_failures_total")

        def repeated() -> Answer | None:
            answer = ask()
            return answer if self.live.metric("overlap_failures_total") > before else None

        return until(repeated, "a last step that lacked a block", 2 * DEADLINE_S)


def last_loaded(answer: Answer) -> int:
    """The block that was loaded last: loading begins at the end."""
    return int(answer.meta["cake"]["meet_token"]) // BLOCK


def environment(folder: Path, standins: dict[str, str]) -> dict[str, str]:
    """Layers take 10 ms more."""
    cache = folder / "cache-of-last-steps"
    return {**standins, "CAKE_TEST_LAYER_S": "0.005", "XDG_CACHE_HOME": str(cache)}


@pytest.fixture(scope="module")
def eager(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[Live]:
    env, store = environment(folder, standins), folder / "store-eager"
    with start(models["first"], FLAGS, store=store, bandwidth="20MB/s", env=env) as live:
        yield live
        live.check_log()


def overlapped(answer: Answer) -> int:
    return int(answer.meta["cake"]["overlapped_tokens"])


def until_overlapped(ask: Callable[[], Answer]) -> Answer:
    """Ask until a last step overlaps with loads. The server has to measure its costs first, and on
    a busy machine not every request has such a step."""

    def early() -> Answer | None:
        answer = ask()
        return answer if overlapped(answer) else None

    return until(early, "a last step that begins early", 3 * DEADLINE_S)


@pytest.mark.parametrize(
    "tail",
    [
        *(1, BLOCK - 1, CHUNK - 1),
        *(pytest.param(tail, marks=pytest.mark.breadth) for tail in (5, BLOCK + 1)),
    ],
)
def test_early_last_step_on_a_stored_document_gives_the_plain_answer(
    eager: Live, plain: Live, prompt: Make, tail: int
) -> None:
    document = prompt(DOCUMENT)
    eager.ask_and_store(document)
    ids = document + prompt(tail)

    def ask() -> Answer:
        eager.flush()
        assert eager.store is not None
        eager.store.remove(*eager.store.files(ids)[DOCUMENT // BLOCK :])
        return eager.ask(ids)

    answer = until_overlapped(ask)
    assert_same(answer, plain.reference(ids))
    assert answer.loaded + answer.computed == len(ids)
    assert answer.cached == answer.loaded
    assert overlapped(answer) <= answer.loaded
    # KV that arrived during the step is in the tree like any KV.
    more = ids + prompt(9)
    again = eager.ask(more)
    assert again.cached >= len(ids) - 1
    assert_same(again, plain.reference(more))


def test_early_last_step_after_a_computed_block_gives_the_plain_answer(
    eager: Live, plain: Live, prompt: Make
) -> None:
    """The first block is not stored and is computed first, so the request has its row. It is one
    block: on a busy machine a chunk takes as long as all loads."""
    ids = prompt(DOCUMENT + 30)
    eager.ask_and_store(ids)

    def ask() -> Answer:
        assert eager.store is not None
        eager.store.remove(eager.store.until_stored(ids)[0])
        return eager.ask_flushed(ids)

    answer = until_overlapped(ask)
    assert answer.computed >= BLOCK
    assert_same(answer, plain.reference(ids))
    assert_same(eager.ask(ids), plain.reference(ids))


def test_early_last_step_matched_tokens_are_not_loaded(
    eager: Live, plain: Live, prompt: Make
) -> None:
    ids = prompt(DOCUMENT + 7)
    eager.ask_and_store(ids)

    def ask() -> Answer:
        eager.ask_flushed(ids[: 2 * BLOCK + 11])
        return eager.ask(ids)

    answer = until_overlapped(ask)
    assert answer.meta["cake"]["matched_tokens"] == 2 * BLOCK + 11
    assert_same(answer, plain.reference(ids))


def test_early_last_step_falsified_kv_changes_the_answer(
    eager: Live, plain: Live, prompt: Make
) -> None:
    """The control."""
    ids = prompt(DOCUMENT + 12)
    for file in eager.ask_and_store(ids):
        falsify(file)
    lie = until_overlapped(lambda: eager.ask_flushed(ids))
    assert distance(lie.logprobs, plain.reference(ids).logprobs) > 20 * TOLERANCE


def test_early_last_step_beside_a_decoding_request_does_not_happen(
    eager: Live, plain: Live, prompt: Make
) -> None:
    """Other requests use the device in the meantime, and all answers are the same."""
    ids, other = prompt(DOCUMENT + 25), prompt(40)
    eager.ask_and_store(ids)
    until_overlapped(lambda: eager.ask_flushed(ids))
    eager.flush()
    long = PendingRequest(eager, other, new_tokens=60, rid="long")
    long.until("arrive")
    answer = eager.ask(ids)
    decoding = long.is_running
    assert_same(answer, plain.reference(ids))
    assert_same(long.answer(), plain.reference(other, 60))
    if decoding:
        assert overlapped(answer) == 0


@pytest.fixture(scope="module")
def remote(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[SlowStoreServer]:
    with (
        SharedStore(folder / "store-remote") as store,
        closing(SlowLink(store.port, 20e6)) as link,
    ):
        url = f"http://127.0.0.1:{link.port}"
        flags = (*FLAGS, "--enable-cake", "--cake-store", url, "--cake-block-tokens", str(BLOCK))
        flags += ("--cake-min-load-tokens", str(BLOCK))
        with start(models["first"], flags, env=environment(folder, standins)) as live:
            live.store = store.view
            yield SlowStoreServer(live, link)
            live.check_log()


def test_early_last_step_over_a_slow_link_gives_the_plain_answer(
    remote: SlowStoreServer, plain: Live, prompt: Make
) -> None:
    ids = prompt(DOCUMENT + 100)
    remote.live.ask_and_store(ids)
    answer = until_overlapped(lambda: remote.live.ask_flushed(ids))
    assert_same(answer, plain.reference(ids))
    assert_same(remote.live.ask(ids), plain.reference(ids))


def one_bit(payload: bytes) -> bytes:
    return payload[:-1] + bytes([payload[-1] ^ 1])


def no_numbers(payload: bytes) -> bytes:
    return b"\xff" * len(payload)  # NaN, which a sampler would reject


@pytest.mark.parametrize("spoiled", [one_bit, no_numbers])
def test_early_last_step_corrupt_last_block_is_computed(
    remote: SlowStoreServer, plain: Live, prompt: Make, spoiled: Callable[[bytes], bytes]
) -> None:
    """Its first layers have been used when the check fails."""
    ids = prompt(DOCUMENT + 40)
    files = remote.live.ask_and_store(ids)

    def ask() -> Answer:
        last = last_loaded(until_overlapped(lambda: remote.live.ask_flushed(ids)))
        good = files[last].read_bytes()
        files[last].write_bytes(good[:HEADER_BYTES] + spoiled(good[HEADER_BYTES:]))
        remote.live.ask_flushed(ids, 1, sampling={"temperature": 1.0, "top_p": 0.9})
        # The bad block may be set aside at any time from now on, also after the server has found
        # that it is stored. So the test removes it and has it stored again.
        remote.live.store.remove(files[last])  # type: ignore[union-attr]
        remote.live.flush()
        remote.live.ask_and_store(ids)
        return remote.live.ask([*ids, 1, 2, 3])

    more = [*ids, 1, 2, 3]
    assert_same(remote.until_repeated(ask), plain.reference(more))


def test_early_last_step_cut_connection_gives_the_plain_answer(
    remote: SlowStoreServer, plain: Live, prompt: Make
) -> None:
    ids = prompt(DOCUMENT + 60)
    files = remote.live.ask_and_store(ids)
    block_bytes = files[0].stat().st_size

    def ask() -> Answer:
        blocks = until_overlapped(lambda: remote.live.ask_flushed(ids)).loaded // BLOCK
        remote.live.flush()
        remote.link.cut_after(blocks * block_bytes - block_bytes // 2)
        return remote.live.ask(ids)

    assert_same(remote.until_repeated(ask), plain.reference(ids))
    assert_same(remote.live.ask(ids), plain.reference(ids))
