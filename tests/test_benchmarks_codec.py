"""The pure parts of the benchmarks of codecs; no server is started."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    bench_codec,
    bench_codec_demo,
    bench_codec_ttft,
    codec_report,
    codec_structure,
    facts,
    share_report,
    shared_device,
)
from benchmarks.paper.pictures import draw

ROOT = Path(__file__).parent.parent

CODEC_TOOK_S = {
    "compute": 2.0,
    "raw auto": 1.0,
    "raw load": 2.0,
    "int8 auto": 0.6,
    "int8 load": 1.0,
    "kvquant3 auto": 0.4,
    "kvquant3 load": 0.5,
}


def test_bench_codec_ttft_cells_have_ratios_with_four_servers_at_once(
    tmp_path: Path,
) -> None:
    """Seven servers at once were more than the machine had memory for."""
    up: list[str] = []
    most = 0

    class FakeBench(bench_codec_ttft.Bench):
        @contextlib.contextmanager
        def arm(self, name: str, codec: str, mode: str) -> Iterator[Any]:
            nonlocal most
            up.append(name)
            most = max(most, len(up))
            self.arms[name] = server = SimpleNamespace(arm=name)  # type: ignore[assignment]
            yield server
            del self.arms[name]
            up.remove(name)

        def pace(self, ratio: float) -> None:
            pass

        def fill(self, codec: str, server: Any) -> None:
            assert server.arm == f"{codec} auto"
            self.stored_bytes[codec] = {"raw": 200, "int8": 100, "kvquant3": 40}[codec]

        def cold(self, server: Any) -> float:
            assert server.arm in up
            return CODEC_TOOK_S[server.arm]

    args = SimpleNamespace(codecs=["raw", "int8", "kvquant3"], repeats=2, bandwidths=[0.5, 2.0])
    progress = SimpleNamespace(say=lambda text: None)
    bench = FakeBench(args, tmp_path, [1] * 257, progress)  # type: ignore[arg-type]
    cells = list(bench.cells())
    assert (most, up) == (4, [])
    assert [(cell["codec"], cell["bandwidth_ratio"]) for cell in cells] == [
        (codec, ratio) for codec in args.codecs for ratio in args.bandwidths
    ]
    assert {name: cells[2][name] for name in ("link_limit_s", *bench_codec_ttft.RATIOS)} == {
        "link_limit_s": 2.0,
        "faster_than_load": 1.667,
        "faster_than_compute": 3.333,
        "over_better_single": 0.6,
        "of_raw": 0.6,
    }
    assert cells[2]["ttft_s"].keys() == {"compute", "raw auto", "int8 auto", "int8 load"}
    assert len(bench_codec_ttft.text(cells).splitlines()) == 1 + len(cells)


# ---- a shared device ----


def test_bench_shared_device_others_compute_the_rest_of_every_step(tmp_path: Path) -> None:
    done: list[Any] = []

    class Scheduler:
        chunked_prefill_size = 512
        waiting_queue: tuple[str, ...] = ()
        chunked_req = None
        tree_cache = SimpleNamespace(coordinator=SimpleNamespace(step_costs=SimpleNamespace()))
        tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(model="m")))

        def get_next_batch_to_run(self) -> int:
            return self.chunked_prefill_size

        def run_batch(self, batch: Any) -> None:
            done.append("the prompt")

        def on_idle(self) -> None:
            done.append("idle")

    class FakeOthers(shared_device.Others):
        def compute(self, model: Any) -> None:
            done.append(self.tokens)

    share = tmp_path / "share"
    FakeOthers(share).install(Scheduler)
    scheduler = Scheduler()
    prefill, decode = (
        SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda yes=yes: yes))
        for yes in (True, False)
    )

    def lap(stated: str, batch: Any) -> list[Any]:
        done.clear()
        share.write_text(stated)
        tokens = scheduler.get_next_batch_to_run()
        assert tokens == scheduler.tree_cache.coordinator.step_costs.chunk_tokens
        scheduler.run_batch(batch)
        return [tokens, *done]

    assert lap("0.25", prefill) == [128, 384, "the prompt"]
    assert lap("0.1", prefill) == [51, 461, "the prompt"]
    assert lap("0.1", decode) == [51, "the prompt"]
    done.clear()
    scheduler.on_idle()
    scheduler.waiting_queue = ("waits for its loads",)
    scheduler.on_idle()
    assert done == ["idle", 461, "idle"]
    assert lap("1.0", prefill) == [512, "the prompt"]
    assert lap("0.25", prefill) == [128, 384, "the prompt"]


def _of_a_share(codec: str, share: float, load_s: float, cake_s: float) -> dict[str, Any]:
    compute_s = 0.45 / share
    runs = {"compute": compute_s, f"{codec} load": load_s, f"{codec} auto": cake_s}
    if codec != "raw":
        runs["raw auto"] = 1.0
    runs_s = {arm: [took_s] * 2 for arm, took_s in runs.items()}
    return {"codec": codec, "share": share, "runs_s": runs_s, "link_limit_s": 0.1, "of_raw": 0.5}


def test_share_report_sections_compare_with_the_papers_statements(tmp_path: Path) -> None:
    cells = [
        _of_a_share("raw", 0.1, 2.0, 3.0),  # 3, and 1 twice beside each of the two others
        _of_a_share("raw", 0.9, 1.9, 0.9),
        _of_a_share("int8", 0.1, 1.0, 0.8),
        _of_a_share("int8", 0.9, 1.0, 0.5),
        _of_a_share("cachegen2", 0.1, 0.4, 0.3),
        _of_a_share("cachegen2", 0.9, 0.5, 0.25),
    ]
    result = {"cells": cells}
    rows, stated = (text.splitlines() for text in share_report.sections(result).values())
    assert rows[2] == "| 90 % | raw | 0.50 | 1.90 | **1.00** | 0.10 | 1.90\\\\0.50 | 0.50 |"
    assert [row.split(" | ")[1] for row in rows[2:]] == ["raw", "8 bit", "CacheGen"] * 2
    ours = dict(row.strip("| ").rsplit(" | ", 1) for row in stated[2:])
    found = {what.partition(" | ")[0]: value for what, value in ours.items()}
    assert found["computing with 10 % of the GPU instead of 90 %"] == "9.00x, +4.00 s"
    assert (
        found["Cake with CacheGen on 10 % of the GPU, faster than computing, at most"] == "15.00x"
    )
    assert found["Cake with CacheGen, less than Cake with raw"] == "70.0-75.0 %"
    assert (
        found["load-only with 8 bit, with CacheGen: faster than with raw, at most"]
        == "2.00x, 5.00x"
    )
    assert len(share_report.sections({"cells": cells[:4]})) == 1  # no CacheGen, no statements
    path = draw(lambda figure: share_report.picture(figure, result), tmp_path / "share.svg")
    assert path.read_text().count("Cake, CacheGen") == 1


# ---- the demo with every codec ----


def _demo(**said: Any) -> dict[str, Any]:
    ttft_s = {"compute": 2.0, "load": 2.0, "both": 1.25}
    counts = {"computed_tokens": 1100, "loaded_tokens": 948, "over_ideal": 1.1}
    answer = {"same_tokens": True, "new_tokens": 16, "agreed_tokens": 16, "lossy": False}
    return {"ttft_s": ttft_s, "stored_share": 0.5, **answer, **counts, **said}


def test_bench_codec_demo_row_is_judged_by_the_codecs_promise() -> None:
    lost = {"same_tokens": False, "agreed_tokens": 5, "lossy": True}
    promised = {
        ("zstd", True): _demo(),
        ("auto", True): _demo(),
        ("auto", False): _demo(lossy=True),
        ("raw", False): _demo(**lost),
        ("int8", True): _demo(**lost),
        ("int4", True): _demo(lossy=True),
        ("int4", False): _demo(),  # as if nothing had been encoded
    }
    rows = [bench_codec_demo.row(codec, said) for (codec, _), said in promised.items()]
    assert [found["as_promised"] for found in rows] == [kept for _, kept in promised]
    first, *_, int8, _, last = bench_codec_demo.cells(rows)
    assert first == ["zstd", "2.00", "2.00", "2.00", "1.25", "1.10", "all", "yes"]
    assert (int8[-2:], last[-1]) == (["5 of 16", "yes"], "NO")
    assert bench_codec_demo.parse_args(["--codecs", "raw,auto"]).codecs == ["raw", "auto"]
    with pytest.raises(SystemExit):
        bench_codec_demo.parse_args(["--codecs", "mp3"])


def test_codec_structure_separates_smooth_numbers_from_noise() -> None:
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(8, 2, 2, 128, 16))
    smooth = noise.copy()
    for token in range(1, 128):  # each goes with the one before by nine tenths
        smooth[..., token, :] = 0.9 * smooth[..., token - 1, :] + 0.436 * noise[..., token, :]
    smooth[:, 1, 0, :, 3] *= 10  # a channel of K of the second layer
    smooth[:, :, 1] += 5  # that all are above zero makes no two alike
    noise[:, :, 1] += 5

    def found(numbers: np.ndarray) -> list[dict[str, float]]:
        words = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return codec_structure.structure(words)

    for row in found(smooth):
        assert row["k_neighbours"] == pytest.approx(0.9, abs=0.03)
        assert row["v_neighbours"] == pytest.approx(0.9, abs=0.03)
    for row in found(noise):
        assert row["k_neighbours"] == pytest.approx(0, abs=0.05)
        assert row["v_neighbours"] == pytest.approx(0, abs=0.05)
        assert row["k_largest_to_median"] < 1.2
    first, second = (row["k_largest_to_median"] for row in found(smooth))
    assert first < 1.5
    assert second == pytest.approx(10, rel=0.25)
    both = {"structure": {"trained": found(smooth), "random weights": found(noise)}}
    assert len(codec_report.structure(both)["structure"].splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("quality", codec_report.losses),
        ("speed", codec_report.speed_tables),
        ("structure", codec_report.structure),
        ("variants", codec_report.varied_table),
    ],
)
def test_codec_report_tables_of_the_pages_are_those_of_the_results(
    name: str, tables: Callable[[dict[str, Any]], dict[str, str]]
) -> None:
    result = json.loads((facts.RESULTS / f"codec-{name}-cpu.json").read_text())
    pages = codec_report.DOC.read_text() + codec_report.PAGE.read_text()
    for marker, text in tables(result).items():
        assert pages.count(f"<!-- {marker} -->\n{text}\n<!-- end -->") == 1, marker


def test_bench_codec_filled_blocks_repeat_no_plane() -> None:
    planes = np.arange(8 * 4 * 2, dtype=np.uint16).reshape(8, 4, 2, 1, 1)
    planes = np.broadcast_to(planes, (8, 4, 2, 128, 192))
    shape = bench_codec.Shape("wide", 3, 5, 64)
    for block in bench_codec.filled(shape, planes, 2):
        words = np.frombuffer(block, np.uint16).reshape(3, 2, 128, 320)
        found = [words[layer, part, 0] for layer in range(3) for part in range(2)]
        assert len(block) == shape.layout.block_bytes
        assert len({(row[0], row[-1]) for row in found}) == 6
        assert all(row[0] != row[-1] for row in found)
