"""Three servers in a row on one store folder: the blocks that the next one must and must not find.

Each fixture runs one server and returns its answers; the tests check them.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from live import (
    BLOCK,
    VOCAB,
    Answer,
    Live,
    PendingRequest,
    Start,
    StoreView,
    assert_same,
    check_block,
)
from polling import until

ADAPTER = {"lora_path": "a"}


def _ids(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % VOCAB for i in range(tokens)]


KEPT = _ids(1, 14 * BLOCK)
WITH_ADAPTER = _ids(2, 8 * BLOCK + 2)
CUT_BY_TERM = _ids(3, 40 * BLOCK)
CUT_BY_KILL = _ids(4, 40 * BLOCK)


@dataclass(slots=True)
class ServerRun:
    """One server's answers."""

    store: StoreView
    answers: dict[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Home:
    """Folders whose content changes between the servers while their names stay."""

    model: Path
    adapter: Path
    store: Path


@pytest.fixture(scope="module")
def home(folder: Path, models: dict[str, Path], adapters: dict[str, Path]) -> Home:
    home = Home(folder / "home" / "model", folder / "home" / "adapter", folder / "home" / "store")
    shutil.copytree(models["first"], home.model)
    shutil.copytree(adapters["a"], home.adapter)
    return home


def _flags(home: Home, mode: str) -> list[str]:
    return [
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", mode),
        *("--enable-lora", "--lora-backend", "torch_native", "--lora-paths", f"a={home.adapter}"),
    ]


@pytest.fixture(scope="module")
def first(home: Home, start: Start, standins: dict[str, str]) -> ServerRun:
    """Mode compute. Ended by SIGTERM while it writes."""
    flags, stop = _flags(home, "compute"), signal.SIGTERM
    with start(home.model, flags, store=home.store, env=standins, stop=stop) as live:
        run = ServerRun(live.store)
        run.answers["kept"] = live.ask(KEPT)
        run.answers["adapter"] = live.ask(WITH_ADAPTER, **ADAPTER)
        until(lambda: len(run.store.blocks()) >= 14 + 8, "both prompts in the store")
        run.answers["again"] = live.ask_flushed(KEPT)
        asking = PendingRequest(live, CUT_BY_TERM, new_tokens=1, rid="term")
        asking.until("claim", 6)
    return run


@pytest.fixture(scope="module")
def second(first: ServerRun, home: Home, start: Start, standins: dict[str, str]) -> ServerRun:
    """Mode load, the same folder. Killed while it writes."""
    flags = _flags(home, "load")
    with start(home.model, flags, store=home.store, env=standins) as live:
        run = ServerRun(live.store)
        run.answers["kept"] = live.ask(KEPT)
        run.answers["adapter"] = live.ask(WITH_ADAPTER, **ADAPTER)
        run.answers["term"] = live.ask(CUT_BY_TERM)
        asking = PendingRequest(live, CUT_BY_KILL, new_tokens=1, rid="kill")
        asking.until("claim", 6)
        os.killpg(live.server.process.pid, signal.SIGKILL)
    return run


@pytest.fixture(scope="module")
def third(
    second: ServerRun,
    home: Home,
    start: Start,
    standins: dict[str, str],
    models: dict[str, Path],
    adapters: dict[str, Path],
) -> Iterator[Live]:
    """Mode load, the same folders with another model of the same shape and another adapter."""
    for name, source in ((home.model, models["second"]), (home.adapter, adapters["a2"])):
        shutil.rmtree(name)
        shutil.copytree(source, name)
    flags = _flags(home, "load")
    with start(home.model, flags, store=home.store, env=standins) as live:
        yield live


@pytest.fixture(scope="module")
def reference(plain: Live) -> Live:
    return plain


def test_mode_compute_stored_prompt_is_not_loaded(first: ServerRun, reference: Live) -> None:
    for name in ("kept", "again"):
        assert_same(first.answers[name], reference.reference(KEPT))
        assert first.answers[name].loaded == 0


def test_mode_load_after_restart_loads_all_that_is_stored(
    second: ServerRun, reference: Live
) -> None:
    assert_same(second.answers["kept"], reference.reference(KEPT))
    assert second.answers["kept"].loaded >= len(KEPT) - 1
    assert second.answers["kept"].computed == 1


def test_adapter_blocks_after_restart_are_loaded(second: ServerRun, reference: Live) -> None:
    assert_same(second.answers["adapter"], reference.reference(WITH_ADAPTER, **ADAPTER))
    assert second.answers["adapter"].loaded == 8 * BLOCK


def test_sigterm_while_storing_answer_after_restart_is_exact(
    second: ServerRun, reference: Live
) -> None:
    assert_same(second.answers["term"], reference.reference(CUT_BY_TERM))


def test_sigkill_while_storing_leaves_whole_blocks_only(second: ServerRun) -> None:
    blocks = second.store.blocks()
    assert len(blocks) > 14
    for block in blocks:
        check_block(block)


def test_other_model_under_the_same_path_loads_nothing(
    third: Live, second: ServerRun, plain: Live, models: dict[str, Path]
) -> None:
    answer = third.ask(KEPT)
    assert (answer.loaded, answer.cached) == (0, 0)
    plain.update_weights(models["second"])
    try:
        assert_same(answer, plain.ask(KEPT))
    finally:
        plain.update_weights(models["first"])
    with pytest.raises(AssertionError):  # control: the models differ
        assert_same(answer, second.answers["kept"])


def test_weight_update_back_to_old_weights_loads_their_blocks(
    third: Live, plain: Live, models: dict[str, Path]
) -> None:
    """An update to the first model's weights finds its blocks, also those of the killed server."""
    third.flush()
    third.update_weights(models["first"])
    answer = third.ask(KEPT)
    assert_same(answer, plain.reference(KEPT))
    assert answer.loaded > 0
    assert_same(third.ask(CUT_BY_KILL), plain.reference(CUT_BY_KILL))


def test_adapter_with_other_weights_under_its_name_loads_nothing(
    third: Live, plain: Live, models: dict[str, Path], second: ServerRun
) -> None:
    third.update_weights(models["first"])
    answer = third.ask(WITH_ADAPTER, **ADAPTER)
    assert answer.loaded == 0
    assert_same(answer, plain.reference(WITH_ADAPTER, lora_path="a2"))
    with pytest.raises(AssertionError):
        assert_same(answer, second.answers["adapter"])


def test_weight_version_changed_loads_nothing(
    third: Live, plain: Live, models: dict[str, Path]
) -> None:
    third.update_weights(models["first"], weight_version="step-2")
    answer = third.ask(KEPT)
    assert_same(answer, plain.reference(KEPT))
    assert answer.loaded == 0


def test_weight_update_without_flush_stores_no_mixed_kv(
    third: Live, models: dict[str, Path], plain: Live
) -> None:
    ids = _ids(9, 6 * BLOCK)
    third.update_weights(models["first"])
    third.ask(ids[: 3 * BLOCK + 1], 1)
    third.update_weights(models["second"], flush_cache=False)
    third.ask(ids, 1)  # half of the prompt has KV of the other weights, as SGLang allows
    third.flush()
    answer = third.ask(ids)
    assert answer.loaded == 0
    plain.update_weights(models["second"])
    try:
        assert_same(answer, plain.ask(ids))
    finally:
        plain.update_weights(models["first"])
