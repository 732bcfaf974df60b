"""`sglang-cake store bench`: that it measures, cleans up, and what it says about a model."""

import json
import math

import pytest
from filestore import waiting_for_the_index
from storetools import ALICE, fill, held, store, told, url_of
from system_calls import reads_of_this_process

from sglang_cake.cli.store_bench import lines_of, speed_of_model
from sglang_cake.cli.text_tables import (
    count_text,
    exact_size_text,
    printable,
    size_text,
    table,
    time_text,
)
from sglang_cake.simulator.shapes import MODELS, find_shape

SMALL = ["--sizes", "8KiB,64KiB", "--depths", "1,3", "--bytes", "64KiB"]
LLAMA_8B = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def test_store_bench_measures_every_size_and_depth_and_leaves_no_file(tmp_path, capsys):
    fill(tmp_path, ALICE, "a")
    before = sorted(tmp_path.rglob("*"))
    answer = told(capsys, "bench", url_of(tmp_path), *SMALL)
    runs = {(run["block_bytes"], run["depth"]): run for run in answer["runs"]}
    assert runs.keys() == {(8192, 1), (8192, 3), (65536, 1), (65536, 3)}
    assert runs[8192, 1]["blocks"] == 8
    assert runs[65536, 3]["blocks"] == 6, "two for each call at once, at least"
    for run in runs.values():
        for what in ("write", "read"):
            assert run[f"{what}_bytes_per_s"] > 0
            assert 0 < run[f"{what}_p50_s"] <= run[f"{what}_p99_s"]
    assert answer["model"] is None
    assert sorted(tmp_path.rglob("*")) == before
    assert len(held(tmp_path, ALICE)) == 1


def test_store_bench_with_a_model_reports_tokens_per_second(tmp_path, capsys):
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(LLAMA_8B))
    kv_bytes = 2 * 2 * 2 * 8 * 2  # layers, K and V, heads, head dim, bytes
    (tmp_path / "kv").mkdir()
    arguments = ["bench", url_of(tmp_path / "kv"), *SMALL, "--prefill-tokens-per-s", "1000"]
    for model in (["--model-config", config], ["--kv-bytes-per-token", kv_bytes]):
        found = told(capsys, *arguments, *model)["model"]
        assert found["kv_bytes_per_token"] == kv_bytes
        assert found["break_even_bytes_per_s"] == 1000 * kv_bytes
        assert found["loaded_tokens_per_s"] == found["read_bytes_per_s"] / kv_bytes
    assert store(*arguments, "--model-config", config.parent) == 0
    out = capsys.readouterr().out
    assert "a block of 128 tokens 16 KiB" in out
    assert "16 KiB" in out.splitlines()[3], "the block of this model is measured, too"
    assert "loading alone breaks even at 128 kB/s" in out


@pytest.mark.parametrize("name", ["gpt-oss-120b", "kimi-linear-48b", "deepseek-v3.2"])
def test_store_bench_counts_the_kv_of_a_token_as_plan_does(tmp_path, capsys, name):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    (tmp_path / "kv").mkdir()
    model = ["--model-config", tmp_path, "--block-tokens", "1"]
    found = told(capsys, "bench", url_of(tmp_path / "kv"), *SMALL, *model)["model"]
    assert found["kv_bytes_per_token"] == find_shape(name).stored_bytes(1)


def test_store_bench_model_that_is_not_modelled_is_one_error_line(tmp_path, capsys):
    config = {**LLAMA_8B, "layer_types": ["conv", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "kv").mkdir()
    assert store("bench", url_of(tmp_path / "kv"), "--model-config", tmp_path) == 2
    assert "are not modelled: give --kv-bytes-per-token" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", '{"hidden_size": 1}'], ids=range(4))
def test_store_bench_file_that_describes_no_model_is_one_error_line(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "kv").mkdir()
    assert store("bench", url_of(tmp_path / "kv"), "--model-config", tmp_path) == 2
    captured = capsys.readouterr()
    assert "describes no model" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_store_bench_reads_from_the_page_cache_print_a_warning(tmp_path, capsys, monkeypatch):
    reads_of_this_process(monkeypatch, lambda: 7)
    assert store("bench", url_of(tmp_path), *SMALL) == 0
    assert "warning: blocks were read from the page cache" in capsys.readouterr().out
    counted = iter(range(0, 10**12, 10**9))
    reads_of_this_process(monkeypatch, lambda: next(counted))
    assert store("bench", url_of(tmp_path), *SMALL) == 0
    assert "warning" not in capsys.readouterr().out
    reads_of_this_process(monkeypatch, lambda: None)
    assert told(capsys, "bench", url_of(tmp_path), *SMALL)["runs"][0]["from_cache"] is None


def test_store_bench_without_free_space_fails_and_leaves_no_file(tmp_path, capsys):
    assert store("bench", f"file://{tmp_path}?min_free=999PB", *SMALL) == 2
    assert "no room to measure" in capsys.readouterr().err
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert [name for name in files if not name.startswith("index.")] == []


def test_store_bench_of_a_store_that_does_not_know_how_full_it_is_is_one_error_line(
    tmp_path, capsys
):
    (tmp_path / "index.lock").touch()
    (tmp_path / "index.db").mkdir()
    with waiting_for_the_index(0.0):
        assert store("bench", f"{url_of(tmp_path)}&capacity=1GB", *SMALL) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not know yet how full it is" in line


def test_store_bench_of_a_nearly_full_store_evicts_only_with_evict(tmp_path, capsys):
    url, names = (
        f"{url_of(tmp_path)}&capacity=17MB&policy=lru",
        [str(number) for number in range(200)],
    )
    fill(tmp_path, ALICE, *names)
    large = ["bench", url, "--sizes", "64KiB,1MiB", "--depths", "5", "--bytes", "1MiB"]
    assert store(*large) == 2
    captured = capsys.readouterr()
    assert "more would evict blocks of the store" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert len(held(tmp_path, ALICE)) == 200
    (run,) = told(capsys, "bench", url, "--sizes", "64KiB", "--depths", "1")["runs"]
    assert 2 <= run["blocks"] < 17_000_000 / 65536, "256 MiB have no room"
    assert len(held(tmp_path, ALICE)) == 200
    assert store(*large, "--evict") == 0
    assert len(held(tmp_path, ALICE)) < 200


def test_store_bench_blocks_that_are_evicted_meanwhile_end_it_with_one_line(tmp_path, capsys):
    url = f"{url_of(tmp_path)}&capacity=17MB&policy=lru"
    large = ["--sizes", "1MiB", "--depths", "8", "--bytes", "1MiB"]
    assert store("bench", url, *large) == 2
    assert "are needed\n" in capsys.readouterr().err
    assert store("bench", url, *large, "--evict") == 2
    assert "was evicted before it was read" in capsys.readouterr().err


def test_store_bench_of_a_store_above_its_capacity_evicts_nothing(tmp_path, capsys):
    fill(tmp_path, ALICE, *[str(number) for number in range(1500)])
    for path in tmp_path.glob("index*"):
        path.unlink()  # what is used is not known then
    assert store("bench", f"{url_of(tmp_path)}&capacity=17MB", *SMALL) == 2
    assert "0 B are free" in capsys.readouterr().err
    assert len(held(tmp_path, ALICE)) == 1500


def test_store_bench_bandwidth_option_limits_the_read_speed(tmp_path, capsys):
    run, *_ = told(
        capsys, "bench", f"file://{tmp_path}?min_free=0&bandwidth=1MB/s",
        "--sizes", "64KiB", "--depths", "2", "--bytes", "4KiB",
    )["runs"]  # fmt: skip
    assert run["read_bytes_per_s"] < 1.01e6


def test_store_meaning_speeds_of_computing_and_loading_add_up():
    found = speed_of_model(
        kv_bytes_per_token=1000,
        block_tokens=128,
        read_bytes_per_s=6e6,
        prefill_tokens_per_s=2000.0,
    )
    assert found["loaded_tokens_per_s"] == 6000
    assert found["load_speedup"] == 3
    assert found["both_speedup"] == 4
    assert found["break_even_bytes_per_s"] == 2e6
    words = "\n".join(lines_of(found))
    assert "loads at best 6,000 tokens/s (6.0 MB/s)" in words
    assert "loading alone is 3.00 times as fast, both at once up to 4.00 times" in words


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"),
        (999_600, "1.0 MB"),
        (1.5e9, "1.5 GB"),
        (2e18, "2000 PB"),
    ],
)
def test_size_text_of_any_size_has_a_readable_unit(size_bytes, text):
    assert size_text(size_bytes) == text


def test_text_tables_columns_are_aligned_and_values_formatted():
    assert table(["A", "BB"], [["xxx", "1"]], right=(1,)) == "A    BB\nxxx   1"
    assert exact_size_text(16 * 2**20) == "16 MiB"
    assert exact_size_text(3 * 2**29) == "1536 MiB"
    assert exact_size_text(1000) == "1.0 kB"
    assert count_text(None) == time_text(None) == "-"
    assert count_text(1234567) == "1,234,567"
    assert printable("a\nb\x00c" + "d" * 80, 10) == "a?b?cdd..."


@pytest.mark.parametrize("at_s", [1e12, -1e12, 1e20, math.inf, math.nan])
def test_time_text_of_a_time_that_no_calendar_has_is_a_dash(at_s):
    """Any program may set the times of a file, and tmpfs keeps all of them."""
    assert time_text(at_s) == "-"
