"""A real SGLang server as a child process, and the few HTTP calls that its users need."""

import contextlib
import errno
import getpass
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from sglang_cake.core.local_files import temporary_folder

START_TIMEOUT_S = 480.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 600.0
# Ports that Linux does not give to outgoing connections, and that SGLang does not choose itself.
_NO_CLIENTS = range(10_000, 22_000)
_CLAIMS: list[socket.socket] = []  # on ports that `free_port` has given away


class ServerDied(RuntimeError):
    """The server ended or never became healthy; the message holds the end of its log."""


def has_gpu() -> bool:
    """Whether there is a working NVIDIA GPU; `make setup` uses the same test."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


def device_flags(gpu: bool, attention_backend: str | None) -> list[str]:
    """The flags that SGLang needs on this device."""
    if gpu:
        return [] if attention_backend is None else ["--attention-backend", attention_backend]
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--cuda-graph-backend-decode", "disabled"),
    ]


def free_port() -> int:
    """A free port of 127.0.0.1 that the system does not give to outgoing connections. As long as
    this process lives, no call of this function returns it again, in any process.

    Raises: OSError if there seems to be none.
    """
    for _ in range(100):
        port = secrets.choice(_NO_CLIENTS)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0sglang_cake port {port}")  # of Linux: it ends with the process
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            _CLAIMS.append(claim)
            return port
    raise OSError(errno.EADDRINUSE, "no free port found")


def temporary_files_in(folder: Path) -> dict[str, str]:
    """Environment of programs whose temporary files are to be in `folder`: SGLang leaves some.
    What PyTorch compiles stays where later programs find it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an id without a name; then PyTorch does the same
        user = f"uid_{os.getuid()}"
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, "TMPDIR": str(folder)}


Run = Callable[[Sequence[str], Mapping[str, str], BinaryIO], "subprocess.Popen[bytes]"]


def spawned(
    command: Sequence[str], env: Mapping[str, str], out: BinaryIO
) -> "subprocess.Popen[bytes]":
    """Start a child with its own session: Ctrl-C does not reach it, and one signal to its group
    ends the process tree."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class SglangServer:
    """A context manager: healthy on entry, its whole process tree gone on exit.

    Args:
        flags: appended to the command line, after the flags of the device.
        env: added to this process's environment.
        log: file for the server's output; it is overwritten.
        attention_backend: on a GPU; None: SGLang's own choice.
        launcher: the command before the flags; fakes in tests replace it.
        run: starts the command, with this environment and this file for its output. Of the result,
            `pid`, `returncode`, `poll` and `wait` are used.
        stop_signal: SIGTERM, which SGLang checks every 5 s, or SIGINT, which ends it at once.

    Attributes:
        process: of the server; None: none was started, or it was stopped.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log: Path,
        gpu: bool = False,
        attention_backend: str | None = "flashinfer",
        start_timeout_s: float = START_TIMEOUT_S,
        launcher: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
        run: Run = spawned,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.log = log
        self._run = run
        self._stop_signal = stop_signal
        self.start_s = 0.0  # how long the last start took
        self.ended = True  # whether the last stop signal ended it in time
        self._start_timeout_s = start_timeout_s
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self._command = [
            *launcher,
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *device_flags(gpu, attention_backend),
            *flags,
        ]
        device_env = {} if gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
        self._env = {**device_env, **(env or {})}
        self._temporary = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start and wait for health; returns the base URL. Raises: ServerDied."""
        begun = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        folder = self._temporary.enter_context(temporary_folder("sglang-cake-server-"))
        env = {**temporary_files_in(folder), **self._env}
        try:
            with self.log.open("wb") as out:
                self.process = self._run(self._command, env, out)
            while not self._healthy():
                if self.process.poll() is not None:
                    raise ServerDied(self._died(f"ended with status {self.process.returncode}"))
                if time.monotonic() - begun > self._start_timeout_s:
                    raise ServerDied(self._died(f"not healthy after {self._start_timeout_s:.0f} s"))
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begun
        return self.base_url

    def stop(self) -> None:
        """End the server and all its child processes; does nothing if none runs."""
        process = self.process
        self.process = None
        with self._temporary:
            if process is None:
                return
            if process.poll() is None:
                os.kill(process.pid, self._stop_signal)
            try:
                process.wait(STOP_TIMEOUT_S)
                self.ended = True
            except subprocess.TimeoutExpired:
                self.ended = False
            finally:  # also after another Ctrl-C
                # A child that outlived its parent (a scheduler in a long step) is in this group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def logs(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as reply:
                return int(reply.status) == 200
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            return False

    def _died(self, why: str) -> str:
        tail = "\n".join(self.logs().splitlines()[-25:])
        return f"the server {why}; the end of {self.log}:\n{tail}"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, with times in `time.monotonic` seconds (one clock for the whole machine)."""

    output_ids: list[int]
    meta: dict[str, Any]
    sent_s: float
    first_token_s: float

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first streamed event."""
        return self.first_token_s - self.sent_s

    @property
    def cake(self) -> dict[str, Any]:
        """The field `meta_info.cake`; empty if the server does not send it."""
        found = self.meta.get("cake") or {}
        return dict(found[0] if isinstance(found, list) else found)


def generate(
    base_url: str,
    input_ids: Sequence[int],
    max_new_tokens: int = 8,
    timeout_s: float = REQUEST_TIMEOUT_S,
    custom_params: Mapping[str, object] | None = None,
    logprobs_of: Sequence[int] = (),
) -> Reply:
    """Greedy streaming `/generate`. Raises: RuntimeError if the server answers with an error.

    Args: logprobs_of: tokens whose log probabilities `Reply.meta` has, for each position of the
        answer (`output_token_ids_logprobs`).
    """
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
    }
    if custom_params is not None:
        sampling["custom_params"] = dict(custom_params)
    body = {"input_ids": list(input_ids), "stream": True, "sampling_params": sampling}
    if logprobs_of:
        body |= {"return_logprob": True, "token_ids_logprob": list(logprobs_of)}
    request = urllib.request.Request(
        f"{base_url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first_token_s = 0.0
    last: dict[str, Any] = {}
    sent_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            for line in response:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                first_token_s = first_token_s or time.monotonic()
                last = json.loads(line[len(b"data:") :])
                if "error" in last:
                    raise RuntimeError(f"/generate: {last['error']}")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"/generate: {error.code} {error.read()[:500]!r}") from None
    if not last:
        raise RuntimeError("/generate: the stream ended without a token")
    return Reply(last["output_ids"], last["meta_info"], sent_s, first_token_s)


def cake_metric(base_url: str, name: str) -> float:
    """Sum over all labels of `sglang:cake_<name>` on the server's /metrics."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    start = f"sglang:cake_{name}{{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def flush_cache(base_url: str) -> None:
    """Empty the server's tree; waits for running requests to finish."""
    request = urllib.request.Request(f"{base_url}/flush_cache?timeout=60", method="POST")
    with urllib.request.urlopen(request, timeout=90):
        pass
