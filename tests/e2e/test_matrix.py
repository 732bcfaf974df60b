"""Other kinds of servers: tensor parallel with pages of 64 in bfloat16, MLA on one rank and on
two, Engine in float16."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from live import (
    BLOCK,
    TOLERANCE,
    Answer,
    Live,
    PendingRequest,
    Start,
    assert_same,
    check_wrong_kv_is_noticed,
)
from polling import until
from warm import run_forked

from benchmarks.harness.deepseek import build_deepseek
from sglang_cake.codecs.frame import HEADER_BYTES
from sglang_cake.demo.models import build_llama

Make = Callable[[int], list[int]]
HALF_TOLERANCE = 0.12  # logits near 8 have steps of 0.03 in bfloat16; wrong KV changes tokens


def _check_exactness(live: Live, prompt: Make, tolerance: float) -> None:
    """Answers with and without stored KV agree. Control: with wrong KV they differ."""
    document = prompt(10 * BLOCK)
    cold = live.ask(document, 1)
    files = live.store.until_stored(document)
    warm = live.ask_flushed(document, 1)
    assert warm.loaded > 0
    assert_same(warm, cold, tolerance)
    tails = [document + prompt(n) for n in (1, 70, 300)]
    cold_tails = [live.ask_flushed(ids, 1, cache_salt="cold") for ids in tails]
    live.flush()
    asked = [
        PendingRequest(live, ids, new_tokens=1, rid=f"tail-{i}") for i, ids in enumerate(tails)
    ]
    for asking, reference in zip(asked, cold_tails, strict=True):
        assert_same(asking.answer(), reference, tolerance)
    truth = live.ask_flushed(document, cache_salt="cold")
    check_wrong_kv_is_noticed(files, lambda: live.ask_flushed(document), truth, tolerance)


@pytest.fixture(scope="module")
def parallel(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    flags = (
        *("--dtype", "bfloat16", "--max-total-tokens", "8192", "--page-size", "64", "--tp", "2"),
        *("--cake-mode", "load"),
    )
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with start(models["first"], flags, store=folder / "store-tp", env=env) as live:
        assert live.store is not None
        live.store.ranks = 2
        yield live


def test_tensor_parallel_bfloat16_pages_of_64_stored_answer_equals_cold(
    parallel: Live, prompt: Make
) -> None:
    _check_exactness(parallel, prompt, HALF_TOLERANCE)
    ranks = [json.loads(p.description.read_text())["tp_rank"] for p in parallel.store.namespaces()]
    assert sorted(ranks) == ["0", "1"]


def test_tensor_parallel_block_lost_on_one_rank_is_computed_on_both(
    parallel: Live, prompt: Make
) -> None:
    document = prompt(12 * BLOCK)
    cold = parallel.ask(document, 1)
    files = parallel.store.until_stored(document)
    spoiled = files[10]  # of the first rank only
    raw = bytearray(spoiled.read_bytes())
    raw[9000] ^= 1
    spoiled.write_bytes(raw)
    parallel.store.remove(files[7])
    warm = parallel.ask_flushed(document, 1)
    assert_same(warm, cold, HALF_TOLERANCE)
    assert 0 < warm.loaded <= 10 * BLOCK
    assert parallel.store.set_aside(spoiled)


def test_tensor_parallel_aborts_at_four_stages_leave_a_clean_log(
    parallel: Live, prompt: Make
) -> None:
    document = prompt(20 * BLOCK)
    parallel.ask_and_store(document)
    for event in ("arrive", "fetch", "claim", "attach"):
        parallel.flush()
        asking = PendingRequest(parallel, document, new_tokens=8, rid=f"tp-{event}")
        asking.until(event)
        parallel.post("/abort_request", rid=asking.rid)
        asking.answer()
    parallel.flush()
    parallel.check_log()


@pytest.fixture(scope="module")
def latent_model(folder: Path) -> Path:
    """A tiny dense DeepSeek-V2. Its KV is one latent row per layer."""
    path = folder / "latent" / "model"
    return build_deepseek(path, hidden=256, layers=3, heads=4, latent=64)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `cake_test_digests` writes."""
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="module")
def start_latent(
    start: Start, latent_model: Path, folder: Path, standins: dict[str, str], digests: Path
) -> Callable[..., AbstractContextManager[Live]]:
    """Starts servers of that model, which share a store."""
    flags = ("--dtype", "float32", "--max-total-tokens", "8192", "--cake-mode", "load")

    def start_latent(ranks: int = 1) -> AbstractContextManager[Live]:
        if ranks > 1 and (os.cpu_count() or 1) < 2:
            pytest.skip("two ranks need two cores")
        cores = "|".join(str(rank % 2) for rank in range(ranks))
        return start(
            latent_model,
            (*flags, "--tp", str(ranks)),
            store=folder / "store-mla",
            bandwidth="600kB/s",  # a latent row is small: a part is loaded, a part computed
            env=standins
            | {"CAKE_TEST_DIGESTS": str(digests)}
            | ({"SGLANG_CPU_OMP_THREADS_BIND": cores} if ranks > 1 else {}),
        )

    return start_latent


@pytest.fixture(scope="module")
def latent(start_latent: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    with start_latent() as live:
        yield live


@pytest.fixture(scope="module")
def latent_ranks(start_latent: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    with start_latent(2) as live:
        yield live


@pytest.fixture
def small_prompt(prompt: Make) -> Make:
    """Prompts of the tokens of that model."""
    return lambda n: [t % 512 for t in prompt(n)]


def test_mla_model_stored_answer_equals_cold(latent: Live, small_prompt: Make) -> None:
    _check_exactness(latent, small_prompt, TOLERANCE)
    layout = json.loads(json.loads(latent.store.namespaces()[0].description.read_text())["layout"])
    assert [name for name, _ in layout["parts"]] == ["kv"]


def test_mla_ranks_store_one_copy_that_a_server_with_one_rank_loads(
    latent: Live, latent_ranks: Live, small_prompt: Make
) -> None:
    store = latent_ranks.store
    assert store is not None
    before = set(store.blocks())
    document = small_prompt(10 * BLOCK)
    cold = latent_ranks.ask(document, 1)
    files = store.until_stored(document)
    assert len(files) == 10
    assert set(store.blocks()) - before == set(files)
    for live in (latent_ranks, latent):
        warm = live.ask_flushed(document, 1)
        assert warm.loaded > 0
        assert_same(warm, cold)
        assert_same(live.ask_flushed(document, 1, cache_salt="computed here"), cold)
    truth = latent_ranks.ask(document, cache_salt="computed here")
    check_wrong_kv_is_noticed(files, lambda: latent_ranks.ask_flushed(document), truth)


def test_mla_ranks_compute_the_same_bits(
    latent_ranks: Live, small_prompt: Make, digests: Path
) -> None:
    rid = "same-bits"
    latent_ranks.ask(small_prompt(10 * BLOCK), 8, rid=rid)

    def computed(rank: int) -> list[str]:
        return [x for x in (digests / str(rank)).read_text().splitlines() if x.startswith(rid)]

    until(lambda: len(computed(0)) == len(computed(1)), "both ranks have ended the request")
    assert computed(0) == computed(1)
    _, tokens, digest = zip(*map(str.split, computed(0)), strict=True)
    assert len(set(digest)) == len(set(tokens)) > 2


def test_mla_kv_of_two_ranks_differs_from_one_ranks_as_other_chunks_do(
    latent: Live, latent_ranks: Live, small_prompt: Make
) -> None:
    document = small_prompt(10 * BLOCK)
    latent.ask(document[:150], 1, cache_salt="other chunks")  # they begin at token 150
    kv = {
        name: np.stack([_numbers(file) for file in live.ask_and_store(document, cache_salt=name)])
        for name, live in (("one", latent), ("other chunks", latent), ("two", latent_ranks))
    }
    noise = np.abs(kv["other chunks"] - kv["one"]).max()
    assert 0 < np.abs(kv["two"] - kv["one"]).max() <= 10 * noise
    assert np.abs(np.roll(kv["one"], 1, axis=0) - kv["one"]).max() > 1000 * noise  # wrong KV


def _numbers(file: Path) -> np.ndarray:
    return np.frombuffer(file.read_bytes()[HEADER_BYTES:], np.float32)


ENGINE = """
import json, random, sys, time
from pathlib import Path

import sglang as sgl
from live import StoreView, falsify

def main():
    model, store = sys.argv[1:3]
    engine = sgl.Engine(
        model_path=model, device="cpu", attention_backend="torch_native", dtype="float16",
        cuda_graph_backend_decode="disabled", mem_fraction_static=0.5, max_total_tokens=4096,
        chunked_prefill_size=256, log_level="warning",
        enable_cake=True, cake_store=f"file://{store}?min_free=0&bandwidth=5MB/s",
        cake_block_tokens=64, cake_min_load_tokens=64, cake_mode="load",
    )
    ids = random.Random(1).choices(range(250), k=900)
    ask = lambda: engine.generate(
        input_ids=ids, return_logprob=True,
        sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    )
    answers = [ask()]
    end = time.monotonic() + 60
    while time.monotonic() < end:
        engine.flush_cache()
        answers.append(ask())
        if answers[-1]["meta_info"]["cake"]["loaded_tokens"]:
            break
    for file in StoreView(Path(store)).blocks():  # the control
        falsify(file)
    engine.flush_cache()
    answers.append(ask())
    engine.shutdown()
    print("ANSWERS " + json.dumps(answers))

if __name__ == "__main__":
    main()
"""


def test_engine_in_process_float16_stored_answer_equals_cold(folder: Path, tmp_path: Path) -> None:
    # The model is smaller since half precision is slow on a CPU.
    model = build_llama(folder / "half" / "model", hidden=128, layers=2, heads=4, kv_heads=2)
    program = tmp_path / "program.py"
    program.write_text(ENGINE)
    here = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = run_forked(
        [sys.executable, str(program), str(model), str(tmp_path / "store")],
        os.environ | {"SGLANG_USE_CPU_ENGINE": "1"} | here,
        tmp_path,
        timeout_s=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-4000:]
    cold, *_, warm, lie = map(Answer.of, json.loads(lines[0].removeprefix("ANSWERS ")))
    assert warm.loaded > 0
    assert_same(warm, cold, HALF_TOLERANCE)
    assert lie.loaded > 0
    with pytest.raises(AssertionError):
        assert_same(lie, cold, HALF_TOLERANCE)
