"""Keys depend on the weights that a server computes with, however they were loaded.

Answers are compared with those of a server without cake that has the same weights. Every test has a
control: weights differ enough that wrong KV would show.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import BLOCK, VOCAB, Answer, Live, Start, assert_same
from polling import until

from sglang_cake.demo.models import build_llama

FLAGS = (*("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", "load"),)
LORA = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8"),
    *("--lora-target-modules", "o_proj"),
)


def _ids(seed: int, blocks: int = 8) -> list[int]:
    return [(seed * 6151 + i * i * 29 + i * 13) % VOCAB for i in range(blocks * BLOCK + 1)]


@pytest.fixture(scope="module")
def third_model(folder: Path) -> Path:
    return build_llama(
        folder / "third" / "model",
        hidden=256,
        layers=4,
        heads=8,
        kv_heads=2,
        vocab=VOCAB,
        seed=7,
    )


@contextlib.contextmanager
def _with_weights(plain: Live, model: Path, before: Path) -> Iterator[Live]:
    """The reference server, with other weights inside the context."""
    plain.update_weights(model)
    try:
        yield plain
    finally:
        plain.update_weights(before)


def _put(source: Path, target: Path) -> None:
    """Copy the files of `source` over those of `target`, as a trainer does."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, target / file.name)


def _stored(live: Live, ids: list[int], **extra: str) -> Answer:
    """Ask with an empty tree until KV comes from the store."""
    return until(
        lambda: answer if (answer := live.ask_flushed(ids, **extra)).loaded else None,
        "blocks in the store",
    )


def _same(one: Answer, other: Answer) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


# ---- one server, whose weights change ----


@pytest.fixture(scope="module")
def trained(
    start: Start, models: dict[str, Path], folder: Path, standins: dict[str, str]
) -> Iterator[Live]:
    """A server that loads new weights and adapters while it runs."""
    model = folder / "trained" / "model"
    model.parent.mkdir()
    _put(models["first"], model)
    store = folder / "store-weights"
    with start(model, (*FLAGS, *LORA), store=store, env=standins) as live:
        yield live


def test_weight_update_twice_from_one_folder_never_loads_the_first_kv(
    trained: Live, plain: Live, models: dict[str, Path], third_model: Path, folder: Path
) -> None:
    ids, checkpoint = _ids(1), folder / "trained" / "checkpoint"
    _put(models["second"], checkpoint)
    trained.update_weights(checkpoint)
    _stored(trained, ids)
    _put(third_model, checkpoint)
    trained.update_weights(checkpoint)
    answer = trained.ask(ids)
    assert answer.loaded == 0
    with _with_weights(plain, third_model, models["first"]) as reference:
        assert_same(answer, reference.ask(ids))
        assert not _same(answer, plain.ask(_ids(2)))
    _put(models["second"], checkpoint)
    trained.update_weights(checkpoint)
    again = trained.ask(ids)  # blocks of the second model are found again
    assert again.loaded > 0
    assert not _same(again, answer)


def test_weight_update_from_a_partial_folder_loads_no_earlier_blocks(
    trained: Live, models: dict[str, Path], third_model: Path, folder: Path
) -> None:
    """The other tensors keep their values, so the folder does not tell the content of the model."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    part = folder / "trained" / "part"
    part.mkdir()
    shutil.copy(third_model / "config.json", part)
    with safe_open(third_model / "model.safetensors", "pt") as file:
        name = next(name for name in sorted(file.keys()) if "layers.0" in name)
        save_file({name: file.get_tensor(name)}, part / "model.safetensors")
    ids = _ids(3)
    answers = []
    for base in ("first", "second"):
        trained.update_weights(models[base])
        trained.update_weights(part)
        answers.append(trained.ask(ids))
        trained.flush()
    assert answers[1].loaded == 0
    assert not _same(*answers)
    trained.update_weights(models["first"])


def test_weight_update_failed_loads_nothing_until_the_next_update(
    trained: Live, plain: Live, models: dict[str, Path], folder: Path
) -> None:
    trained.update_weights(models["first"])
    ids = _ids(4)
    _stored(trained, ids)
    empty = folder / "trained" / "empty"
    empty.mkdir()
    reply = trained.post("/update_weights_from_disk", model_path=str(empty))
    assert not reply.json()["success"]
    trained.flush()
    assert trained.ask(ids).loaded == 0  # the weights are unknown now
    trained.update_weights(models["first"])
    answer = trained.ask(ids)
    assert answer.loaded > 0
    assert_same(answer, plain.reference(ids))


def _load_adapter(live: Live, path: Path) -> None:
    live.post("/unload_lora_adapter", lora_name="x")
    reply = live.post("/load_lora_adapter", lora_name="x", lora_path=str(path))
    assert reply.json()["success"], reply.text


def test_adapter_replaced_under_its_path_never_loads_the_old_kv(
    trained: Live, plain: Live, models: dict[str, Path], adapters: dict[str, Path], folder: Path
) -> None:
    trained.update_weights(models["first"])
    ids, path = _ids(5), folder / "trained" / "adapter"
    _put(adapters["a"], path)
    _load_adapter(trained, path)
    first = trained.ask(ids, lora_path="x")
    assert_same(first, plain.reference(ids, lora_path="a"))
    again = _stored(trained, ids, lora_path="x")
    assert_same(again, first)
    _put(adapters["a2"], path)
    _load_adapter(trained, path)
    answer = trained.ask_flushed(ids, lora_path="x")
    assert answer.loaded == 0
    assert_same(answer, plain.reference(ids, lora_path="a2"))
    assert not _same(answer, first)


def test_adapter_overwritten_after_loading_is_keyed_by_the_loaded_weights(
    trained: Live, plain: Live, models: dict[str, Path], adapters: dict[str, Path], folder: Path
) -> None:
    trained.update_weights(models["first"])
    ids, path = _ids(6), folder / "trained" / "overwritten"
    _put(adapters["a"], path)
    _load_adapter(trained, path)
    _put(adapters["b"], path)  # before the first request with the adapter
    first = trained.ask(ids, lora_path="x")
    assert_same(first, plain.reference(ids, lora_path="a"))
    _stored(trained, ids, lora_path="x")
    _load_adapter(trained, path)
    answer = trained.ask_flushed(ids, lora_path="x")
    assert answer.loaded == 0
    assert_same(answer, plain.reference(ids, lora_path="b"))


def test_adapter_files_removed_after_loading_requests_are_answered(
    trained: Live, plain: Live, models: dict[str, Path], adapters: dict[str, Path], folder: Path
) -> None:
    trained.update_weights(models["first"])
    ids, path = _ids(7), folder / "trained" / "vanished"
    _put(adapters["b"], path)
    _load_adapter(trained, path)
    shutil.rmtree(path)
    assert_same(trained.ask(ids, lora_path="x"), plain.reference(ids, lora_path="b"))
    assert_same(trained.ask(ids), plain.reference(ids))


# ---- servers that share a store ----


@pytest.fixture(scope="module")
def moved(
    start: Start, models: dict[str, Path], folder: Path, trained: Live, standins: dict[str, str]
) -> Iterator[Live]:
    """The first model on another machine: other folder, name, times and context length."""
    model = folder / "elsewhere" / "another-name"
    model.parent.mkdir()
    _put(models["first"], model)
    for file in model.iterdir():
        os.utime(file, (1, 1))
    flags = (*FLAGS, "--context-length", "4096", "--load-format", "safetensors")
    with start(model, flags, store=folder / "store-weights", env=standins) as live:
        yield live


def test_weights_equal_in_another_folder_load_the_same_blocks(
    trained: Live, moved: Live, plain: Live, models: dict[str, Path]
) -> None:
    ids = _ids(8)
    trained.update_weights(models["first"], load_format="safetensors")
    _stored(trained, ids)
    answer = moved.ask(ids)
    assert answer.loaded > 0
    assert_same(answer, plain.reference(ids))


def test_dummy_weights_share_no_blocks_with_the_model_in_their_folder(
    start: Start,
    moved: Live,
    plain: Live,
    models: dict[str, Path],
    folder: Path,
    standins: dict[str, str],
) -> None:
    ids = _ids(9)
    flags = (*FLAGS, "--load-format", "dummy")
    with start(models["first"], flags, store=folder / "store-weights", env=standins) as dummy:
        _stored(dummy, ids)  # its own process finds them
    answer = moved.ask(ids)
    assert answer.loaded == 0
    assert_same(answer, plain.reference(ids))


def test_released_kv_memory_keeps_the_blocks_that_were_being_stored(
    trained: Live, moved: Live, plain: Live, models: dict[str, Path]
) -> None:
    ids = _ids(12)
    trained.update_weights(models["first"], load_format="safetensors")
    trained.ask(ids)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        reply = trained.post(path, tags=["kv_cache"])
        assert reply.status_code == 200, reply.text
    _stored(trained, ids)
    answer = moved.ask(ids)
    assert answer.loaded > 0
    assert_same(answer, plain.reference(ids))


def test_weights_checker_that_resets_tensors_shares_no_blocks_with_the_model(
    trained: Live, moved: Live, plain: Live, models: dict[str, Path]
) -> None:
    """The last test with this server: its weights stay random."""
    ids = _ids(13)
    trained.update_weights(models["first"], load_format="safetensors")
    reply = trained.post("/weights_checker", action="reset_tensors")
    assert reply.status_code == 200, reply.text
    wrong = _stored(trained, ids)  # its own process finds them
    answer = moved.ask(ids)
    assert answer.loaded == 0
    assert_same(answer, plain.reference(ids))
    assert not _same(answer, wrong)


# ---- a store that fails during an update ----


def test_weight_update_on_a_full_disk_keeps_the_server_answering(
    start: Start, models: dict[str, Path], plain: Live, folder: Path
) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        ids = _ids(10)
        with start(models["first"], FLAGS, store=disk / "kv") as live:
            live.ask_and_store(ids)
            with (disk / "filler").open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * (1 << 16))
            live.update_weights(models["second"])
            with _with_weights(plain, models["second"], models["first"]) as reference:
                assert_same(live.ask(ids), reference.ask(ids))
            (disk / "filler").unlink()
            live.update_weights(models["first"])

            def loaded() -> Answer | None:
                answer = live.ask_flushed(ids)
                assert_same(answer, plain.reference(ids))
                return answer if answer.loaded else None

            # A disk without any room costs the store some blocks, here all of them, and writing
            # pauses.
            until(loaded, "the prompt is stored again")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_weight_update_without_the_store_folder_keeps_the_server_answering(
    moved: Live, models: dict[str, Path], plain: Live, folder: Path
) -> None:
    """The last test with these servers."""
    root, ids = moved.store.root, _ids(11)
    _stored(moved, ids)
    root.rename(folder / "store-gone")
    root.write_text("in its place")
    moved.update_weights(models["second"])
    with _with_weights(plain, models["second"], models["first"]) as reference:
        assert_same(moved.ask(ids), reference.ask(ids))
    moved.update_weights(models["first"])
    assert_same(moved.ask(ids), plain.reference(ids))
