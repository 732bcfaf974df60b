"""`sglang-cake doctor`: what it says of SGLang, the settings, the model and the machine."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, model_folder
from packaging.specifiers import SpecifierSet
from sglang.srt.server_args import ServerArgs
from warm import run_forked

from sglang_cake.cli import doctor
from sglang_cake.cli.doctor import (
    KvSizes,
    device_finding,
    gain_finding,
    gain_findings,
    memory_finding,
    version_finding,
)
from sglang_cake.config import CakeConfig
from sglang_cake.integration import compat
from sglang_cake.integration.server_check import ResolvedServer, config_file
from sglang_cake.simulator.shapes import MODELS, find_shape

LLAMA_8B = LLAMA | MODELS["llama-3.1-8b"]
SERVER = ResolvedServer("cuda", 1, 1, 8192, 1, None, 2, "LlamaForCausalLM: MHA, GQA")
KV_8B = KvSizes(block_bytes=2**24, end_blocks=0, stored_token_bytes=2**17)
MIB, GIB = 2**20, 2**30
H100 = ("NVIDIA H100 80GB HBM3", 81559 * MIB)
# The command, which measures stores with little, and for as long as a busy disk takes.
PATIENT = """
import sys
from functools import partial
from sglang_cake.cli import doctor, main
doctor.store_findings = partial(doctor.store_findings, bench_bytes=1 << 20, bench_s=600.0)
sys.exit(main())
"""


def ask(tmp_path: Path, *flags: str, **environment: str) -> tuple[int, dict[str, list[Any]]]:
    """Exit status, and lines by what they are about, of the command with `--json`."""
    done = run(tmp_path, "--json", *flags, **environment)
    lines: dict[str, list[Any]] = {}
    answer = json.loads(done.stdout.splitlines()[-1])
    for line in answer["lines"]:
        assert "\n" not in line["text"]
        lines.setdefault(line["about"], []).append((line["state"], line["text"]))
    assert answer["fine"] == (done.returncode == 0)
    return done.returncode, lines


def run(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_CAKE_")}
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "XDG_CACHE_HOME": str(tmp_path / "home")}
    store = () if "--cake-store" in flags else ("--cake-store", f"file://{tmp_path}/kv?min_free=0")
    (program := tmp_path / "patient.py").write_text(PATIENT)
    command = [sys.executable, str(program), "doctor", *flags, *store]
    return run_forked(command, env | environment, tmp_path, timeout_s=300)


# ---- the command ----


def test_doctor_of_a_server_that_will_work_has_nothing_to_mend(tmp_path: Path) -> None:
    status, lines = ask(tmp_path, model_folder(tmp_path / "m", LLAMA), "--device", "cpu")
    repairs = lines.pop("repairs")  # depends on the environment of the tests
    assert status == (1 if repairs[0][0] == "mend" else 0)
    assert {about: line[0][0] for about, line in lines.items() if about != "store"} == {
        "SGLang": "ok",
        "plug-in": "ok",
        "settings": "ok",
        "model": "ok",
        "device": "ok",
        "host memory": "ok",
        "space": "ok",
        "gain": "note",
    }
    assert lines["model"] == [
        ("ok", "LlamaForCausalLM: MHA, GQA (proven: server on a CPU: Llama)"),
    ]
    # 128 tokens, 2 layers, K and V, 2 heads, 16 values, 2 bytes
    assert "in blocks of 32 KiB" in lines["host memory"][0][1]
    assert "in blocks of 32 KiB" in lines["store"][0][1]


def test_doctor_reports_all_that_is_to_mend_at_once(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    status, lines = ask(
        tmp_path,
        *("--model-path", model_folder(tmp_path / "m", LLAMA), "--device", "cpu", "--pp-size", "2"),
        *("--cake-trace-file", "/none/trace", "--cake-record-trace", "/none/requests"),
        *("--cake-store", f"file://{tmp_path}/other,file://{tmp_path}/kv?min_free=0"),
        SGLANG_PLUGINS="another",
    )
    assert status == 1
    assert lines["plug-in"] == [("mend", "SGLANG_PLUGINS=another leaves cake out: add cake to it")]
    assert [state for state, _ in lines["settings"]] == ["mend"] * 3
    assert "set --pp-size 1" in lines["settings"][0][1]
    assert "'/none/trace' cannot be written" in lines["settings"][1][1]
    assert "'/none/requests' cannot be written" in lines["settings"][2][1]
    assert lines["model"] == [("note", "was not checked: settings are refused")]
    assert lines["store"][0][0] == "mend"
    assert "neither empty nor a store" in lines["store"][0][1]
    assert "reads" in lines["store"][1][1], "the second tier is fine"


def test_config_file_path_that_the_system_refuses_is_none() -> None:
    assert config_file(ServerArgs(model_path="a" * 5000)) is None


def test_config_file_of_a_model_on_hugging_face_is_that_of_the_default_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang downloads only weights to `--download-dir`."""
    commit, repo = "0" * 40, tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    file = repo / "snapshots" / commit / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    record = ServerArgs(model_path="some/model", download_dir=str(tmp_path / "weights"))
    assert config_file(record) == file
    assert config_file(ServerArgs(model_path="another/model", download_dir=str(tmp_path))) is None


def test_doctor_unsupported_model_is_to_mend(tmp_path: Path) -> None:
    encoder = {**LLAMA, "architectures": ["BertModel"]}
    status, lines = ask(tmp_path, model_folder(tmp_path / "encoder", encoder), "--device", "cpu")
    assert status == 1
    assert lines["model"][0][0] == "mend"
    assert "models that generate no text" in lines["model"][0][1]
    assert "gain" not in lines


def test_doctor_model_that_is_not_modelled_is_a_note(tmp_path: Path) -> None:
    short = {
        **LLAMA,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
    }
    store = ["--cake-store", f"file://{tmp_path}/kv?min_free=0"]
    _, lines = ask(tmp_path, model_folder(tmp_path / "m", short), "--device", "cpu", *store)
    assert [state for state, _ in lines["model"]] == ["ok", "note"]
    assert "layers of these kinds are not modelled" in lines["model"][1][1]
    assert "host memory" not in lines
    assert "tokens" not in lines["space"][0][1]
    assert "gain" not in lines


def test_doctor_model_that_sglang_does_not_know_is_to_mend(tmp_path: Path) -> None:
    unknown = model_folder(tmp_path / "m", {**LLAMA, "model_type": "no-such-model"})
    status, lines = ask(tmp_path, unknown, "--device", "cpu")
    assert status == 1
    ((state, text),) = lines["model"]
    assert state == "mend"
    assert text.startswith("SGLang does not take this: ")
    assert "no-such-model" in text


def test_doctor_more_memory_than_the_machine_has_is_to_mend(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--cake-staging-bytes", "900TB"]
    status, lines = ask(tmp_path, model_folder(tmp_path / "m", LLAMA), *flags)
    assert status == 1
    ((state, text),) = lines["host memory"]
    assert state == "mend"
    assert "lower --cake-staging-bytes" in text


def test_doctor_without_an_accelerator_says_what_sglang_says(tmp_path: Path) -> None:
    flags = [
        model_folder(tmp_path / "m", LLAMA),
        "--cake-store",
        f"file://{tmp_path}/kv?min_free=0",
    ]
    none = "import os\nos.environ |= {'CUDA_VISIBLE_DEVICES': '', 'SGLANG_USE_CPU_ENGINE': '0'}\n"
    done = _python(none + DOCTOR.replace('"--model-path", "x"', f"*{flags!r}"))
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"^mend +model +SGLang does not take this: .*No accelerator", done.stdout, re.M
    )


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """A model hub that is asked for nothing, and what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_doctor_model_that_is_not_here_is_to_mend_and_not_downloaded(
    tmp_path: Path, hub: tuple[str, list[str]]
) -> None:
    url, asked = hub
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    status, lines = ask(tmp_path, "--model-path", "someone/llama", **environment)
    assert status == 1
    assert lines["model"][0][0] == "mend"
    assert "no config.json of someone/llama" in lines["model"][0][1]
    assert lines["store"][0][0] in ("ok", "note"), "stores are checked all the same"
    assert asked == []


@pytest.mark.parametrize(
    ("model", "modelscope", "place"),
    [
        ("{tmp_path}/model.gguf", "0", "a GGUF file"),
        ("owner/repository:Q4_K_M", "0", "a GGUF file"),
        ("owner/repository/model-Q4_K_M.gguf", "0", "a GGUF file"),
        ("s3://bucket/model", "0", "a URL"),
        ("owner/repository", "true", "ModelScope"),
    ],
)
def test_doctor_model_whose_configuration_is_no_file_is_a_note(
    tmp_path: Path, hub: tuple[str, list[str]], model: str, modelscope: str, place: str
) -> None:
    url, asked = hub
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    environment["SGLANG_USE_MODELSCOPE"] = modelscope
    path = model.format(tmp_path=tmp_path)
    status, lines = ask(tmp_path, "--model-path", path, **environment)
    ((state, text),) = lines["model"]
    assert (status, state) == (0, "note")
    assert f"was not checked: SGLang reads the configuration of {path} from {place}." in text
    assert lines["store"][0][0] in ("ok", "note"), "stores are checked all the same"
    assert asked == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--cake-block-tokens", "0"], "--cake-block-tokens: '0' is not possible"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--config", "/nope.yaml"], "sglang-cake: --config: Config file not found: /nope.yaml"),
        (["--config", "{tmp_path}/bad.yaml"], "sglang-cake: --config: while parsing"),
        (["--config"], "sglang-cake: --config: No config file specified"),
    ],
)
def test_doctor_wrong_flag_exits_with_2(tmp_path: Path, flags: list[str], line: str) -> None:
    (tmp_path / "bad.yaml").write_text("a: [b\n")
    given = [flag.format(tmp_path=tmp_path) for flag in flags]
    done = run(tmp_path, "--cake-store", "memory://1GB", "--model-path", str(tmp_path), *given)
    assert done.returncode == 2
    assert line in done.stdout
    assert "Traceback" not in done.stdout


def test_doctor_other_commands_take_no_flags_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    from sglang_cake.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["patch", "status", "--model-path", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --model-path x" in capsys.readouterr().err


DOCTOR = """
import sys
from sglang_cake.cli import main
sys.exit(main(["doctor", "--model-path", "x"]))
"""
NO_SGLANG = """
import sys
class Absent:
    def find_spec(name, *rest):
        if name == "sglang":
            raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
sys.meta_path.insert(0, Absent)
"""


def test_doctor_without_sglang_says_so() -> None:
    done = _python(NO_SGLANG + DOCTOR)
    assert done.returncode == 1, done.stderr
    assert "mend  SGLang  is not installed in this environment" in done.stdout


def test_doctor_sglang_that_cannot_be_imported_names_the_repairs(tmp_path: Path) -> None:
    """As without a GPU: a module of SGLang imports what is not there."""
    done = _beside(tmp_path, "import a_package_for_gpus\n")
    assert done.returncode == 1, done.stderr
    assert "0.5.23 differs in" in done.stdout
    assert "a_package_for_gpus" in done.stdout
    assert "sglang-cake patch apply" in done.stdout


def test_doctor_sglang_whose_cache_folder_cannot_be_made_names_the_variables(
    tmp_path: Path,
) -> None:
    """As for a user of the system without a home: SGLang makes the folder when it is imported."""
    done = _beside(tmp_path, "import os\nos.makedirs('/proc/home/.cache/sglang/inductor')\n")
    assert done.returncode == 1, done.stderr
    assert "'/proc/home'): set HOME or SGLANG_CACHE_DIR to a folder" in done.stdout
    assert "patch apply" not in done.stdout


def _beside(tmp_path: Path, module: str) -> subprocess.CompletedProcess[str]:
    """The command beside an SGLang that has the lines of `module` alone."""
    package = tmp_path / "sglang" / "srt" / "arg_groups"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (tmp_path / "sglang" / "version.py").write_text("__version__ = '0.5.23'\n")
    (package / "arg_utils.py").write_text(module)
    return _python(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + DOCTOR)


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


# ---- single lines ----


def test_doctor_sglang_with_other_signatures_is_to_mend() -> None:
    names = {"sglang.version": {"no_such_name": ""}}
    line = version_finding("0.6.0", compat.differences(names), SpecifierSet("==0.5.23"))
    assert line.state == "mend"
    assert "version.no_such_name is missing: install sglang==0.5.23" in line.text


def test_doctor_sglang_that_was_not_checked_is_a_note() -> None:
    checked = SpecifierSet("==0.5.23")
    assert version_finding("0.6.0", [], checked).state == "note"
    assert version_finding("0.5.23", [], checked).state == "ok"


def test_doctor_fewer_gpus_than_ranks_are_to_mend() -> None:
    assert device_finding("cuda", 2, ["NVIDIA H100"]).state == "mend"
    assert device_finding("cuda", 2, ["NVIDIA H100"] * 2).state == "ok"


def test_doctor_memory_is_what_all_ranks_together_need() -> None:
    """A block of an 8B model is 16 MiB; a chunk of 8,192 tokens is 64 of them."""

    def line(free_bytes: int, server: ResolvedServer = SERVER) -> doctor.Finding:
        return memory_finding(server, KV_8B, CakeConfig(), free_bytes, reads=4)

    assert line(64 * GIB).state == "ok"
    assert line(4 * GIB).state == "note"  # of a container, for example
    short = line(200 * MIB)
    assert short.state == "mend"
    assert "half of the 200 MiB" in short.text
    assert "--cake-staging-bytes" in short.text
    eight = ResolvedServer("cuda", 8, 8, 8192, 1, None, 2, "")
    assert line(8 * GIB).state == "ok"
    assert line(8 * GIB, eight).state == "note"


def test_doctor_kv_of_8_bits_leaves_recurrent_states_in_host_memory_as_large() -> None:
    kimi = find_shape("kimi-linear-48b")
    whole, half = (
        KvSizes.of(replace(SERVER, kv_value_bytes=value_bytes), kimi, 128) for value_bytes in (2, 1)
    )
    assert half.block_bytes == whole.block_bytes // 2
    assert half.end_blocks * half.block_bytes >= kimi.state_bytes


@pytest.mark.parametrize(
    ("limit", "advice"), [(MIB, "ulimit -l"), (resource.RLIM_INFINITY, "slow: lower --cake-stag")]
)
def test_doctor_memory_that_cannot_be_pinned_is_to_mend(
    monkeypatch: pytest.MonkeyPatch, limit: int, advice: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    asked: list[int] = []

    def refuse(size_bytes: int) -> bool:
        asked.append(size_bytes)
        return False

    line = memory_finding(SERVER, KV_8B, CakeConfig(), 64 * GIB, reads=4, can_pin=refuse)
    assert line.state == "mend"
    assert advice in line.text
    assert asked == [3 * GIB], "1 GiB to load, and two chunks to store"
    line = memory_finding(SERVER, KV_8B, CakeConfig(), 64 * GIB, reads=4, can_pin=lambda size: True)
    assert line.state == "ok"


@pytest.mark.parametrize(
    ("gpu", "bytes_per_s", "state", "text"),
    [
        (H100, 7e9, "ok", "faster than"),
        (("NVIDIA L40S", 46068 * MIB), 1e6, "mend", "this store is too slow"),
        (("NVIDIA A100-SXM4-80GB", 81920 * MIB), 3e9, "ok", "faster than"),
        (None, 7e9, "note", "sglang-cake demo"),
    ],
)
def test_doctor_gain_is_that_of_plan(
    tmp_path: Path, gpu: tuple[str, int] | None, bytes_per_s: float, state: str, text: str
) -> None:
    line = gain_finding(model_folder(tmp_path / "m", LLAMA_8B), SERVER, 128, gpu, bytes_per_s)
    assert line.state == state, line.text
    assert text in line.text


def test_doctor_gain_of_several_tiers_is_that_of_the_fastest(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "m", LLAMA_8B)
    fast, slow = (gain_finding(path, SERVER, 128, H100, speed) for speed in (6e9, 6e7))
    assert (fast.state, slow.state) == ("ok", "mend")
    for speeds, lines in (
        ([6e9, 6e7], [fast, replace(slow, state="note")]),
        ([6e7, 6e9], [fast, replace(slow, state="note")]),
        ([6e9, 6e9], [fast]),
        ([6e7, 6e7], [slow]),
    ):
        assert gain_findings(path, SERVER, 128, H100, speeds) == lines


def test_doctor_gain_that_plan_cannot_predict_is_a_note(tmp_path: Path) -> None:
    server = replace(SERVER, chunk_tokens=8)
    line = gain_finding(model_folder(tmp_path / "m", LLAMA_8B), server, 128, H100, 7e9)
    assert line.state == "note"
    assert "cannot predict it: --chunk-tokens 8" in line.text


@pytest.mark.parametrize(
    ("gpu", "mib", "known"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, True),
        ("AMD Instinct MI300X", 196592, True),
        ("NVIDIA H200 NVL", 143771, True),
        ("NVIDIA L4", 23034, True),
        ("NVIDIA L40", 46068, False),
        ("NVIDIA RTX A1000", 8192, False),
        ("NVIDIA GH200 480GB", 97871, False),
        ("NVIDIA A100-SXM4-40GB", 40960, False),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40320, False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, False),
    ],
)
def test_doctor_gain_is_predicted_for_gpus_with_a_data_sheet_only(
    tmp_path: Path, gpu: str, mib: int, known: bool
) -> None:
    path = model_folder(tmp_path / "m", LLAMA_8B)
    line = gain_finding(path, SERVER, 128, (gpu, mib * MIB), 7e9)
    assert (f"no data sheet of {gpu} with" not in line.text) is known
    assert (line.state == "note") is not known, line.text
