"""The pure parts of the benchmarks, and that each of them explains itself; no server is started."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    __main__,
    bench_burst,
    bench_end_states,
    bench_file_store,
    bench_fleet,
    bench_head_slices,
    bench_http_store,
    bench_load_rate,
    bench_memory_tier,
    bench_overhead,
    bench_real_grid,
    bench_runahead,
    bench_serving,
    bench_ttft,
    bench_virtual_gpu,
    facts,
    file_arms,
    overhead_report,
    scheduler_cost,
    servers,
    stats,
    ttft_report,
)
from sglang_cake.cli.demo import ProgressLog
from sglang_cake.core.codec_names import CODECS
from sglang_cake.demo.sglang_server import Reply
from sglang_cake.loading.cost_model import work_of
from sglang_cake.testing import virtual_gpu

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", __main__.benches())
def test_benchmark_help_exits_0_with_usage(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])  # a benchmark finds its own arguments there
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_benchmarks_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    assert __main__.main(["no-such-thing"]) == 2
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in __main__.benches())
    assert "  ttft " in out


def test_benchmark_copy_calls_of_a_block_are_one_copy_and_one_launch(tmp_path: Path) -> None:
    """In a process of its own: Triton compiles for a GPU there."""
    out = tmp_path / "calls.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "copy_calls", "--small", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=True,
    )
    ((_, cell),) = json.loads(out.read_text())["cells"].items()
    loaded, saved, step = (found["calls"] for found in cell.values())
    assert loaded["copies to or from the host"] == loaded["launches of a kernel"] == 1
    assert saved["copies to or from the host"] == 1
    assert saved["launches of a kernel"] < 1  # several blocks take one
    assert "launches of a kernel" not in step


def test_benchmark_copy_calls_recorded_take_at_most_60_us_of_a_thread_for_a_block() -> None:
    """Measured with a stub in place of the driver."""
    cells = json.loads((facts.RESULTS / "copy-calls.json").read_text())["cells"]
    medians_us = [found["median_us"] for cell in cells.values() for found in cell.values()]
    assert len(medians_us) == 9
    assert max(medians_us) <= 60


@pytest.mark.parametrize("gpu", ["h100-80gb-hbm3", "h200"])
def test_report_gpu_decoding_is_that_of_the_newest_results(gpu: str) -> None:
    outcomes = json.loads((facts.RESULTS / f"gpu-nvidia-{gpu}.json").read_text())["outcomes"]
    (step,) = (each for each in outcomes if each["step"] == "decoding")
    found = {each["what"]: each["value"] for each in step["findings"]}
    rates = [f"{found[f'{codec}, on the device']:.0f}" for codec in ("int8", "kvquant3")]
    host = [f"{found[f'{c}, host time of a block'] / 1e3:.2f}" for c in ("int8", "kvquant3")]
    sentence = (
        f"decodes int8 at {rates[0]} GB/s and kvquant3 at {rates[1]} GB/s, "
        f"and its host takes {host[0]} and {host[1]} ms for a block"
    )
    name = gpu.partition("-")[0].upper()
    report = (facts.REPORTS / "gpu.md").read_text()
    assert f"[An {name}](../results/gpu-nvidia-{gpu}.json) {sentence}." in report


def test_benchmark_number_lists_are_parsed_or_refused() -> None:
    assert stats.numbers("0.5,1, 2") == [0.5, 1.0, 2.0]
    assert stats.whole_numbers("256,512") == [256, 512]
    for wrong in ("", "0", "-1", "a", "nan", "inf"):
        with pytest.raises(ValueError, match=r"list|convert"):
            stats.numbers(wrong)
    with pytest.raises(ValueError, match="whole"):
        stats.whole_numbers("1.5")


def test_sigma_is_one_without_curvature() -> None:
    compute_s, load_s = 3.0, 6.0
    assert stats.sigma(compute_s * load_s / (compute_s + load_s), load_s, compute_s) == (
        pytest.approx(1.0)
    )


def test_paired_ratio_is_of_pairs_and_not_of_medians() -> None:
    # A machine that is three times slower in the second round: the pairs still agree.
    rounds = [[(1.01, 1.0), (2.02, 2.0)], [(3.03, 3.0), (6.06, 6.0)]]
    found = stats.paired_ratio(rounds)
    assert found == {"ratio": 1.01, "low": 1.01, "high": 1.01, "pairs": 4}
    with pytest.raises(ValueError, match="no pairs"):
        stats.paired_ratio([[]])


def test_paired_ratio_interval_holds_the_ratio() -> None:
    rounds = [[(1 + 0.1 * (i % 5), 1.0) for i in range(r, r + 7)] for r in range(4)]
    found = stats.paired_ratio(rounds)
    assert found["low"] <= found["ratio"] <= found["high"]
    assert found["low"] < found["high"]
    assert found == stats.paired_ratio(rounds)  # the same seed, the same interval


def test_benchmark_header_names_the_machine_and_no_host() -> None:
    text = json.dumps(facts.header("x", repeats=3))
    header = json.loads(text)
    assert header["machine"]["what"].endswith("no GPU")
    assert header["versions"]["torch"]
    assert header["settings"] == {"repeats": 3}
    assert str(ROOT) not in text
    import socket

    assert f'"{socket.gethostname()}"' not in text


def test_benchmark_result_write_leaves_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    facts.write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


# ---- time to first token ----


def test_ttft_report_beaten_by_names_the_faster_rivals() -> None:
    rivals = {"compute": 1.0, "load": 0.99, "hicache-timeout": 0.5}
    assert ttft_report.beaten_by(1.015, rivals) == ["load", "hicache-timeout"]
    assert ttft_report.beaten_by(0.5, rivals) == []


def _cell(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": 2049,
        "chunk_tokens": 512,
        "bandwidth_ratio": 0.5,
        "bandwidth_bytes_per_s": 5e6,
        "link_limit_s": 8.4,
        "ttft_s": {"compute": 4.0, "load": 8.5, "both": 3.0},
        "ideal_s": 2.8,
        "over_ideal": 1.071,
        "sigma": 1.1,
        "sigma_ideal": 1.03,
        "same_tokens": True,
        "peers": {"hicache-timeout": {"ttft_s": {"median": 2.5, "min": 2.5, "max": 2.5}}},
        "beaten_by": ["hicache-timeout"],
        **changes,
    }


def test_ttft_report_table_marks_beaten_and_different_cells() -> None:
    lines = ttft_report.table([_cell(), _cell(peers={}, beaten_by=[], same_tokens=False)])
    assert "2.50!" in lines
    assert "beaten in 1 of them" in lines
    assert "DIFFERENT in 1 cells" in lines
    rows = [line for line in lines.splitlines() if line.startswith("  2,049")]
    assert len(rows) == 2
    assert rows[1].endswith("- ")
    assert ttft_report.table([])  # nothing measured yet is no error


# ---- the grid, serving, the fleet ----


def _grid_cell(auto: float, again: float = 2.0) -> dict[str, Any]:
    runs_s = {"compute": [2.0, 2.1, 1.9], "load": [4.0], "auto": [auto], "again": [again]}
    labels = {"prompt_tokens": 1025, "chunk_tokens": 256, "bandwidth_ratio": 0.5}
    labels |= {"link_limit_s": 3.9, "same_tokens": True, "read_bytes": 1000, "wasted_bytes": 5}
    return bench_real_grid.cell(runs_s, ideal_s=1.25, labels=labels)


def test_bench_real_grid_summary_judges_its_goals() -> None:
    good = [_grid_cell(1.3), _grid_cell(1.34, again=2.06)]
    found = bench_real_grid.summary(good)
    assert all(found["goals"].values())
    assert found["over_ideal"]["max"] == pytest.approx(1.072)
    assert found["noise"] == pytest.approx(0.03)
    assert found["wasted_share"] == pytest.approx(0.005)
    bad = bench_real_grid.summary([*good, _grid_cell(2.2)])
    assert list(bad["goals"].values()) == [True, False, False]
    assert bench_real_grid.text([*good, _grid_cell(2.2)]).count("MISSED") == 2


def test_bench_serving_summary_compares_runs_of_equal_rate_and_repeat() -> None:
    def run(arm: str, repeat: int, ttft_ms: float, rate: float = 2.0) -> dict[str, Any]:
        labels = {"workload": "shared-prefix", "rate": rate, "arm": arm, "repeat": repeat}
        return labels | dict.fromkeys(bench_serving.FIELDS, ttft_ms)

    runs = [run("off", 0, 100.0), run("off", 1, 110.0), run("auto", 0, 50.0), run("auto", 1, 55.0)]
    rows = bench_serving.summary(runs)
    assert [row["ttft_to_off"] for row in rows] == [1.0, 0.5]
    assert rows[0]["repeats_differ"] == pytest.approx(0.1)
    assert "nowhere" in bench_serving.text(rows)
    runs += [run("off", 0, 100.0, 0.5), run("auto", 0, 130.0, 0.5)]
    assert "shared-prefix at 0.5/s" in bench_serving.text(bench_serving.summary(runs))


def test_bench_memory_tier_summary_names_the_cells_that_the_tiers_lose() -> None:
    def run(arm: str, repeat: int, mean_ms: float, p99_ms: float) -> dict[str, Any]:
        labels = {"workload": "multi-turn", "rate": 2.0, "arm": arm, "repeat": repeat}
        return labels | {"ttft_mean_ms": mean_ms, "ttft_p99_ms": p99_ms}

    runs = [
        *(run("memory", repeat, 40.0, 90.0) for repeat in (0, 1)),
        *(run("hicache-timeout", repeat, 50.0, 80.0) for repeat in (0, 1)),
        run("hicache-best_effort", 0, 60.0, 100.0),
        run("everything", 0, 20.0, 30.0),
    ]
    rows = {row["arm"]: row for row in bench_memory_tier.summary(runs)}
    assert rows["memory"]["ttft_mean_to_hicache"] == 0.8
    assert rows["memory"]["ttft_p99_to_hicache"] == 1.125
    assert rows["memory"]["ttft_mean_to_everything"] == 2.0
    said = bench_memory_tier.text(list(rows.values()))
    assert said.endswith("multi-turn at 2/s (ttft_p99_to_hicache)")
    assert bench_memory_tier.text(bench_memory_tier.summary(runs[:1])).endswith("nowhere")


def test_bench_memory_tier_servers_share_more_than_device_and_host_hold(tmp_path: Path) -> None:
    for size in ([], ["--small"]):
        args = bench_memory_tier.parse_args(size)
        device = servers.pool_tokens(bench_serving.longest_tokens(args))
        host = bench_memory_tier.HOST_RATIO * device
        assert bench_memory_tier.shared_tokens(args) > device + host
    with pytest.raises(SystemExit):
        bench_memory_tier.parse_args(["--arms", "warp"])


def test_bench_memory_tier_writes_both_ways(tmp_path: Path) -> None:
    found = bench_memory_tier.writes(tmp_path, block_bytes=8192, blocks=4)
    assert [each["direct"] for each in found] == [False, True]
    assert all(each["cpu_s_per_gb"] > 0 for each in found)


def test_bench_memory_tier_reads_blocks_three_ways() -> None:
    found = bench_memory_tier.reads(block_bytes=8192, blocks=6, rounds=2)
    assert [each["way"] for each in found] == ["memcpy", "lent", "copied"] * 2
    assert all(each["gb_per_s"] > 0 for each in found)


def test_bench_memory_tier_hits_of_every_codec_are_measured_both_ways(tmp_path: Path) -> None:
    found = bench_memory_tier.hits(tmp_path, layers=1, rounds=1)
    codecs = [codec for codec in CODECS if codec not in ("raw", "cachegen1", "cachegen3")]
    assert [(each["codec"], each["block"]) for each in found] == [
        (codec, block) for codec in codecs for block in ("put", "moved up")
    ]


@pytest.mark.parametrize(
    ("bench", "name"),
    [
        (bench_end_states, "end-states"),
        (bench_head_slices, "head-slices-cpu"),
        (bench_load_rate, "load-rate-cpu"),
        (bench_memory_tier, "memory-tier-cpu"),
        (bench_memory_tier, "memory-hits-cpu"),
    ],
)
def test_bench_tables_of_a_page_are_those_of_the_result(bench: Any, name: str) -> None:
    result = json.loads((facts.RESULTS / f"{name}.json").read_text())
    page = bench.DOC.read_text()
    for marker, text in bench.documented(result).items():
        assert f"<!-- {marker} -->\n{text}\n<!-- end -->" in page


def test_bench_virtual_gpu_hicache_takes_its_load_and_launches_of_the_host() -> None:
    """The copies of the 8B take longer than its last step."""
    model, bus = virtual_gpu.LLAMA_8B, 50e9
    load_s = 256 * model.layout.block_bytes / bus
    last_s = model.prefill.work_s(work_of(32767, 32768))
    followed_s = bench_virtual_gpu.PLAN_S + load_s + last_s / model.layers
    took_s = bench_virtual_gpu.hicache_s(model, bus, 32768)
    assert followed_s < took_s < followed_s + 0.001


def test_bench_fleet_busy_store_slows_mode_load_and_not_auto() -> None:
    mean_s = {
        mode: bench_fleet.run(12, mode, requests=6, links=1.0)["ttft_mean_s"]
        for mode in ("compute", "load", "auto")
    }
    assert mean_s["auto"] < mean_s["compute"] < mean_s["load"]


@pytest.mark.parametrize("server", bench_end_states.SERVERS, ids=lambda server: server.label)
def test_bench_end_states_both_sides_gain_on_some_link(server: bench_end_states.Server) -> None:
    cells = [bench_end_states.cell(server, gbps, 16384) for gbps in bench_end_states.LINKS_GBPS]
    assert max(each["gain"] for each in cells) > 1.3
    for each in cells:
        assert each["optimum_s"] <= each["cake_s"] <= 1.02 * min(each["compute_s"], each["load_s"])
        assert (each["without_end_s"] < each["cake_s"]) == (each["end_bytes"] > 0)


# ---- overhead ----


def _run(factor: float, chunks: tuple[int, ...] = (512, 512)) -> dict[str, Any]:
    steps = [
        {
            "tokens": t,
            "schedule_s": 0.001,
            **dict.fromkeys(overhead_report.CLOCKS, factor * (i + 1)),
        }
        for i, t in enumerate(chunks)
    ]
    return {"ttft_s": 3 * factor, "steps": steps, "cached_tokens": 0}


def test_overhead_report_summary_and_table_show_the_ratios() -> None:
    runs = {"absent": [_run(1.0), _run(2.0)], "full": [_run(1.005), _run(2.01)]}
    summary = overhead_report.summarise(runs)
    assert "over_absent" not in summary["absent"]
    assert summary["full"]["over_absent"]["step_s"]["ratio"] == pytest.approx(1.005)
    assert summary["absent"]["chunk_ms"] == [1500.0, 3000.0]
    text = overhead_report.table(
        {
            "summary": summary,
            "step_overhead_seconds": {"full": {"mean_ms": 0.5, "steps": 10.0}},
            "decisions": bench_overhead.micro(races=1),
            "queues_us": [{"waiting": 1000, "arrival": 100.0, "poll": 5000.0, "sort": 4000.0}],
        }
    )
    assert "below 1 %" in text
    assert "0.500 ms in 10 steps" in text
    assert "1,000 prompts wait: 100 us an arrival, 5,000 a poll, 4,000 to sort" in text


def test_overhead_report_different_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="other chunks"):
        overhead_report.summarise({"absent": [_run(1.0)], "off": [_run(1.0, (256, 512))]})


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.99, 1.005, "below 1 %"),
        (1.02, 1.03, "above 1 %"),
        (0.9, 1.1, "not resolved"),
        (0.1, 0.8, "not resolved"),
    ],
)
def test_overhead_report_verdict_follows_the_interval(low: float, high: float, words: str) -> None:
    assert overhead_report.verdict({"low": low, "high": high}) == words


def test_bench_overhead_histogram_is_read_from_metrics() -> None:
    text = 'x_sum{a="1"} 0.02\nx_count{a="1"} 10.0\nx_bucket{le="1"} 10.0\ny_sum{a="1"} 5\n'
    assert bench_overhead.parse_histogram(text, "x") == {"steps": 10.0, "mean_ms": 2.0}
    assert bench_overhead.parse_histogram(text, "z") == {"steps": 0.0, "mean_ms": 0.0}


def test_scheduler_cost_race_ends_where_front_and_loads_meet() -> None:
    steps = scheduler_cost.race(4096, 512, 4)
    # 32 blocks, of which 4 land in every step, whatever the other side does.
    assert 4 <= len(steps) <= 10
    assert all(set(step) == set(scheduler_cost.PHASES) for step in steps)


def test_scheduler_cost_queue_measures_arrivals_polls_and_sorting() -> None:
    took_s = scheduler_cost.queue(20, prompt_tokens=512, polls=2)
    assert set(took_s) == {"arrival", "poll", "sort"}
    assert min(took_s.values()) > 0


# ---- the stand-ins for HiCache ----


def test_hicache_link_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    hicache_cpu = pytest.importorskip("benchmarks.hicache_cpu")
    bandwidth = tmp_path / "link"
    bandwidth.write_text("1000")
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.s, sleep=lambda s: setattr(now, "s", now.s + s))
    link = hicache_cpu.Link(bandwidth, clock)
    assert link.carry(500, lambda: "page") == "page"
    link.carry(500, lambda: "page")
    assert now.s == pytest.approx(101.0, abs=0.02)
    bandwidth.write_text("0")
    link.carry(10**9, lambda: "page")
    assert now.s == pytest.approx(101.0, abs=0.02)


def test_hicache_transfer_copies_the_indexed_rows() -> None:
    hicache_cpu = pytest.importorskip("benchmarks.hicache_cpu")
    torch = pytest.importorskip("torch")
    source, target = torch.arange(8).view(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    hicache_cpu.transfer_kv_direct(
        [source], [target], torch.tensor([3, 1]), torch.tensor([0, 2]), page_size=1
    )
    assert target.tolist() == [[6, 7], [0, 0], [2, 3], [0, 0]]


def test_http_store_ratios_are_of_runs_of_the_same_repeat() -> None:
    def run(server: str, repeat: int, size_mib: int, mb_per_s: float) -> dict[str, Any]:
        cell = {"client": "wrk", "size_mib": size_mib, "connections": 4, "repeat": repeat}
        return cell | {"server": server, "mb_per_s": mb_per_s, "server_cpu_s_per_gb": 0.1}

    runs = [
        *(run("ours", 0, 1, 90.0), run("nginx", 0, 1, 100.0), run("uvloop", 0, 1, 45.0)),
        *(run("uvloop", 1, 1, 450.0), run("nginx", 1, 1, 1000.0), run("ours", 1, 1, 900.0)),
        *(run("ours", 0, 4, 40.0), run("nginx", 0, 4, 10.0), run("uvloop", 0, 4, 5.0)),
        *(run("uvloop", 1, 4, 5.0), run("nginx", 1, 4, 10.0), run("ours", 1, 4, 40.0)),
    ]
    small, large, mean = summary = bench_http_store.summarise(runs)
    assert small["to_nginx"]["ours"]["ratio"] == pytest.approx(0.9)
    assert small["to_ours"]["uvloop"]["ratio"] == pytest.approx(0.5)
    assert large["to_ours"]["uvloop"]["ratio"] == pytest.approx(0.125)
    assert mean["to_ours"]["uvloop"]["ratio"] == pytest.approx(0.25)
    rss = {"ours": 1.0, "nginx": 2.0, "uvloop": 3.0}
    assert "reached" in bench_http_store.table({"summary": summary, "peak_rss_mb": rss})
    runs[0]["mb_per_s"] = runs[5]["mb_per_s"] = 70.0
    text = bench_http_store.table({"summary": bench_http_store.summarise(runs), "peak_rss_mb": rss})
    assert "missed" in text


def test_bench_http_store_each_server_is_first_and_last_as_often_as_the_others() -> None:
    names = ["a", "b", "c", "d"]
    orders = [bench_http_store.in_turn(names, repeat) for repeat in range(8)]
    for at in (0, 3):
        assert sorted(order[at] for order in orders) == sorted(names * 2)


def test_bench_file_store_compares_with_the_better_fio_of_a_round() -> None:
    def runs(*gb_per_s: float) -> list[file_arms.Run]:
        return [file_arms.Run(10**9, wall_s=1 / rate, cpu_s=0.25) for rate in gb_per_s]

    # The disk was twice as fast in the second round, for everybody.
    found = {name: runs(0.5, 1.0) for name in bench_file_store.ARMS}
    found |= {"fio, direct": runs(1.0, 2.0), bench_file_store.STORE: runs(0.9, 1.8)}
    cell = bench_file_store.summary(4, 8, found)
    assert cell["best_fio"] == "fio, direct"
    assert cell["arms"][bench_file_store.STORE]["to_best_fio"]["ratio"] == 0.9
    assert cell["arms"][bench_file_store.STORE]["cpu_s_per_gb"]["median"] == 0.25
    [line] = [line for line in bench_file_store.table([cell]).splitlines() if "*" in line][:1]
    assert "fio, direct" in line


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_bench_file_store_small_run_measures_store_and_fio(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "file_store", "--small", "--depths", "2"),
            *("--dir", str(tmp_path), "--json", str(result)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert {cell["block_mib"] for cell in found["reads"]} == {1, 4}
    for cell in found["reads"]:
        assert set(cell["arms"]) == set(bench_file_store.ARMS)
        assert all(rate >= 0 for arm in cell["arms"].values() for rate in arm["runs_gb_per_s"])
    assert [row["block_mib"] for row in found["writes"]] == [1, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "left something"


def test_bench_burst_claims_of_one_step_are_one_batch() -> None:
    claims = [
        (1.0, "long", 0, 512),
        (2.0, "a", 0, 30),
        (2.0003, "b", 0, 40),
        (2.001, "long", 512, 700),
    ]
    events = [
        {"t_s": at_s, "rid": rid, "event": "claim", "start": start, "stop": stop}
        for at_s, rid, start, stop in claims
    ]
    found = bench_burst.steps([*events, {"event": "done", "t_s": 3.0}], "long", 4.0)
    assert [(s["begin_s"], s["end_s"]) for s in found] == [(1.0, 2.0), (2.0, 4.0)]
    assert [(s["stored_tokens"], s["plain_tokens"]) for s in found] == [(512, 0), (188, 70)]


def test_bench_burst_summary_compares_within_rounds() -> None:
    def run(finish_s: float) -> dict[str, object]:
        times = dict.fromkeys(("stored_ttft_s", "short_ttft_mean_s", "short_ttft_max_s"), 1.0)
        return {"finish_s": finish_s, "output_ids": {"a": [1]}, **times}

    found = bench_burst.summary({"fcfs": [run(2.0), run(20.0)], "adaptive": [run(1.0), run(10.0)]})
    assert found["adaptive_to_fcfs"]["finish_s"]["ratio"] == pytest.approx(0.5)
    assert found["same_tokens"]


# ---- several workers ----


def _shared(ttft_s: float, bounds: list[int] | None = None, received: int = 0) -> Reply:
    cake = {"bounds": bounds, "received_bytes": received, "waited_s": 0.1} if bounds else {}
    return Reply([1, 2], {"cake": [cake]}, 0.0, ttft_s)


def _runahead_cell(closed_s: float, received: int = 512 * 8) -> dict[str, Any]:
    replies = {name: [_shared(1.0)] * 2 for name in ("one", "two", "auto")}
    for name in bench_runahead.CHAINS:
        replies[name] = [_shared(closed_s, [0, 512, 1024], received)] * 2
    sent = {name: bench_runahead.traffic(replies[name][-1], 8) for name in bench_runahead.CHAINS}
    return bench_runahead.cell(replies, base="one", prompt_tokens=1024, sent=sent)


def test_bench_runahead_goals_are_judged_by_the_measurements() -> None:
    good = _runahead_cell(0.6)
    assert good["ratio"]["closed"]["median"] == 0.6
    assert good["same_tokens"]
    assert all(bench_runahead.summary([good]).values())
    slow, more = _runahead_cell(0.7), _runahead_cell(0.6, received=512 * 8 + 1)
    assert list(bench_runahead.summary([slow]).values()) == [False, True, True, True]
    assert list(bench_runahead.summary([more]).values()) == [True, True, True, False]
    text = bench_runahead.text([slow], [])
    assert "MISSED" in text
    assert "0.500" in text  # the limit


def test_bench_runahead_arms_rotate_and_the_first_round_is_dropped() -> None:
    asked: list[str] = []

    def arm(name: str) -> Callable[[], Reply]:
        return lambda: (asked.append(name), _shared(float(len(asked))))[1]

    found = bench_runahead.rounds({name: arm(name) for name in "abc"}, repeats=2)
    assert "".join(asked) == "abcbcacab"
    assert [reply.ttft_s for reply in found["a"]] == [6.0, 8.0]


class _Filled(Exception):
    """The store would be filled now."""


@pytest.mark.parametrize("module", [bench_ttft, bench_real_grid])
def test_bench_first_server_fills_the_store_over_a_link_without_a_limit(
    module: Any, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    class Recorded(bench_ttft.Bench):
        def _started(self, stack: Any, name: str, flags: list[str], **settings: Any) -> Any:
            started.append(flags)

        def fill(self, *args: Any) -> None:
            raise _Filled

    args = module.parse_args([*(["--no-peers"] if module is bench_ttft else []), "--small"])
    bench = Recorded(args, tmp_path, tmp_path, [1] * 1025, ProgressLog())
    with pytest.raises(_Filled):
        module.run(bench, {})
    (flags,) = started
    assert flags[flags.index("--cake-store") + 1] == (tmp_path / "store").as_uri()
