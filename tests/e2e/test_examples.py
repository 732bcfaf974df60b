"""The quickstart and the examples, run as a newcomer would run them, on a small model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Live
from warm import ONE_THREAD, run_forked

from sglang_cake.demo.sglang_server import SglangServer

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


def block_of(page: str, name: str) -> str:
    """The block of shell commands that the page marks with `<!-- test: NAME -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```bash\n(.*?)```", page, flags=re.DOTALL)
    assert found is not None, name
    return found[1]


def environment(folder: Path, model: Path) -> dict[str, str]:
    return {
        **ONE_THREAD,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder),
        "MODEL": str(model),
        "SGLANG_CAKE_MODE": "load",  # this model may compute faster than a disk is read
    }


@pytest.fixture(scope="module")
def quickstart(folder: Path, models: dict[str, Path]) -> Iterator[dict[str, str]]:
    """The environment of a shell beside the page's server."""
    env = environment(folder / "quickstart", models["first"])
    command = block_of((ROOT / "docs/quickstart.md").read_text(), "server")
    server = SglangServer(
        models["first"],
        env=env,
        log=folder / "quickstart.log",
        launcher=["bash", "-c", f"export PORT=$5; exec env {command}"],  # ... --port PORT
        stop_signal=signal.SIGINT,
    )
    with server:
        yield {**os.environ, **env, "PORT": server.base_url.rpartition(":")[2]}
    Live(server).check_log()
    assert server.ended


def printed(output: str, name: str) -> list[int]:
    return [int(number) for number in re.findall(rf"'{name}': (\d+)", output)]


def test_quickstart_last_answer_loads_from_the_store(quickstart: dict[str, str]) -> None:
    client = block_of((ROOT / "docs/quickstart.md").read_text(), "client")
    done = subprocess.run(
        ["bash", "-euc", client],
        env=quickstart,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *before, last = printed(done.stdout, "loaded_tokens")
    assert before[0] == 0
    assert last > 0


def test_frontend_example_answers_against_a_server_with_cake(
    quickstart: dict[str, str], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{quickstart['PORT']}"
    command = [sys.executable, str(ROOT / "examples/frontend.py"), url]
    done = run_forked(command, quickstart, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert re.search(r"verdict: (yes|no)", done.stdout)


def test_engine_example_last_prompt_loads_from_the_store(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    script = str(ROOT / "examples/engine.py")
    url = f"file://{tmp_path}/kv?min_free=0"
    env = {**os.environ, **environment(tmp_path, models["first"]), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, script, str(models["first"]), url, "--cpu"]
    done = run_forked(command, env, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stdout
    *before, last = printed(done.stdout, "loaded_tokens")
    assert before[0] == 0
    assert last > 0
