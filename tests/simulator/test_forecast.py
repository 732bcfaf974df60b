"""`sglang-cake simulate`; wrong input, to `plan` as well, is one line and exit 2."""

import json
from pathlib import Path

import pytest

from sglang_cake.cli import main
from sglang_cake.simulator.hardware import PLAN_S
from sglang_cake.simulator.shapes import MODELS

MACHINE = ["--model", "llama-2-13b", "--gpu", "a100", "--store", "32Gbps,38ms"]


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulate_cake_is_between_the_optimum_and_the_better_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = told(capsys, "simulate", *MACHINE, "--prompt-tokens", "4k,16k", "--efficiency", "0.65")
    assert [row["tokens"] for row in found["prompts"]] == [4096, 16384]
    for row in found["prompts"]:
        assert row["optimum"] <= row["cake"] <= 1.02 * min(row["compute"], row["load"])
    # Cake's Table 4 says 2.93 s for this machine and these chunks.
    assert found["prompts"][1]["compute"] == pytest.approx(2.9, rel=0.15)


def test_simulate_model_that_is_not_modelled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**MODELS["llama-3.1-8b"], "layer_types": ["conv", "full_attention"] * 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["simulate", *MACHINE, "--model", str(tmp_path)]) == 2
    assert "layers of these kinds are not modelled" in capsys.readouterr().err


def test_simulate_queue_is_deterministic_and_no_slower_than_compute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = ["--requests", "12", "--rate", "0.5", "--prompt-tokens", "4k,8k", "--new-tokens", "4"]
    rows = told(capsys, "simulate", *MACHINE, *queue)["queue"]
    mean = {(row["arm"], row["policy"]): row["ttft_mean_s"] for row in rows}
    assert len(rows) == 4
    assert mean["cake", "adaptive"] <= mean["compute", "fcfs"]
    assert told(capsys, "simulate", *MACHINE, *queue)["queue"] == rows  # deterministic


def test_simulate_with_picture_prints_and_writes_an_svg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "ttft.svg"
    args = ["--prompt-tokens", "2k", "--fluctuate", "1", "--picture", str(picture)]
    assert main(["simulate", *MACHINE, *args]) == 0
    assert "2,048" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


def test_simulate_fluctuating_speeds_change_for_all_of_a_long_queue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For 300 s; the last speed that seed 5 draws is 9 % of the full one."""
    machine = ["--model", "llama-3.1-8b", "--gpu", "h100", "--store", "25gbe"]
    queue = ["--requests", "60", "--rate", "0.2", "--prompt-tokens", "16k", "--new-tokens", "1"]
    rows = told(capsys, "simulate", *machine, *queue, "--fluctuate", "5")["queue"]
    assert max(row["ttft_mean_s"] for row in rows) < 4


def test_simulate_fluctuating_speeds_are_those_of_every_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--prompt-tokens", "8k", "--store", "1Gbps", "--store", "1Gbps"]
    steady_s, changing_s = (
        told(capsys, "simulate", *MACHINE[:4], *args, *more)["prompts"][0]["load"]
        for more in ([], ["--fluctuate", "1"])
    )
    assert changing_s > 1.7 * steady_s


def test_simulate_utilisation_stores_and_smaller_change_the_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cake_s(*more: str) -> float:
        args = ["simulate", *MACHINE, "--prompt-tokens", "16k", *more]
        return told(capsys, *args)["prompts"][0]["cake"]

    assert cake_s("--utilisation", "0.25") > 1.2 * cake_s()
    assert cake_s("--store", "32Gbps") < 0.8 * cake_s()
    assert cake_s("--smaller", "4") < 0.7 * cake_s()


def test_simulate_early_last_step_saves_at_most_five_percent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["simulate", *MACHINE, "--prompt-tokens", "4k,6k,8k,12k,16k"]
    late, early = (  # whole blocks gain now more, now less
        sum(prompt["cake"] for prompt in told(capsys, *args, *more)["prompts"])
        for more in ([], ["--early-last-step"])
    )
    assert 0.95 * late < early < late
    for more in (["--gpus", "2"], ["--smaller", "2"]):
        assert main([*args, "--early-last-step", *more]) == 2
        assert "--early-last-step: needs" in capsys.readouterr().err


def test_simulate_overlap_is_near_the_time_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", *MACHINE, "--prompt-tokens", "8k,16k"]
    plain, loop = (told(capsys, *args, *more)["prompts"] for more in ([], ["--overlap"]))
    for before, row in zip(plain, loop, strict=True):
        assert row["optimum"] == before["optimum"] <= row["cake"] <= 1.05 * before["cake"]
        assert row["compute"] == pytest.approx(before["compute"] + PLAN_S)
    assert main([*args, "--overlap", "--early-last-step"]) == 2
    assert "not with --overlap" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["plan", "--model", "no-such", "--gpu", "h100", "--store", "nvme"],
        ["plan", "--model", "llama-2-7b", "--gpu", "warp-drive", "--store", "nvme"],
        ["plan", "--model", "llama-2-7b", "--gpu", "312", "--store", "nvme"],
        ["plan", "--model", "llama-2-7b", "--gpu", "312:2.0", "--store", "nvme"],
        ["plan", "--model", "llama-2-7b", "--gpu", "0:2:80", "--store", "nvme"],
        ["plan", "--model", "llama-2-7b", "--gpu", "h100", "--store", "fast"],
        ["plan", "--model", "llama-2-7b", "--gpu", "h100", "--store", "1GB/s,fast"],
        ["plan", "--model", "llama-2-7b", "--gpu", "h100", "--store", "nvme", "--gpus", "0"],
        ["plan", *MACHINE, "--prompt-tokens", "many"],
        ["plan", *MACHINE, "--prompt-tokens", "10000000k"],
        ["plan", *MACHINE, "--prompt-tokens", "9" * 5000],
        ["simulate", *MACHINE, "--gpus", "3"],
        ["plan", *MACHINE, "--efficiency", "2"],
        ["plan", *MACHINE, "--utilisation", "nan"],
        ["simulate", *MACHINE, "--stored", "1.5"],
        ["simulate", *MACHINE, "--rate", "0"],
        ["simulate", *MACHINE, "--picture", "x.txt"],
    ],
    ids=lambda wrong: " ".join(wrong[-2:])[:40],
)
def test_plan_and_simulate_wrong_arguments_exit_with_one_line(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("sglang-cake: ")
