"""Schedulers that Ray starts (`--use-ray`), on a cluster that runs already.

Ray is no part of the environment that `make setup` makes: `.venv/bin/pip install ray`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import BLOCK, Live, Start, assert_same, check_wrong_kv_is_noticed
from warm import ONE_THREAD

from sglang_cake.demo.sglang_server import free_port

pytest.importorskip("ray", reason="Ray is no part of this environment (docs/deployment.md)")

RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")


@pytest.fixture(scope="module")
def address(standins: dict[str, str]) -> Iterator[str]:
    """The address of a cluster of one node, which is told that it has a GPU. The node has settings
    of its own, which must not count."""
    port = free_port()
    node = {**standins, **ONE_THREAD, "SGLANG_USE_CPU_ENGINE": "1"}
    node |= {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
    node |= {"RAY_raylet_start_wait_time_s": "300"}  # other tests may have the cores
    node |= {"SGLANG_CAKE_MODE": "compute", "SGLANG_CAKE_MIN_LOAD_TOKENS": "99999"}
    # Ray has sockets in its folder, and their paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        command = (
            *(*RAY, "start", "--head", "--block", "--num-gpus", "1", "--num-cpus", "2"),
            *("--port", str(port), "--temp-dir", folder, "--object-store-memory", "80000000"),
            *("--min-worker-port", "22000", "--max-worker-port", "22999"),  # not `port`
            *("--include-dashboard", "false", "--disable-usage-stats"),
        )
        log = Path(folder, "log")
        with (
            log.open("wb") as out,
            subprocess.Popen(
                command, env=os.environ | node, stdout=out, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                yield f"127.0.0.1:{port}"
                assert process.poll() is None, log.read_text()
            finally:
                process.terminate()


@pytest.fixture(scope="module")
def server(
    start: Start, models: dict[str, Path], folder: Path, address: str, standins: dict[str, str]
) -> Iterator[Live]:
    flags = ("--dtype", "float32", "--max-total-tokens", "4096", "--cake-mode", "load", "--use-ray")
    env = {**standins, "RAY_ADDRESS": address}
    with start(models["first"], flags, store=folder / "store-ray", env=env) as live:
        yield live


def test_ray_stored_prompt_is_loaded_with_the_same_tokens(
    server: Live, prompt: Callable[[int], list[int]]
) -> None:
    ids = prompt(12 * BLOCK + 5)
    cold = server.ask(ids)
    assert server.store is not None
    files = server.store.until_stored(ids)
    warm = server.ask_flushed(ids)
    assert (cold.loaded, warm.loaded) == (0, 12 * BLOCK)
    assert_same(warm, cold)
    check_wrong_kv_is_noticed(files, lambda: server.ask_flushed(ids), cold)
