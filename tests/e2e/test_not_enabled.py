"""The plugin is installed but cake is not enabled: SGLang is unchanged."""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import requests
from live import CHUNK, Answer, Live, assert_same, request
from polling import until
from warm import run_forked

Make = Callable[[int], list[int]]
NO_PLUGIN = {"SGLANG_PLUGINS": "none", "SGLANG_USE_CPU_ENGINE": "1"}  # no plugin has that name


@pytest.fixture(autouse=True)
def installed() -> None:
    if "cake" not in {e.name for e in entry_points(group="sglang.srt.plugins")}:
        pytest.skip("the package is not installed: its entry point is what is tested")


def test_server_without_cake_has_no_cake_meta_metrics_or_log_line(
    plain: Live, prompt: Make
) -> None:
    answer = plain.ask(prompt(300))
    assert "cake" not in answer.meta
    metrics = requests.get(plain.url + "/metrics", timeout=60).text
    assert "sglang:cake_" not in metrics
    assert "CakeRadixCache" not in metrics
    assert "cake is on" not in plain.server.logs()


def test_server_with_cake_has_cake_metrics_and_log_lines(loading: Live) -> None:
    """Control of the test above. The lines are those that docs/quickstart.md shows, and the second
    one is what benchmarks/gpu/serve.py waits for."""
    assert "sglang:cake_" in requests.get(loading.url + "/metrics", timeout=60).text
    assert "cake is on" in loading.server.logs()
    until(lambda: "cake: namespace " in loading.server.logs(), "the namespace in the log")


SGLANG_ALONE = f"""
import json, sys
import sglang as sgl

def main():
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", attention_backend="torch_native", dtype="float32",
        cuda_graph_backend_decode="disabled", mem_fraction_static=0.5, max_total_tokens=4096,
        chunked_prefill_size={CHUNK}, log_level="warning",
    )
    answers = [engine.generate(**asked) for asked in json.loads(sys.argv[2])]
    engine.shutdown()
    assert "sglang_cake" not in sys.modules
    print("ANSWERS " + json.dumps(answers))

if __name__ == "__main__":
    main()
"""


def test_server_without_cake_answers_as_sglang_without_the_plugin(
    plain: Live, models: dict[str, Path], tmp_path: Path, prompt: Make
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SGLANG_ALONE)
    document = prompt(2 * CHUNK + 9)
    prompts = [prompt(30), document, document + prompt(40)]
    asked = json.dumps([request(ids) for ids in prompts])
    command = [sys.executable, str(program), str(models["first"]), asked]
    done = run_forked(command, {**os.environ, **NO_PLUGIN}, tmp_path, timeout_s=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-2000:]
    alone = map(Answer.of, json.loads(lines[0].removeprefix("ANSWERS ")))
    for ids, reference in zip(prompts, alone, strict=True):
        answer = plain.ask(ids)
        assert_same(answer, reference)
        assert answer.cached == reference.cached


def test_plugin_loaded_without_cake_leaves_scheduler_and_registry_unpatched(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import registry
import sys
HookRegistry.apply_hooks()
patched = [name for name in HookRegistry._patched if "ServerArgs" not in name]
assert not patched, patched
assert Scheduler.get_prefill_adder_class.__module__.startswith("sglang.srt"), "adder"
known = [name for name in dir(registry) if isinstance(getattr(registry, name), dict)]
assert all("cake" not in getattr(registry, name) for name in known), "registry"
assert "sglang_cake.integration.scheduler.scheduler_hooks" not in sys.modules
assert "sglang_cake.integration.memory.cake_radix_cache" not in sys.modules
print("as it was")
""")
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = run_forked([sys.executable, str(program)], env, tmp_path, timeout_s=240)
    assert "as it was" in done.stdout, done.stdout[-2000:]


def test_server_with_cake_imports_nothing_that_its_settings_do_not_use(tmp_path: Path) -> None:
    """Of its own processes: the launcher checks the settings, a scheduler builds the tree."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
from pathlib import Path
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(["--model-path", "none", *sys.argv[1:], "--enable-cake"])
from sglang_cake.integration import plugin
plugin.register()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
import sglang_cake.integration.build
print("PARTS", *sorted({".".join(each.split(".")[:3]) for each in sys.modules if "_cake" in each}))
""")
    command = [sys.executable, str(program), *("--device", "cpu")]
    env = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "XDG_CACHE_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    unused = (".runahead", ".integration.runahead", ".simulator", ".demo", ".cli", ".testing")

    def imported(*settings: str) -> set[str]:
        done = run_forked([*command, *settings], env, tmp_path, timeout_s=240)
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("PARTS")]
        return {part.removeprefix("sglang_cake") for part in line.split()[1:]}

    parts = imported()
    assert ".integration.build" in parts
    assert not {part for part in parts if part.startswith(unused)}
    peers = "--cake-runahead-peers=127.0.0.1:7001,127.0.0.1:7002"
    assert ".runahead.group_setting" in imported(peers, "--cake-runahead-rank=0")
