"""What is looked for in the background is known in the same step on every rank, or to nobody."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_cake.integration.identity import content
from sglang_cake.integration.identity.content import ContentChanged, Files, look
from sglang_cake.integration.identity.searches import (
    PRIVATE,
    SHORT_BYTES,
    ModelPlace,
    Search,
    Searches,
    adapter_search,
    update_search,
)

LONG = SHORT_BYTES + 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Ranks:
    """Two ranks whose reductions happen one after the other in this thread: `other` says what the
    rank that is not here contributes."""

    def __init__(self) -> None:
        self.other: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def reduce_min(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.minimum(tensor, self.other(tensor)))


def _search(name: str = "weights", **facts: str) -> Search:
    return Search(name, lambda search: facts)


def _names(ended: list[Search]) -> list[str]:
    return [search.name for search in ended]


def test_what_is_short_is_known_at_once() -> None:
    searches = Searches(None)
    searches.begin(_search(weights="w"), size_bytes=SHORT_BYTES)
    (ended,) = searches.ended()
    assert ended.facts == {"weights": "w"}
    assert searches.ended() == []


def test_what_is_long_is_known_when_it_is_found() -> None:
    go, searches = threading.Event(), Searches(None)

    def find(search: Search) -> dict[str, str]:
        assert go.wait(60)
        return {"weights": "w"}

    search = Search("weights", find)
    searches.begin(search, size_bytes=LONG)
    assert searches.ended() == []
    go.set()
    assert search.done.wait(60)
    assert _names(searches.ended()) == ["weights"]


def test_a_rank_that_is_ready_waits_for_the_others() -> None:
    ranks = Ranks()
    searches = Searches(ranks.reduce_min)
    searches.begin(_search(weights="w"), size_bytes=0)
    ranks.other = torch.zeros_like
    assert searches.ended() == []
    ranks.other = lambda tensor: torch.full_like(tensor, 2)
    assert _names(searches.ended()) == ["weights"]


def test_what_one_rank_cannot_know_no_rank_knows() -> None:
    ranks = Ranks()
    searches = Searches(ranks.reduce_min)
    searches.begin(_search(weights="w"), size_bytes=0)
    ranks.other = torch.ones_like
    (ended,) = searches.ended()
    assert ended.facts is None


def test_ranks_reduce_only_while_something_is_looked_for() -> None:
    def never(tensor: torch.Tensor) -> None:
        raise AssertionError("nobody else reduces now")

    assert Searches(never).ended() == []


@pytest.mark.parametrize(
    "error", [ContentChanged("c"), OSError("o"), ValueError("v"), RuntimeError("a bug")]
)
def test_a_search_that_fails_ends_without_facts(error: Exception) -> None:
    def find(search: Search) -> dict[str, str]:
        raise error

    searches = Searches(None)
    searches.begin(Search("weights", find), size_bytes=0)
    (ended,) = searches.ended()
    assert ended.facts is None


def test_a_newer_search_takes_the_place_of_an_older_one() -> None:
    go, searches = threading.Event(), Searches(None)

    def slow(search: Search) -> dict[str, str]:
        assert search.stop.wait(60)
        go.set()
        raise ContentChanged("it was told to stop")

    searches.begin(Search("weights", slow), size_bytes=LONG)
    searches.begin(_search(weights="newer"), size_bytes=0)
    assert go.wait(60)
    (ended,) = searches.ended()
    assert ended.facts == {"weights": "newer"}


# ---- what is found ----


def _checkpoint(folder: Path, **tensors: float) -> Path:
    folder.mkdir(exist_ok=True)
    data = {name: torch.full((4,), value) for name, value in tensors.items()}
    save_file(data, folder / "model.safetensors")
    return folder


def _found(begun: tuple[Search, int]) -> dict[str, str] | None:
    search, size_bytes = begun
    assert size_bytes <= SHORT_BYTES
    search.run()
    return search.facts


def _files(folder: Path) -> Files:
    return look(folder.glob("*"))


def test_weights_that_were_updated_twice_from_one_folder_have_two_digests(tmp_path: Path) -> None:
    place, complete = tmp_path / "ckpt", frozenset({"a", "b"})
    digests = []
    for step in (1.0, 2.0):
        files = _files(_checkpoint(place, a=step, b=0.0))
        digests.append(_found(update_search(files, complete)))
    assert None not in digests
    assert digests[0] != digests[1]
    _checkpoint(place, a=1.0, b=0.0)
    assert _found(update_search(_files(place), complete)) == digests[0]


def test_weights_that_were_pushed_are_private(tmp_path: Path) -> None:
    one, other = (_found(update_search(None, frozenset({"a"}))) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one["weights"].startswith(PRIVATE)
    assert one != other


def test_an_update_from_a_part_of_the_tensors_has_no_digest(tmp_path: Path) -> None:
    files = _files(_checkpoint(tmp_path / "ckpt", a=1.0))
    assert _found(update_search(files, frozenset({"a", "b"}))) is None
    assert _found(update_search(files, None)) is None
    assert _found(update_search(files, frozenset({"a"}))) is not None


def test_an_adapter_is_its_content_and_its_settings(tmp_path: Path) -> None:
    files = _files(_checkpoint(tmp_path / "a", a=1.0))
    elsewhere = _files(_checkpoint(tmp_path / "b", a=1.0))
    changed = _files(_checkpoint(tmp_path / "c", a=2.0))
    found = [
        _found(adapter_search("id", each, settings))
        for each, settings in (
            (files, ""),
            (elsewhere, ""),
            (changed, ""),
            (files, "max_lora_rank=8"),
            (None, ""),
            (None, ""),
        )
    ]
    assert found[0] == found[1]
    assert len({str(each) for each in found}) == 5
    assert None not in found


def test_a_place_is_looked_at_without_errors(tmp_path: Path) -> None:
    assert ModelPlace(str(tmp_path / "none")).look() is None
    assert ModelPlace(str(tmp_path)).look() is None
    _checkpoint(tmp_path, a=1.0)
    assert ModelPlace(str(tmp_path)).look() == _files(tmp_path)


def test_a_model_in_another_cache_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--download-dir`: the default cache of Hugging Face may hold another revision."""
    pytest.importorskip("huggingface_hub")

    def snapshot(cache: Path, value: float) -> None:
        commit = "0" * 40
        repo = cache / "models--some--model"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        (repo / "snapshots").mkdir()
        _checkpoint(repo / "snapshots" / commit, a=value)

    snapshot(tmp_path / "here", 1.0)
    snapshot(tmp_path / "there", 2.0)
    found = [
        content.content_digest(ModelPlace("some/model", None, str(tmp_path / name)).weights())
        for name in ("here", "there")
    ]
    assert found[0] != found[1]


def test_a_model_of_modelscope_is_not_taken_for_one_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_cake.core.errors import ConfigError

    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    with pytest.raises(ConfigError, match="ModelScope"):
        ModelPlace("some/model").folder()
