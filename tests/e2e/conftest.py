"""Servers for the end-to-end tests. Tests share them, and the log of each is checked."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
from distributions import install
from live import BLOCK, CHUNK, VOCAB, Live, Start, StoreView
from warm import ONE_THREAD, Forked

from sglang_cake.demo.models import build_llama
from sglang_cake.demo.sglang_server import SglangServer

HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 4, 8, 2
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
# Most of the memory is that of other servers, which start and end meanwhile.
FLAGS = ("--mem-fraction-static", "0.5", "--chunked-prefill-size", str(CHUNK))
# A server that has nothing to do would take a core from the others, and SGLang's own first requests
# take a second. The server of test_examples.py is started without these flags, and from the command
# line: that takes more than a minute of a core, most of it for imports in three processes.
QUIET = ("--sleep-on-idle", "--skip-server-warmup")


@pytest.fixture(scope="session", autouse=True)
def needs_sglang() -> None:
    pytest.importorskip("sglang")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, Path]:
    """Two models of one shape. The folders of both are named `model`."""
    return {
        name: build_llama(
            folder / name / "model",
            hidden=HIDDEN,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=KV_HEADS,
            vocab=VOCAB,
            seed=seed,
        )
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="session")
def standins(folder: Path) -> dict[str, str]:
    """Environment of a server that uses tests/e2e/standins."""
    site, module = folder / "plugins", Path(__file__).parent / "standins"
    install(
        site,
        "cake_test_standins",
        "sglang.srt.plugins",
        "cake_test_standins = cake_test_standins:register",
        "cake_test_layers = cake_test_layers:register",
        "cake_test_decoders = cake_test_decoders:register",
        "cake_test_slow = cake_test_slow:register",
        "cake_test_faults = cake_test_faults:register",
        "cake_test_digests = cake_test_digests:register",
        "cake_test_images = cake_test_images:register",
        "cake_test_recurrent = cake_test_recurrent:register",
        "cake_test_kda_mamba2 = cake_test_kda_mamba2:register",
        "cake_test_sinks = cake_test_sinks:register",
        "cake_test_chunked_attention = cake_test_chunked_attention:register",
        "cake_test_any_backend = cake_test_any_backend:register",
        "cake_test_disaggregation = cake_test_disaggregation:register",
        "cake_test_speculative = cake_test_speculative:register",
    )
    paths = [str(site), str(module), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session")
def patience(folder: Path) -> tuple[str, str]:
    """What the PYTHONPATH of a server that waits for what is late begins with. It does not bring
    the other stand-ins along."""
    site, entry_point = folder / "patience", "cake_test_patience = cake_test_patience:register"
    install(site, "cake_test_patience", "sglang.srt.plugins", entry_point)
    return str(site), str(Path(__file__).parent / "standins")


@pytest.fixture(scope="session")
def adapters(folder: Path) -> dict[str, Path]:
    """LoRA adapters `a` in two versions, and `b`."""
    return {
        name: write_adapter(folder / "adapters" / name, seed)
        for seed, name in enumerate(("a", "a2", "b"))
    }


def write_adapter(path: Path, seed: int) -> Path:
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    random_of = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        base = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{base}.lora_A.weight"] = torch.randn(8, HIDDEN, generator=random_of) * 0.1
        tensors[f"{base}.lora_B.weight"] = torch.randn(HIDDEN, 8, generator=random_of) * 0.1
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["o_proj"],
        "base_model_name_or_path": "model",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def report_to_guard() -> Iterator[Callable[[int], None]]:
    """Reports to `guard` that a server has started or, as a negative number, ended."""
    command = [sys.executable, str(Path(__file__).with_name("guard.py"))]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def report(group: int) -> None:
        assert guard.stdin is not None
        guard.stdin.write(f"{group}\n")
        guard.stdin.flush()

    with guard:
        yield report


@pytest.fixture(scope="session")
def start(folder: Path, report_to_guard: Callable[[int], None], patience: tuple[str, str]) -> Start:
    """Starts servers. The log of each is checked when it has ended. Those with cake wait for what
    is late, as `cake_test_patience` says, unless a test is about that."""
    count = 0

    @contextlib.contextmanager
    def start(
        model: Path,
        flags: Sequence[str] = (),
        *,
        store: Path | None = None,
        urls: Sequence[str] = (),  # further tiers
        bandwidth: str = "5MB/s",
        env: dict[str, str] | None = None,
        strict: bool = True,
        patient: bool = True,
        stop: signal.Signals = signal.SIGINT,
    ) -> Iterator[Live]:
        nonlocal count
        count += 1
        trace = folder / f"trace-{count}.jsonl"
        cake: list[str] = []
        if store is not None:
            first = f"file://{store}?bandwidth={bandwidth}&min_free=0"
            cake = [
                "--enable-cake",
                *("--cake-store", ",".join([first, *urls])),
                *("--cake-block-tokens", str(BLOCK)),
                *("--cake-min-load-tokens", str(BLOCK)),
                *("--cake-trace-file", str(trace)),
            ]
        env = {**ONE_THREAD, **(STRICT if strict else {}), **(env or {})}
        if store is not None:
            # Also in an impatient one: plug-ins count in the namespace, and servers share stores.
            path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (*patience, path)))
            env |= {} if patient else {"CAKE_TEST_IMPATIENT": "1"}
        started: list[int] = []

        def run(command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> Forked:
            process = Forked(command, env, out)
            started.append(process.pid)
            report_to_guard(process.pid)
            return process

        server = SglangServer(
            model,
            (*FLAGS, *QUIET, *cake, *flags),
            env=env,
            log=folder / f"server-{count}.log",
            run=run,
            stop_signal=stop,
        )
        view = None if store is None else StoreView(store)
        live = Live(server, view, trace)
        with server:
            yield live
        for group in started:
            report_to_guard(-group)
        if not live.killed:  # the check includes what it logged while it ended
            live.check_log()
            assert server.ended

    return start


@pytest.fixture(scope="session")
def plain(
    start: Start, models: dict[str, Path], adapters: dict[str, Path], standins: dict[str, str]
) -> Iterator[Live]:
    """A server without cake. Its answers are the references."""
    names = [f"{name}={path}" for name, path in adapters.items()]
    flags = (
        *("--dtype", "float32", "--max-total-tokens", "12000"),
        "--enable-metrics",
        *("--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *names),
    )
    with start(models["first"], flags, env=standins) as live:
        yield live


@pytest.fixture(scope="session")
def racing(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    """Mode `both`: speed decides whether a block is loaded or computed. Page size 1, overlap
    scheduling. Ended by SIGTERM.
    """
    store, stop = folder / "store-both", signal.SIGTERM
    with start(models["first"], _flags("both"), store=store, stop=stop) as live:
        yield live


@pytest.fixture(scope="session")
def loading(start: Start, models: dict[str, Path], folder: Path) -> Iterator[Live]:
    """Mode `load`: all stored blocks are loaded."""
    with start(models["first"], _flags("load"), store=folder / "store-load") as live:
        live.races = False
        yield live


def _flags(mode: str) -> tuple[str, ...]:
    return (
        *("--dtype", "float32", "--max-total-tokens", "12000", "--cake-mode", mode),
        *("--enable-metrics", "--enable-cache-report"),
    )


@pytest.fixture(scope="session", params=["racing", "loading"], ids=["both", "load"])
def both(request: pytest.FixtureRequest) -> Live:
    """`racing` and `loading`, in turn."""
    live: Live = request.getfixturevalue(request.param)
    return live


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Random prompts. Each test has its own; they are the same in every run."""
    source = random.Random(request.node.nodeid)

    def make(tokens: int) -> list[int]:
        return [source.randrange(VOCAB) for _ in range(tokens)]

    return make


@pytest.fixture(autouse=True)
def no_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks the log of the shared server after each test."""
    yield
    for server in {"both", "loading"}.intersection(request.fixturenames):
        request.getfixturevalue(server).check_log()
