"""`sglang-cake plan`: yes, no and why."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_cake.cli import PIPE_STATUS, main
from sglang_cake.simulator.hardware import UNSURE
from sglang_cake.simulator.shapes import MODELS


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("args", "store", "load_s", "cake_s"),
    [
        ("--model llama-3.1-8b --gpu h100", "nvme-gen4", 0.314, 0.187),
        ("--model llama-3.1-8b --gpu h100", "25gbe", 0.738, 0.291),
        ("--model llama-3.1-8b --gpu h100", "100gbe", 0.190, 0.135),
        ("--model llama-3.1-70b --gpu h100 --gpus 8", "nvme-gen4", 0.776, 0.379),
        ("--model llama-3.1-70b --gpu h100 --gpus 8", "25gbe", 1.84, 0.534),
        ("--model llama-3.1-70b --gpu h100 --gpus 8", "100gbe", 0.473, 0.286),
        ("--model qwen3-32b --gpu a100", "nvme-gen4", 0.648, 0.586),
        ("--model qwen3-32b --gpu a100", "25gbe", 1.50, 1.20),
        ("--model qwen3-32b --gpu a100", "100gbe", 0.400, 0.377),
        # Twice the loads of the estimate: 16 GPUs share 8 heads of KV, so each is stored twice.
        ("--model llama-3.1-405b --gpu h100 --gpus 16", "25gbe", 2 * 2.91, None),
        # Each of the eight ranks reads all of the latent rows.
        ("--model deepseek-v3 --gpu h200 --gpus 8", "25gbe", 3.1, None),
    ],
)
def test_plan_times_are_within_30_percent_of_hand_estimates(
    args: str, store: str, load_s: float, cake_s: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """16k tokens; by somebody who took 60 % of the peak for matmuls, and 55 % for attention."""
    found = planned(capsys, *args.split(), "--store", store, "--prompt-tokens", "16k")
    [row] = found["prompts"]
    assert 1 / UNSURE <= row["load"] / load_s <= UNSURE
    if cake_s is not None:
        assert 1 / UNSURE <= row["cake"] / cake_s <= UNSURE


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (
            [
                "--model",
                "llama-3.1-8b",
                "--gpu",
                "h100",
                "--store",
                "nvme",
                "--prompt-tokens",
                "8k",
            ],
            "yes",
        ),
        (["--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme"], "partly"),
        (
            ["--model", "llama-3.1-70b", "--gpu", "a100", "--gpus", "2", "--store", "100gbe"],
            "store",
        ),
        (["--model", "mistral-7b", "--gpu", "b200", "--gpus", "4", "--store", "hdd"], "no"),
    ],
)
def test_plan_known_machines_give_the_expected_answer(
    args: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *args)
    assert found["answer"] == answer
    if answer == "no":
        assert "would need about" in found["because"]
        assert all(row["over_compute"] < 1.05 for row in found["prompts"])
    else:
        assert "yes" in found["because"]
    assert main(["plan", *args]) == 0
    assert capsys.readouterr().out.startswith(found["because"])


@pytest.mark.parametrize(
    ("args", "because"),
    [
        (["--model", "llama-3.1-70b", "--gpu", "l4"], "set --gpus 8"),
        (["--model", "deepseek-v3", "--gpu", "a10"], "671 GB of weights do not fit"),
        (["--model", "llama-3.1-8b", "--gpu", "h100", "--gpus", "3"], "cannot share"),
        (["--model", "llama-2-7b", "--gpu", "h100", "--prompt-tokens", "4k"], "context ends"),
        (["--model", "llama-3.1-8b", "--gpu", "312:2:18", "--prompt-tokens", "16k"], "KV of 7,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_machine_that_cannot_serve_answers_no_with_a_reason(
    args: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, *args, "--store", "nvme")
    assert found["answer"] == "no"
    assert found["prompts"] == []
    assert because in found["because"]


@pytest.mark.parametrize(
    ("facts", "because"),
    [
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "of DeepSeek V4 is not modelled"),
        ({"ngram_vocab_size_ratio": 78}, "weights of n-gram embeddings are not modelled"),
        ({"moe_layers_enum": "4,5,6"}, "experts of Step models are not modelled"),
        ({"hybrid_override_pattern": "M-M-M*-" * 4}, "layers of these kinds are not modelled"),
        ({"is_encoder_decoder": True}, "cake does not support encoder-decoder models"),
    ],
)
def test_plan_unsupported_model_answers_no_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, object], because: str
) -> None:
    config = {**MODELS["llama-3.1-8b"], **facts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, "--model", str(tmp_path), "--gpu", "h100", "--store", "nvme")
    assert (found["answer"], found["prompts"]) == ("no", [])
    assert because in found["because"]


def test_plan_prompts_shorter_than_a_block_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "qwen3-8b", "--gpu", "h100", "--store", "nvme", "--prompt-tokens"]
    found = planned(capsys, *args, "100,127,128")
    assert [row["tokens"] for row in found["prompts"]] == [128]
    why = "a prompt shorter than a block of 128 tokens is not stored"
    assert found["left_out"] == [{"tokens": n, "because": why} for n in (100, 127)]
    assert planned(capsys, *args, "100")["because"] == f"no: {why}"


def test_plan_prompts_beyond_the_context_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "qwen3-8b", "--gpu", "h100", "--store", "nvme"]
    found = planned(capsys, *args)
    assert [row["tokens"] for row in found["prompts"]] == [1024, 4096, 16384]
    assert [row["tokens"] for row in found["left_out"]] == [65536]
    assert main(["plan", *args]) == 0
    assert "65,536 tokens are left out: the model's context ends" in capsys.readouterr().out


def test_plan_model_by_name_and_by_config_file_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["deepseek-v3"]))
    machine = ["--gpu", "h200", "--gpus", "8", "--store", "25gbe"]
    by_name, by_file = (
        planned(capsys, "--model", name, *machine) for name in ("deepseek-v3", str(tmp_path))
    )
    assert by_name == by_file


def test_plan_mla_kv_is_stored_once_and_read_by_each_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(
        *(capsys, "--model", "deepseek-v3", "--gpu", "h200", "--gpus", "8", "--store", "25gbe"),
        *("--prompt-tokens", "16k"),
    )
    row_bytes = 61 * (512 + 64) * 2
    assert found["stored_bytes_per_token"] == row_bytes
    assert found["read_bytes_per_token"] == 8 * row_bytes
    assert found["prompts"][0]["stored_bytes"] == 16384 * row_bytes
    assert found["prompts"][0]["load"] > 16384 * 8 * row_bytes / 2.9e9


def test_plan_smaller_2_halves_the_stored_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme", "--prompt-tokens", "4k"]
    whole, half = (planned(capsys, *args, *more) for more in ([], ["--smaller", "2"]))
    assert half["prompts"][0]["stored_bytes"] == whole["prompts"][0]["stored_bytes"] / 2


def test_plan_smaller_kv_leaves_the_loads_of_recurrent_states_as_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--model", "kimi-linear-48b", "--gpu", "h200", "--store", "100MB/s,0ms"]
    args += ["--prompt-tokens", "1k"]
    [whole] = planned(capsys, *args)["prompts"]
    [half] = planned(capsys, *args, "--smaller", "2")["prompts"]
    kv_s = whole["stored_bytes"] / 100e6
    assert whole["load"] - half["load"] < kv_s


def test_plan_compute_times_are_a_range_unless_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme", "--prompt-tokens", "16k"]
    (row,) = planned(capsys, *args)["prompts"]
    fast_s, slow_s = row["range"]["compute"]
    assert fast_s < row["compute"] < slow_s
    assert 1.5 < slow_s / fast_s < 1.3**2
    (row,) = planned(capsys, *args, "--efficiency", "0.6")["prompts"]
    assert row["range"]["compute"] == [row["compute"]] * 2


def test_plan_gain_at_one_length_only_answers_partly(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(
        *(capsys, "--model", "qwen3-8b", "--gpu", "h100", "--store", "s3"),
        *("--prompt-tokens", "1k,16k"),
    )
    answers = {row["tokens"]: row["answer"] for row in found["prompts"]}
    assert found["answer"] == "partly"
    assert answers[1024] == "no"
    assert "yes at 16,384 tokens; no at 1,024 tokens" in found["because"]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme"],
        ["store", "ls", "--json", "{folder}"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_command_closed_stdout_ends_quietly_with_the_pipe_status(
    command: list[str], unbuffered: str, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "sglang_cake",
            *(a.format(folder=f"file://{tmp_path}") for a in command),
        ],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == PIPE_STATUS


PLAN = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme")


def test_command_output_to_a_full_disk_is_one_error_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_cake", *PLAN],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "sglang-cake: cannot write: [Errno 28] No space left on device\n"
    assert done.returncode == 2


def test_command_without_an_output_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python sets it after `>&-`
    assert main(PLAN) == 0


def test_command_interrupted_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    command = subprocess.Popen(
        [sys.executable, "-m", "sglang_cake", "trace", "replay", str(tmp_path / "trace")],
        stderr=subprocess.PIPE,
        text=True,
        # Jobs in the background of a shell ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with open(tmp_path / "trace", "w"):  # waits until the command reads it
        command.send_signal(signal.SIGINT)
        assert command.communicate()[1] == "interrupted\n"
    assert command.returncode == 130


def test_command_other_broken_pipe_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_result: object) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(json, "dumps", broken)
    with pytest.raises(BrokenPipeError):
        main(["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme", "--json"])


def test_plan_early_last_step_is_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """No server on a GPU begins the last step early: the gain could turn *unsure* into *yes*."""
    args = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--store", "nvme"]
    with pytest.raises(SystemExit) as wrong:
        main([*args, "--early-last-step"])
    assert wrong.value.code == 2
    assert "--early-last-step" in capsys.readouterr().err
