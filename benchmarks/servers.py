"""Models, prompts, and servers that stand still while another one is measured."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_cake.cli.demo import CPU_MODEL, MODEL_FORMAT
from sglang_cake.demo.models import build_llama, built_once
from sglang_cake.demo.sglang_server import Reply, SglangServer, flush_cache, generate

WORK = Path(__file__).resolve().parent / ".work"
SMALL_MODEL = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 512}
DTYPE = "float32"
BLOCK_TOKENS = 128
STOCK = {"SGLANG_PLUGINS": "none"}  # a name that no plugin has: SGLang loads none
SETTLE_S = 0.1
FREEZE_TRIES = 100


class FrozenServer(SglangServer):
    """A server that runs only inside `with server.thawed()`.

    An idle SGLang server polls, which costs a core; a stopped one costs nothing, and unlike
    `--sleep-on-idle` this does not change how the one that runs behaves.
    """

    _frozen = False

    def start(self) -> str:
        """Start, wait for health, freeze."""
        url = super().start()
        self._freeze()
        return url

    def stop(self) -> None:
        """End the server, frozen or not."""
        self._thaw()
        super().stop()

    @contextlib.contextmanager
    def thawed(self) -> Iterator[str]:
        """Let it run; the value is its base URL."""
        self._thaw()
        time.sleep(SETTLE_S)
        try:
            yield self.base_url
        finally:
            self._freeze()

    def cold(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        custom_params: Mapping[str, object] | None = None,
    ) -> Reply:
        """Empty its cache and send `prompt`."""
        with self.thawed() as url:
            flush_cache(url)
            return generate(url, prompt, new_tokens, custom_params=custom_params)

    def warm(self, prompt: Sequence[int], new_tokens: int) -> Reply:
        """Send `prompt`; what the server has in memory counts."""
        with self.thawed() as url:
            return generate(url, prompt, new_tokens)

    def _freeze(self) -> None:
        """Stop it, but not while it holds the books of a store that others share."""
        for _ in range(FREEZE_TRIES):
            self._signal(signal.SIGSTOP)
            if not any(map(_is_locked, WORK.glob("*/*/index.db"))):
                break
            self._signal(signal.SIGCONT)
            time.sleep(SETTLE_S)
        self._frozen = True

    def _thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _is_locked(books: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(books, timeout=0)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.rollback()
    except sqlite3.OperationalError:
        return True
    return False


def model(small: bool, size: Mapping[str, int] | None = None) -> Path:
    """The demo's CPU model (92M parameters), or a quarter of its width, or `size`; built once."""
    size = size or (SMALL_MODEL if small else CPU_MODEL)
    name = "-".join(str(part) for part in (MODEL_FORMAT, DTYPE, *size.values()))
    path = WORK / f"model-{name}"
    return built_once(path, lambda out: build_llama(out, **size, dtype=DTYPE))


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Any tokens do: the model is random as well."""
    return random.Random(seed).choices(range(256), k=tokens)


def pool_tokens(longest: int) -> int:
    """Tokens of a server's KV pool: room for two of the longest prompts."""
    return 2 * (-(-longest // BLOCK_TOKENS) + 1) * BLOCK_TOKENS


def common_flags(chunk_tokens: int, longest: int) -> list[str]:
    """What every server gets, of whichever arm."""
    return [
        *("--dtype", DTYPE, "--chunked-prefill-size", str(chunk_tokens)),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", str(pool_tokens(longest))),
        "--enable-cache-report",
    ]


def cake_flags(url: str, mode: str) -> list[str]:
    """Cake on, with the store at `url`."""
    return [
        *("--enable-cake", "--cake-store", url, "--cake-mode", mode),
        *("--cake-block-tokens", str(BLOCK_TOKENS)),
    ]


def launcher(module: str) -> list[str]:
    """Start a server through one of this folder's modules."""
    return [sys.executable, "-m", f"benchmarks.{module}"]


def wait_until_steady(folder: Path, at_least_bytes: int, timeout_s: float = 120.0) -> int:
    """Until `folder` holds that much and has stopped growing; returns its bytes.

    Raises: TimeoutError.
    """
    deadline_s = time.monotonic() + timeout_s
    before = -1
    while True:
        held = sum(path.stat().st_size for path in _files(folder))
        if held >= at_least_bytes and held == before:
            return held
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the store holds {held:,} of {at_least_bytes:,} bytes")
        before = held
        time.sleep(0.5)


def unwind_when_told_to_end() -> None:
    """A plain `kill`, or a time limit, must end the servers too, the stopped ones above all."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def fresh_folder(name: str) -> Iterator[Path]:
    """An empty folder for one run, gone afterwards."""
    path = WORK / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """`extra`, and this folder importable in the server's processes."""
    root = str(WORK.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **extra}


def _files(folder: Path) -> list[Path]:
    # A temporary file may be gone before it is asked for its size.
    return [path for path in folder.rglob("*") if path.is_file() and ".tmp" not in path.name]
