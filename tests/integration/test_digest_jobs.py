"""All ranks receive a digest in the same step, or no rank does."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_cake.integration.identity import content
from sglang_cake.integration.identity.content import ContentChanged, Files, file_states
from sglang_cake.integration.identity.identity import (
    PRIVATE,
    SHORT_BYTES,
    DigestJob,
    DigestJobs,
    ModelSource,
    adapter_job,
    update_job,
)

LONG = SHORT_BYTES + 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Ranks:
    """Two ranks, one of which is simulated: `other` returns its tensor for each reduction."""

    def __init__(self) -> None:
        self.other: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def reduce_min(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.minimum(tensor, self.other(tensor)))


def _job(size_bytes: int = 0, **fields: str) -> DigestJob:
    return DigestJob("weights", lambda job: fields, size_bytes)


def test_digest_jobs_short_job_runs_at_once() -> None:
    jobs = DigestJobs(None)
    jobs.start(_job(SHORT_BYTES, weights="w"))
    (finished,) = jobs.take_finished()
    assert finished.fields == {"weights": "w"}
    assert jobs.take_finished() == []


def test_digest_jobs_long_job_runs_in_the_background() -> None:
    go = threading.Event()
    jobs = DigestJobs(None)

    def compute(job: DigestJob) -> dict[str, str]:
        assert go.wait(60)
        return {"weights": "w"}

    job = DigestJob("weights", compute, LONG)
    jobs.start(job)
    assert jobs.take_finished() == []
    go.set()
    jobs.wait()
    assert jobs.take_finished() == [job]


def test_searches_ready_rank_waits_for_the_others() -> None:
    ranks = Ranks()
    jobs = DigestJobs(ranks.reduce_min)
    job = _job(weights="w")
    jobs.start(job)
    ranks.other = torch.zeros_like
    assert jobs.take_finished() == []
    ranks.other = lambda tensor: torch.full_like(tensor, 2)
    assert jobs.take_finished() == [job]


def test_fields_that_one_rank_does_not_know_are_unknown_to_all() -> None:
    ranks = Ranks()
    jobs = DigestJobs(ranks.reduce_min)
    jobs.start(_job(weights="w"))
    ranks.other = torch.ones_like
    (finished,) = jobs.take_finished()
    assert finished.fields is None


class TwoRanks:
    """Each rank has a thread, and waits for the other one in a reduction."""

    def __init__(self) -> None:
        self._said: list[torch.Tensor] = [torch.empty(0)] * 2
        self._met = threading.Barrier(2, timeout=60)

    def reduce_min(self, rank: int) -> Callable[[torch.Tensor], None]:
        def reduce(tensor: torch.Tensor) -> None:
            self._said[rank] = tensor.clone()
            self._met.wait()
            tensor.copy_(torch.minimum(*self._said))
            self._met.wait()

        return reduce

    def finished(self, *fields: dict[str, str] | None) -> list[DigestJob]:
        """What each rank takes of a job that found these fields there."""

        def take(rank: int) -> DigestJob:
            jobs = DigestJobs(self.reduce_min(rank))
            jobs.start(DigestJob("weights", lambda job: fields[rank]))
            (job,) = jobs.take_finished()
            return job

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(take, range(2)))


@pytest.mark.parametrize(
    ("found", "known"),
    [
        (({"weights": "a"}, {"weights": "a"}), True),
        (({"weights": "a"}, {"weights": "b"}), False),
        (({"weights": "a"}, {"config": "a"}), False),
        (({"weights": "a"}, None), False),
        ((None, None), False),
    ],
)
def test_digest_jobs_ranks_know_the_same_fields_or_share_a_private_name(
    found: tuple[dict[str, str] | None, ...], known: bool
) -> None:
    ranks = TwoRanks()
    jobs = ranks.finished(*found)
    assert [job.fields for job in jobs] == ([found[0]] * 2 if known else [None, None])
    one, other = (job.private_name for job in jobs)
    assert one == other
    assert one not in [job.private_name for job in ranks.finished(*found)]


def test_ranks_reduce_only_while_a_job_is_unfinished() -> None:
    def never(tensor: torch.Tensor) -> None:
        raise AssertionError("no other rank reduces now")

    assert DigestJobs(never).take_finished() == []


@pytest.mark.parametrize(
    "error", [ContentChanged("c"), OSError("o"), ValueError("v"), RuntimeError("a bug")]
)
def test_digest_jobs_failed_job_is_done_without_fields(error: Exception) -> None:
    def compute(job: DigestJob) -> dict[str, str]:
        raise error

    jobs = DigestJobs(None)
    jobs.start(DigestJob("weights", compute))
    (finished,) = jobs.take_finished()
    assert finished.fields is None


def test_digest_jobs_newer_job_replaces_an_older_one() -> None:
    jobs = DigestJobs(None)

    def compute(job: DigestJob) -> dict[str, str]:
        assert job.cancelled.wait(60)
        return {"weights": "older"}

    older = DigestJob("weights", compute, LONG)
    jobs.start(older)
    jobs.start(_job(weights="newer"))
    assert older.done.wait(60)
    (finished,) = jobs.take_finished()
    assert finished.fields == {"weights": "newer"}


# ---- results ----


def _checkpoint(folder: Path, **tensors: float) -> Path:
    folder.mkdir(exist_ok=True)
    data = {name: torch.full((4,), value) for name, value in tensors.items()}
    save_file(data, folder / "model.safetensors")
    return folder


def _fields(job: DigestJob) -> dict[str, str] | None:
    assert job.size_bytes <= SHORT_BYTES
    job.run()
    return job.fields


def _files(folder: Path) -> Files:
    return file_states(folder.glob("*"))


def test_update_search_two_updates_from_one_folder_have_two_digests(tmp_path: Path) -> None:
    place, complete = tmp_path / "ckpt", frozenset({"a", "b"})
    digests = []
    for step in (1.0, 2.0):
        files = _files(_checkpoint(place, a=step, b=0.0))
        digests.append(_fields(update_job(files, complete)))
    assert None not in digests
    assert digests[0] != digests[1]
    _checkpoint(place, a=1.0, b=0.0)
    assert _fields(update_job(_files(place), complete)) == digests[0]


def test_update_search_pushed_weights_have_no_fields_and_different_names() -> None:
    names = set()
    for _ in range(2):
        jobs = DigestJobs(None)
        jobs.start(update_job(None, frozenset({"a"})))
        (finished,) = jobs.take_finished()
        assert finished.fields is None
        assert finished.private_name.startswith(PRIVATE)
        names.add(finished.private_name)
    assert len(names) == 2


def test_update_search_partial_tensors_have_no_facts(tmp_path: Path) -> None:
    files = _files(_checkpoint(tmp_path / "ckpt", a=1.0))
    assert _fields(update_job(files, frozenset({"a", "b"}))) is None
    assert _fields(update_job(files, None)) is None
    assert _fields(update_job(files, frozenset({"a"}))) is not None


def test_adapter_search_names_content_and_settings(tmp_path: Path) -> None:
    files = _files(_checkpoint(tmp_path / "a", a=1.0))
    elsewhere = _files(_checkpoint(tmp_path / "b", a=1.0))
    changed = _files(_checkpoint(tmp_path / "c", a=2.0))
    found = [
        _fields(adapter_job("id", each, settings))
        for each, settings in (
            (files, ""),
            (elsewhere, ""),
            (changed, ""),
            (files, "max_lora_rank=8"),
        )
    ]
    assert found[0] == found[1]
    assert len({str(each) for each in found}) == 3
    assert None not in found
    assert _fields(adapter_job("id", None, "")) is None


def test_weights_folder_source_without_weights_is_none(tmp_path: Path) -> None:
    assert ModelSource(str(tmp_path / "none")).weights_or_none() is None
    assert ModelSource(str(tmp_path)).weights_or_none() is None
    _checkpoint(tmp_path, a=1.0)
    assert ModelSource(str(tmp_path)).weights_or_none() == _files(tmp_path)


def test_weights_folder_model_in_the_download_folder_is_read_from_there(tmp_path: Path) -> None:
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
        content.content_digest(ModelSource("some/model", None, str(tmp_path / name)).weights())
        for name in ("here", "there")
    ]
    assert found[0] != found[1]


def test_model_place_modelscope_model_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_cake.core.errors import ConfigError

    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    with pytest.raises(ConfigError, match="ModelScope"):
        ModelSource("some/model").folder()
