"""cake's flags in SGLang's real command line and in `sglang.Engine`'s keywords."""

import json
import os
import subprocess
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folder import LLAMA, model_folder
from warm import Forked, run_forked

pytest.importorskip("sglang")

from sglang_cake.config import CHILD_OF_CAKE, ENABLED_ENV
from sglang_cake.integration import compat

PROBE = Path(__file__).with_name("probe_flags.py")
LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (sys.executable, str(Path(sys.executable).with_name("sglang")), "serve")
CPU = ["--device", "cpu", "--attention-backend", "torch_native"]
CPU += ["--cuda-graph-backend-decode", "disabled"]
CPU_KEYWORDS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "cuda_graph_backend_decode": "disabled",
}
FLOAT32_LLAMA = LLAMA | {"torch_dtype": "float32"}
Probe = Callable[..., list[dict[str, Any]]]


def _environment(home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_CAKE_")}
    offline = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    return clean | offline | {"XDG_CACHE_HOME": str(home)}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder that is a model as far as its configuration goes; there are no weights."""
    return model_folder(tmp_path / "llama", FLOAT32_LLAMA)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """Runs cases in one process."""
    folder = tmp_path_factory.mktemp("probe")
    pipes = [folder / "cases", folder / "results"]
    for pipe in pipes:
        os.mkfifo(pipe)
    with (folder / "said").open("w+b") as said:
        process = Forked(
            [sys.executable, str(PROBE), *map(str, pipes)], _environment(folder / "home"), said
        )
    with pipes[0].open("w") as asked, pipes[1].open() as answers:

        def run(*cases: dict[str, Any]) -> list[dict[str, Any]]:
            print(json.dumps(cases), file=asked, flush=True)
            line = answers.readline()
            assert line, (folder / "said").read_text()[-4000:]
            results: list[dict[str, Any]] = json.loads(line)
            return results

        yield run
    assert process.wait(60) == 0


REFUSED: list[tuple[tuple[str, ...], list[str], str]] = [
    (
        LAUNCH,
        ["--enable-cake", "--page-size", "48", "--cake-block-tokens", "128"],
        "no multiple of the page size 48",
    ),
    (SERVE, ["--enable-cake", "--cake-store", "/kv"], "--cake-store: store URL '/kv': write"),
    (LAUNCH, ["--enable-cake", "--cake-mode", "laod"], "--cake-mode: 'laod' is not possible"),
    (SERVE, ["--cake-block-token-s", "3"], "unrecognized arguments: --cake-block-token-s 3"),
]


@pytest.mark.parametrize(("command", "flags", "line"), REFUSED)
def test_launchers_refused_flags_exit_with_2_and_one_line(
    tmp_path: Path, llama: str, command: tuple[str, ...], flags: list[str], line: str
) -> None:
    _check_refused(_launch(tmp_path, command, ["--model-path", llama, *CPU, *flags]), line)


def test_launcher_flags_in_a_config_file_are_those_of_the_command_line(
    tmp_path: Path, llama: str
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("enable-cake: true\npage-size: 48\ncake-block-tokens: 128\n")
    given = ["--model-path", llama, *CPU, "--config", str(file)]
    _check_refused(_launch(tmp_path, LAUNCH, given), "no multiple of the page size 48")


def test_launcher_unsupported_model_is_refused_before_loading(tmp_path: Path) -> None:
    """There are no weights."""
    encoder = {**FLOAT32_LLAMA, "architectures": ["BertModel"]}
    flags = ["--model-path", model_folder(tmp_path / "encoder", encoder), "--enable-cake", *CPU]
    done = _launch(tmp_path, LAUNCH, flags)
    _check_refused(done, "cake does not support models that generate no text")


def test_launcher_use_ray_without_ray_is_refused_with_the_package(
    tmp_path: Path, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no Ray here')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    done = _launch(tmp_path, LAUNCH, ["--model-path", llama, "--enable-cake", "--use-ray", *CPU])
    _check_refused(done, "--use-ray needs Ray (no Ray here): pip install 'sglang[ray]'")


def _check_refused(done: subprocess.CompletedProcess[str], line: str) -> None:
    output = done.stdout
    ours = [each for each in output.splitlines() if each.startswith("sglang-cake: error:")]
    assert done.returncode == 2, output[-3000:]
    assert len(ours) == 1
    assert line in ours[0]
    assert "usage:" not in output
    assert "Traceback" not in output
    assert "Load weight" not in output


def test_launcher_help_lists_the_cake_flags(tmp_path: Path) -> None:
    done = _launch(tmp_path, LAUNCH, ["--help"])
    text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "sglang_cake:" in text
    for flag in ("--enable-cake", "--cake-store URL", "--cake-mode MODE", "--cake-config FILE"):
        assert flag in text
    assert "Default: 128, or" in text


def _launch(
    tmp_path: Path, command: tuple[str, ...], flags: list[str]
) -> subprocess.CompletedProcess[str]:
    """Both streams are in `stdout`. Forked, for importing SGLang takes seconds; the server of the
    quickstart is started as a user starts it."""
    env = _environment(tmp_path / "home")
    return run_forked([*command, *flags], env, tmp_path, timeout_s=180)


@pytest.mark.parametrize("exists", [False, True])
def test_flags_trace_file_that_may_not_be_written_is_refused_at_the_start(
    tmp_path: Path, exists: bool
) -> None:
    """Else the error would come once the model is loaded."""
    if exists:
        (tmp_path / "trace").touch(0o444)
    tmp_path.chmod(0o555)
    program = """if True:
        import os
        from sglang_cake.config import CakeConfig
        from sglang_cake.integration.flags import machine_faults
        if os.getuid() == 0:  # may write everywhere
            os.setuid(65534)
        print(*machine_faults(CakeConfig(trace_file="trace")), sep="\\n")
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "trace file 'trace' cannot be written by this user, or is read-only\n"


def test_flags_bad_command_line_exits_with_2_and_one_line(
    probe: Probe, tmp_path: Path, llama: str
) -> None:
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    bad = {
        ("--cake-block-tokens", "0"): "--cake-block-tokens: '0' is not possible",
        ("--cake-codec", "zip"): "--cake-codec: 'zip' is not possible, allowed: raw",
        ("--cake-min-load-tokens", "-5"): "--cake-min-load-tokens: '-5' is not possible",
        ("--cake-staging-bytes", "lots"): "--cake-staging-bytes: 'lots' is not a size",
        ("--cake-write-queue-bytes", "0"): "--cake-write-queue-bytes: '0' is not possible",
        ("--cake-queue-depth", "x"): "--cake-queue-depth: 'x' is not possible",
        ("--cake-config", "/none.toml"): "'/none.toml' cannot be read: no such file",
        ("--cake-trace-file", "/none/trace"): "trace file '/none/trace' cannot be written",
        ("--cake-store", "gopher://bucket"): "unknown scheme 'gopher'",
        ("--cake-store", f"file://{blocked}/kv"): "cannot be made or written",
        ("--cake-store",): "argument --cake-store: expected one argument",
        ("--cake-foo", "1"): "unrecognized arguments: --cake-foo 1",
        ("--radix-cache-backend", "flexkv"): "another radix cache backend, 'flexkv'",
        ("--disable-radix-cache",): "remove --disable-radix-cache",
        ("--disaggregation-mode", "decode"): "set --disaggregation-decode-enable-radix-cache",
        ("--pp-size", "2"): "set --pp-size 1",
        ("--enable-hierarchical-cache",): "takes the place of HiCache",
        ("--enable-lmcache",): "takes the place of LMCache",
        ("--enable-streaming-session",): "does not support streaming sessions",
        ("--page-size", "96", "--cake-block-tokens", "128"): "set --cake-block-tokens 96",
    }
    base = ["--model-path", llama, "--enable-cake"]
    results = probe(*({"argv": [*base, *flags]} for flags in bad))
    for (flags, part), result in zip(bad.items(), results, strict=True):
        assert result["exit"] == 2, flags
        assert len(result["stderr"]) == 1, flags
        assert part in result["stderr"][0]
        assert not result["usage"]
        assert result["env_after"] == {}


def test_flags_without_enable_cake_are_refused_and_environment_ignored(
    probe: Probe, llama: str
) -> None:
    base = ["--model-path", llama]
    named, switch, plain = probe(
        {"argv": [*base, "--cake-mode", "load"]},
        {"argv": [*base, "--radix-cache-backend", "cake", "--cake-mode", "load"]},
        {"argv": base, "env": {"SGLANG_CAKE_MODE": "nonsense"}},
    )
    assert named["exit"] == 2
    assert "--cake-mode has no effect without --enable-cake: add it" in named["stderr"][0]
    assert switch["backend"] == "cake"
    assert switch["settings"]["mode"] == "load"
    assert plain["backend"] is None


def test_flags_resolved_settings_travel_with_the_server_args(
    probe: Probe, tmp_path: Path, llama: str
) -> None:
    file = tmp_path / "cake.toml"
    file.write_text('mode = "both"\nblock_tokens = 64\nqueue_depth = 9\n')
    user = {"SGLANG_CAKE_CONFIG": str(file), "SGLANG_CAKE_BLOCK_TOKENS": "32"}
    argv = ["--model-path", llama, *CPU]
    on, off, by_env, bad_env = probe(
        {"argv": [*argv, "--enable-cake", "--cake-mode", "load"], "env": user, "resolve": True},
        {"argv": argv, "resolve": True},
        {"argv": [*argv, "--radix-cache-backend", "cake"], "env": user, "resolve": True},
        {"argv": [*argv, "--enable-cake"], "env": {"SGLANG_CAKE_MOD": "load"}},
    )
    assert on["env"]["SGLANG_CAKE_ENABLED"] == CHILD_OF_CAKE
    assert on["settings"]["mode"] == "load"  # flag before file
    assert on["settings"]["block_tokens"] == 32  # environment before file
    assert on["settings"]["queue_depth"] == 9  # file before default
    assert on["env"].keys() == {*user, "SGLANG_CAKE_ENABLED"}  # all that children inherit
    assert off["env"] == {}, "a later server without cake inherits nothing"
    assert off["settings"] is None
    assert off["backend"] is None
    assert by_env["settings"]["mode"] == "both"  # not the flag of the first server
    assert "SGLANG_CAKE_MOD: unknown setting, did you mean" in bad_env["stderr"][0]


def test_engine_keywords_set_settings_and_bad_ones_raise(
    probe: Probe, tmp_path: Path, llama: str
) -> None:
    store = f"file://{tmp_path}/kv"
    base = {"model_path": llama, **CPU_KEYWORDS}
    on, off, by_env, bad, unknown, lonely, paged, by_hand = probe(
        {"engine": {**base, "enable_cake": True, "cake_store": store, "cake_queue_depth": 2}},
        {"engine": base},
        {
            "engine": {**base, "radix_cache_backend": "cake"},
            "env": {"SGLANG_CAKE_MODE": "load"},
        },
        {"engine": {**base, "enable_cake": True, "cake_mode": "fast"}},
        {"engine": {**base, "enable_cake": True, "cake_stores": store}},
        {"engine": {**base, "cake_store": store}},
        {
            "engine": {**base, "enable_cake": True, "cake_block_tokens": 128, "page_size": 48},
            "resolve": True,
        },
        {"raw": {**base, "radix_cache_backend": "cake"}, "resolve": True},
    )
    assert on["backend"] == "cake"
    assert on["settings"]["store"] == store
    assert on["settings"]["queue_depth"] == 2
    assert off["backend"] is None
    assert off["env"] == {}
    assert by_env["settings"]["mode"] == "load"
    assert "cake_mode: 'fast' is not possible" in bad["error"]
    assert "cake_stores: unknown setting, did you mean cake_store?" in unknown["error"]
    assert "cake_store has no effect without enable_cake=True" in lonely["error"]
    assert "no multiple of the page size 48" in paged["error"]
    assert by_hand["env"]["SGLANG_CAKE_ENABLED"] == CHILD_OF_CAKE
    assert all(result["stderr"] == [] for result in (bad, unknown, lonely, paged))


def test_flags_stores_of_a_server_are_asked_at_once(probe: Probe, llama: str) -> None:
    asked = threading.Barrier(2)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.wait(60)  # a store that is asked alone gets no answer, and passes
            self.send_error(401)

    with ExitStack() as ending:
        servers = [ending.enter_context(HTTPServer(("127.0.0.1", 0), Handler)) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.handle_request, daemon=True).start()
        first, second = (f"http://127.0.0.1:{server.server_port}" for server in servers)
        flags = ["--enable-cake", "--cake-store", f"{first},{second}"]
        (result,) = probe({"argv": ["--model-path", llama, *flags]})
    assert result["exit"] == 2
    assert f"{first}: GET was answered 401" in result["stderr"][0]


def test_flags_unsupported_model_kind_is_refused_when_resolved(
    probe: Probe, tmp_path: Path, llama: str
) -> None:
    models = {
        "generate no text": {"architectures": ["BertModel"]},
        "longrope beyond the original context": {
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 4096,
            },
        },
    }
    folders = [
        model_folder(tmp_path / f"m{i}", {**FLOAT32_LLAMA, **m})
        for i, m in enumerate(models.values())
    ]
    results = probe(
        *(
            {"argv": ["--model-path", folder, *CPU, "--enable-cake"], "resolve": True}
            for folder in (*folders, llama)
        )
    )
    for part, result in zip(models, results, strict=False):
        assert result.get("exit") == 2, (part, result)
        assert len(result["stderr"]) == 1
        assert part in result["stderr"][0]
    assert results[-1]["backend"] == "cake"


SMALL = {**LLAMA, "head_dim": 16}
SALA = {"architectures": ["MiniCPMSALAForCausalLM"], "model_type": "minicpm_sala"}
HRM = {"architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text"}
OCR = {"architectures": ["UnlimitedOCRForCausalLM"], "model_type": "unlimited-ocr"}
SMOL = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
BEAM = {"architectures": ["BeamForCausalLM"], "model_type": "beam", "sliding_window": 64}
V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "q_lora_rank": 32}
V4 |= {"sliding_window": 128, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 32}
V4 |= {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64, "compress_ratios": [0, 4]}
QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128}
QSA |= {"indexer_budget": 2048, "indexer_compress_ratio": 4}
QSA |= {"layer_types": ["linear_attention", "qwen_sparse_attention"]}
WINDOWS_ALONE = {**BEAM, "layer_types": ["sliding_attention"] * 2}
# What a model's configuration says, further flags, and why it is refused; None: it is served.
RESOLVED: list[tuple[dict[str, Any], list[str], str | None]] = [
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, [], "without attention"),
    (
        {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"},
        [],
        "without attention",
    ),
    (
        {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 8},
        [],
        "without attention",
    ),
    (OCR, [], "a window of themselves"),
    (OCR, ["--disable-hybrid-swa-memory"], "a window of themselves"),
    (WINDOWS_ALONE, [], "set --disable-hybrid-swa-memory"),
    (WINDOWS_ALONE, ["--disable-hybrid-swa-memory"], None),
    ({**BEAM, "layer_types": ["sliding_attention", "full_attention"]}, [], None),
    (
        {
            "architectures": ["LlavaLlamaForCausalLM"],
            "model_type": "llava",
            "text_config": SMALL,
            "vision_config": {"model_type": "clip_vision_model"},
        },
        [],
        None,
    ),
    (
        {**SALA, "num_key_value_heads": 4, "mixer_types": ["minicpm4", "lightning"]},
        [],
        "the radix cache, which SGLang turns off for this model: remove --enable-cake",
    ),
    ({**SALA, "mixer_types": ["minicpm4"], "sparse_config": {"topk": 64}}, [], "the radix cache,"),
    ({**SALA, "mixer_types": ["minicpm4"]}, [], None),
    (HRM, [], "the radix cache, which SGLang turns off for this model"),
    ({**HRM, "prefix_lm": False}, [], None),
    # SGLang serves these two from the Transformers backend.
    (SMOL, ["--is-embedding"], None),
    ({**SMALL}, ["--is-embedding", "--model-impl", "transformers"], None),
    ({**SMALL, "pooling_type": "CLS"}, ["--is-embedding"], None),  # which SGLang's Llama ignores
    (
        {**SMALL, "pooling_type": "CLS"},
        ["--is-embedding", "--model-impl", "transformers"],
        "generate no text",
    ),
    ({**SMOL, "pooling_type": "cls"}, ["--is-embedding"], "generate no text"),
    (V4, [], None),
    (V4, ["--cake-block-tokens", "256"], None),
    (V4, ["--cake-block-tokens", "128"], "page size 256: set --cake-block-tokens 256"),
]


def test_launcher_models_with_forced_settings_are_served_or_refused_by_what_helps(
    probe: Probe, tmp_path: Path
) -> None:
    cases = [
        (model, flags, reason)
        for model, flags, reason in RESOLVED
        if compat.INSTALLED != "0.5.22" or model.get("model_type") != "beam"
    ]
    folders = [
        model_folder(tmp_path / f"m{i}", {**SMALL, **found})
        for i, (found, _, _) in enumerate(cases)
    ]
    results = probe(
        *(
            {"argv": ["--model-path", folder, *CPU, "--enable-cake", *flags], "resolve": True}
            for folder, (_, flags, _) in zip(folders, cases, strict=True)
        )
    )
    for (config, flags, reason), result in zip(cases, results, strict=True):
        assert result.get("exit") == (None if reason is None else 2), (config, flags, result)
        assert len(result["stderr"]) == (reason is not None)
        assert (reason or "") in "".join(result["stderr"]), (config, flags, result)


@pytest.mark.skipif(compat.INSTALLED == "0.5.22", reason="SGLang 0.5.23 has more replay flags")
def test_launcher_models_of_a_gpu_are_served_or_refused_by_what_helps(
    probe: Probe, tmp_path: Path
) -> None:
    """SGLang turns bounded replay on for DeepSeek V4.1 on a GPU."""
    qwen = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "vision_config": {},
        "text_config": {**SMALL, **QSA, "model_type": "qwen4_exp_text"},
    }
    v4, v41 = {**SMALL, **V4}, {**SMALL, **V4, "model_type": "deepseek_v41"}
    v41 |= {"compress_ratios": [0, 2], "kv_source_layer_ids": [1]}
    shared = model_folder(tmp_path / "v41", v41)
    cases: list[tuple[str, list[str], str]] = [
        (model_folder(tmp_path / "v4", v4), [], ""),
        (model_folder(tmp_path / "qwen", {**SMALL, **qwen}), [], ""),
        (shared, [], ""),
        (shared, ["--no-enable-decoder-swa-bounded-replay"], ""),
        (shared, ["--enable-encoder-swa-bounded-replay", "--max-running-requests", "8"], ""),
    ]
    base = ["--device", "cuda", "--enable-cake", "--skip-tokenizer-init"]
    gpu = {"resolve": True, "machine": {"is_cuda": True, "is_sm100": True}}
    results = probe(*({"argv": ["--model-path", m, *base, *f], **gpu} for m, f, _ in cases))
    for (_, flags, reason), result in zip(cases, results, strict=True):
        assert result.get("exit") == (2 if reason else None), (flags, result)
        assert reason in "".join(result["stderr"]), result


def test_flags_lossy_codec_with_fp8_cache_is_refused_when_resolved(
    probe: Probe, llama: str
) -> None:
    argv = ["--model-path", llama, *CPU, "--enable-cake", "--kv-cache-dtype", "fp8_e4m3"]
    lossy, exact = probe(
        {"argv": [*argv, "--cake-codec", "int4"], "resolve": True},
        {"argv": [*argv, "--cake-codec", "zstd"], "resolve": True},
    )
    assert lossy["exit"] == 2
    assert len(lossy["stderr"]) == 1
    assert "set --cake-codec raw, zstd or auto" in lossy["stderr"][0]
    assert "exit" not in exact


def test_flags_runahead_member_has_prefill_graphs_disabled_by_default(
    probe: Probe, tmp_path: Path, llama: str
) -> None:
    argv = ["--model-path", llama, *CPU, "--enable-cake"]
    peers = {"SGLANG_CAKE_RUNAHEAD_PEERS": "127.0.0.1:7000,127.0.0.1:7001"}
    peers |= {"SGLANG_CAKE_RUNAHEAD_RANK": "0", "XDG_CONFIG_HOME": str(tmp_path)}
    by_hand = {"model_path": llama, **CPU_KEYWORDS, "radix_cache_backend": "cake"}
    member, asked, no_member, raw = probe(
        {"argv": argv, "env": peers, "resolve": True},
        {"argv": [*argv, "--cuda-graph-backend-prefill", "full"], "env": peers},
        {"argv": argv, "resolve": True},
        {"raw": by_hand, "env": peers, "resolve": True},
    )
    assert [each["graphs"] for each in (member, raw)] == ["disabled"] * 2
    assert asked["graphs"] == "full"  # which is refused where it matters
    assert no_member["graphs"] is None


def test_flags_without_cake_leave_sglang_unpatched(tmp_path: Path, llama: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"""
import json, os
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
load_plugins()
args = prepare_server_args({["--model-path", llama, *CPU]!r})
args.resolve_once()
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
print(json.dumps({{
    "backend": args.radix_cache_backend,
    "patched": sorted(HookRegistry._patched),
    "wrapped": sorted(n for n, f in vars(Scheduler).items() if hasattr(f, "__wrapped__")
                      and "sglang_cake" in str(f.__wrapped__)),
    "adder": hasattr(Scheduler.get_prefill_adder_class, "__wrapped__"),
    "registered": registered_radix_cache_backends(),
    "env": [n for n in os.environ if n.startswith("SGLANG_CAKE_")],
}}))
""")
    done = _launch(tmp_path, (sys.executable, str(script)), [])
    assert done.returncode == 0, done.stdout[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["backend"] is None
    assert got["env"] == []
    assert "cake" not in got["registered"]
    assert not got["adder"]
    assert [name.rpartition(".")[2] for name in got["patched"]] == [
        "add_cli_args",
        "from_cli_args",
        "resolve_once",
    ]
    assert not (tmp_path / "home" / "sglang_cake").exists(), "no store folder is made"


def test_flags_variable_of_children_set_by_a_user_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_cake.integration import flags

    record = SimpleNamespace(radix_cache_backend=None)
    for value, warnings in (("1", 1), ("true", 1), (CHILD_OF_CAKE, 0)):
        monkeypatch.setenv(ENABLED_ENV, value)
        caplog.clear()
        for _ in range(2):  # of several engines in a process, the first one
            assert flags.from_cli_args(lambda cls, args: record, object, Namespace()) is record
        assert ENABLED_ENV not in os.environ
        said = [each.getMessage() for each in caplog.records]
        line = f"cake is off: SGLANG_CAKE_ENABLED={value} has no effect: add --enable-cake"
        assert [each[: len(line)] for each in said] == [line] * warnings


def test_flags_enable_cake_without_the_hook_that_reads_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang only logs that the target of a hook is missing."""
    from sglang_cake.integration import flags

    names = tmp_path / "compat.toml"
    names.write_text('["sglang.srt.server_args.ServerArgs"]\nno_such_name = ""\n')
    monkeypatch.setattr(compat, "NAMES_FILE", names)
    parser = ArgumentParser()
    flags.add_flags(None, parser)
    assert parser.parse_args([]).enable_cake is False
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--enable-cake"])
    assert caught.value.code == 2
    assert "server_args.ServerArgs.no_such_name is missing" in capsys.readouterr().err


def test_flags_differing_sglang_is_refused_only_with_enable_cake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_cake.integration import compat, flags

    names = tmp_path / "compat.toml"
    names.write_text('["sglang.srt.managers.scheduler.Scheduler"]\nno_such_name = ""\n')
    monkeypatch.setattr(compat, "NAMES_FILE", names)  # the installed SGLang cannot be changed
    record = SimpleNamespace(radix_cache_backend=None)
    with pytest.raises(SystemExit) as caught:
        flags.from_cli_args(lambda cls, args: record, object, Namespace(enable_cake=True))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sglang-cake: error: cake was checked with SGLang ")
    assert "managers.scheduler.Scheduler.no_such_name is missing" in line
    assert flags.from_cli_args(lambda cls, args: record, object, Namespace()) is record
