"""Prefill and decode on servers of their own: a prefill server alone, with SGLang's stand-in for a
decode server, and one with a real decode server, over Mooncake's TCP transport."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, Live, Start, assert_same, falsify

from sglang_cake.demo.sglang_server import free_port

try:
    import mooncake.engine  # noqa: F401  it takes KV from one server to the other
except ImportError as error:
    pytest.skip(f"Mooncake cannot be loaded: {error}", allow_module_level=True)

Make = Callable[[int], list[int]]
COMMON = (
    *("--dtype", "float32", "--max-total-tokens", "12000", "--enable-metrics"),
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
)
NO_DECODE_SERVER = "2.2.2.2"  # SGLang's name for a decode server that takes KV and does nothing
ROOMS = itertools.count(random.randrange(2**40))


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return folder / "store-disaggregated"


@pytest.fixture(scope="module")
def ordinary(start: Start, models: dict[str, Path], store: Path) -> Iterator[Live]:
    """A server that does both, with the same store. Its answers are the references."""
    flags = ("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load")
    with start(models["first"], flags, store=store) as live:
        yield live


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def prefill(
    start: Start, models: dict[str, Path], store: Path, standins: dict[str, str], port: int
) -> Iterator[Live]:
    flags = (
        *(*COMMON, "--disaggregation-mode", "prefill", "--cake-mode", "load"),
        *("--disaggregation-bootstrap-port", str(port)),
    )
    with start(models["first"], flags, store=store, env=standins) as live:
        yield live


def test_prefill_server_alone_loads_what_an_ordinary_server_stored(
    ordinary: Live, prefill: Live, prompt: Make
) -> None:
    document = prompt(10 * BLOCK + 7)
    reference = ordinary.ask(document, 1)
    files = ordinary.store.until_stored(document[: 10 * BLOCK])
    alone = {"bootstrap_host": NO_DECODE_SERVER, "bootstrap_room": next(ROOMS)}
    warm = prefill.ask(document, 1, **alone)
    assert warm.loaded == 10 * BLOCK
    assert_same(warm, reference)
    for file in files:
        falsify(file)
    lie = prefill.ask_flushed(document, 1, **alone)
    assert lie.loaded > 0
    with pytest.raises(AssertionError):
        assert_same(lie, reference)
