"""Another store for a running server, without a server."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from adder_harness import BareTree
from registered_hooks import hooks_of

from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError
from sglang_cake.integration import build
from sglang_cake.integration.build import CakeService
from sglang_cake.integration.scheduler import scheduler_hooks
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.loading.cost_model import LoadCost
from sglang_cake.loading.loader import Loader
from sglang_cake.stores import open_store
from sglang_cake.stores.base import StoreSource

URL = "memory://1GB,file:///kv"


class Ranks:
    """The parts of a detached service that `attach_store` uses, and an answer of SGLang.

    Attributes:
        said: by this rank to the others.
        closed: `close` of stores that were made in vain.
        used: stores from now on.
    """

    def __init__(self, failure: Exception | None = None, *, others_agree: bool = True) -> None:
        """Args: failure: of making the store on this rank."""
        self.said: list[float] = []
        self.closed: list[Any] = []
        self.used: list[Any] = []
        self._others_agree = others_agree
        self._failure = failure
        self.coordinator: Any = SimpleNamespace(store_detached=True)
        self.service: Any = SimpleNamespace(
            setting="file:///before",
            coordinator=self.coordinator,
            loader=SimpleNamespace(forget_costs=lambda: None),
            _consensus=RankConsensus(self._reduce),
            _namespace=object(),
            _parsed=lambda setting: [],
            _open=self._open,
            _use=self.used.append,
            _recall_costs=lambda: None,
            _start=None,
            _io=SimpleNamespace(post=lambda start, close: self.closed.append(close)),
        )
        self.service.attach_store = lambda setting: CakeService.attach_store(self.service, setting)

    def _open(self, *args: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return SimpleNamespace(close="close")

    def _reduce(self, tensor: torch.Tensor) -> None:
        self.said += tensor.tolist()
        tensor *= self._others_agree

    def attach(self) -> Any:
        tree = BareTree(self.coordinator)
        tree.service = self.service
        scheduler = SimpleNamespace(tree_cache=tree)
        attach = hooks_of(scheduler_hooks.install)["attach_hicache_storage_wrapped"]
        sglangs = SimpleNamespace(success=False, message="Hierarchical cache is not enabled.")
        request = SimpleNamespace(hicache_storage_backend=URL)
        return attach(lambda *args: sglangs, scheduler, request)

    @property
    def unchanged(self) -> bool:
        detached = self.coordinator.store_detached
        return detached and self.service.setting == "file:///before" and not self.used


def test_attach_store_without_memory_for_it_is_refused_and_changes_nothing() -> None:
    """A prompt would be looked up, and no store is there."""
    ranks = Ranks(OSError(12, "Cannot allocate memory"))
    answer = ranks.attach()
    assert not answer.success
    assert "Cannot allocate memory" in answer.message
    assert ranks.unchanged


def test_attach_store_that_another_rank_cannot_make_is_refused_and_closed() -> None:
    """That rank would skip the match in its tree for each arrival, and evict other nodes later."""
    ranks = Ranks(others_agree=False)
    answer = ranks.attach()
    assert not answer.success
    assert "another rank" in answer.message
    assert ranks.unchanged
    assert ranks.closed == ["close"]


@pytest.mark.parametrize("failure", [None, OSError(12, "no memory"), KeyError("a bug")])
def test_attach_store_tells_the_other_ranks_whatever_fails_here(failure: Exception | None) -> None:
    """They wait for this rank."""
    ranks = Ranks(failure)
    assert ranks.attach().success is (failure is None)
    assert ranks.said == [failure is None]
    assert ranks.unchanged is (failure is not None)


class Alone(CakeService):
    """A service of one rank with a file store.

    Attributes: used: by the loader and by the writer, with what came with it.
    """

    def __init__(self, namespace: Any = None) -> None:
        """Args: namespace: None: it is not known, so no store is opened."""
        self._namespace = namespace
        self._config: Any = SimpleNamespace(eviction_policy="lru", queue_depth=None)
        self._consensus = RankConsensus(None)
        self._tree: Any = SimpleNamespace(total_size=lambda: (0,))
        self._store = None
        self.setting: str | None = "file:///before"
        self._sources = self._parsed(self.setting)
        self._io: Any = SimpleNamespace(post=lambda *args: None)
        self.coordinator: Any = SimpleNamespace(store_detached=False)
        self.used: list[Any] = []
        used: Any = SimpleNamespace(
            use=lambda *args: self.used.append(args), forget_costs=lambda: None
        )
        self.loader = self.writer = used

    def _parsed(self, setting: str | None) -> list[StoreSource]:
        return open_store.parse_sources(setting)

    def _open(self, sources: list[StoreSource], namespace: Any) -> Any:
        return tuple(sources)

    def _recall_costs(self) -> None:
        pass


def test_attach_store_loads_and_writes_as_many_blocks_at_once_as_its_links_need() -> None:
    service = Alone(namespace=object())
    tiers = "s3://bucket,file:///kv"
    service.attach_store(tiers)
    store = tuple(open_store.parse_sources(tiers))
    assert service.used == [(store, [16, 4]), (store, 16)]


def test_attach_store_before_the_namespace_is_known_counts_its_own_reads_at_once() -> None:
    """Predictions and time limits of loads depend on their number."""
    service = Alone()
    staging: Any = None
    io: Any = SimpleNamespace(post=lambda *args: None)
    service.loader = Loader(None, staging, io, Counters(), depths=[4], prior=LoadCost(0.0, 0.001))
    service.attach_store("s3://bucket")
    assert service.loader.cost.depth == 16


class OfLargeBlocks(Alone):
    """One of two processes of its machine."""

    _ctx: Any = None
    _block_bytes = 16 << 20
    kv: Any = SimpleNamespace(device=torch.device("cpu"))
    _parsed = CakeService._parsed


def test_attach_store_with_less_memory_than_a_block_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be left out for ever."""
    monkeypatch.setattr(build, "machine_schedulers", lambda ctx: 2)
    service = OfLargeBlocks(namespace=object())
    with pytest.raises(ConfigError, match="16 MiB: raise it"):
        service.attach_store("memory://20MiB,file:///kv")
    assert not service.used
    service.attach_store("memory://40MiB,file:///kv")
    assert service.used


@pytest.mark.parametrize("is_private", [False, True])
def test_namespace_that_becomes_known_is_logged_with_whose_it_is(
    is_private: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that were pushed, or released and resumed, have no other line in the log."""
    service = Alone()
    service.identity = SimpleNamespace(is_private=is_private)
    service.coordinator = SimpleNamespace(
        keys=SimpleNamespace(suspended=False),
        store_detached=True,
        rebase=lambda *args, **kwargs: None,
    )
    known: Any = SimpleNamespace(digest=lambda: bytes(32))
    with caplog.at_level(logging.INFO, "sglang_cake"):
        service.on_known(known)
    (line,) = caplog.messages
    assert ("of this server alone" in line) == is_private


@pytest.mark.parametrize("change", ["detached", "weights changing", "weights changed"])
def test_default_store_whose_disk_hangs_is_not_waited_for_by_the_scheduler(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Alone()
    before = open_store.parse_sources(service.setting)

    def hangs(policy: str) -> Any:
        raise AssertionError("a disk that hangs is asked how large it is")

    monkeypatch.setattr(open_store, "default_source", hangs)
    service.setting = None
    known: Any = SimpleNamespace(digest=lambda: bytes(32))
    service.identity = SimpleNamespace(
        is_private=True,
        weights_changing=lambda: None,
        weights_changed=lambda *args: service.on_known(known),
    )
    service.coordinator = SimpleNamespace(
        keys=SimpleNamespace(suspended=False),
        store_detached=False,
        rebase=lambda *args, **kwargs: None,
    )
    if change == "detached":
        service.detach_store()
    elif change == "weights changing":
        service.weights_changing()
    else:
        service.weights_changed(None, None, None, idle=True)
    store = tuple(before) if change == "weights changed" else None
    assert [used for used, _ in service.used] == [store, store]
