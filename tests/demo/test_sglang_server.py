"""`demo.sglang_server` against a stand-in for SGLang: streaming, failures, nothing left running."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from polling import until

from sglang_cake.demo.sglang_server import (
    Run,
    ServerDied,
    SglangServer,
    flush_cache,
    free_port,
    generate,
    spawned,
)

# Answers like SGLang, and starts a child that ignores SIGTERM as a busy scheduler would.
STAND_IN = r"""
import http.server, json, pathlib, subprocess, sys, time
seen = pathlib.Path(__file__).with_name("seen")
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body=b""):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply()
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/flush_cache"):
            return self.reply()
        if not json.loads(body)["input_ids"]:
            return self.reply(b'data: {"error": {"message": "empty"}}\n\n')
        self.reply()
        for ids in ([5], [5, 6]):
            meta = {"id": "r", "cake": [{"meet_token": 3}], "sent_s": time.monotonic()}
            event = {"output_ids": ids, "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            for _ in range(2000):  # the next event is sent when this one was seen
                if seen.exists():
                    break
                time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\n\n")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(folder: Path, code: str, run: Run = spawned) -> SglangServer:
    script = folder / "stand_in.py"
    script.write_text(code)
    launcher = (sys.executable, str(script))
    return SglangServer(folder, log=folder / "server.log", launcher=launcher, run=run)


def gone(pid: int) -> bool:
    """Ended; a zombie that nobody reaped yet counts."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter between open and read
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


def test_testing_server_streams_events_and_stops_its_process_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(text: bytes) -> Any:
        (tmp_path / "seen").touch()
        return read(text)

    # Events are read when the time of the first one was taken.
    read = json.loads
    monkeypatch.setattr(json, "loads", loads)
    with server(tmp_path, STAND_IN) as running:
        reply = generate(running.base_url, [1, 2, 3])
        assert reply.output_ids == [5, 6]
        # The first event, not the last: it was there when that was sent.
        assert reply.sent_s < reply.first_token_s < reply.meta["sent_s"]
        assert reply.cake == {"meet_token": 3}
        flush_cache(running.base_url)
        with pytest.raises(RuntimeError, match="empty"):
            generate(running.base_url, [])
        child = int(running.logs().split()[1])
        os.kill(child, 0)
    until(lambda: gone(child), "the child ends with its server")


def test_testing_server_whose_stop_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    """A second Ctrl-C, while the server has still time to end."""

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    def run(command: Sequence[str], env: Mapping[str, str], out: BinaryIO) -> Interrupted:
        return Interrupted(command, env=env, stdout=out, start_new_session=True)

    running = server(tmp_path, STAND_IN, run)
    running.start()
    child = int(running.logs().split()[1])
    process = running.process
    assert process is not None
    with pytest.raises(KeyboardInterrupt):
        running.stop()
    assert process.returncode is not None
    until(lambda: gone(child), "the child ends with its server")


def test_testing_server_that_exits_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = server(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(ServerDied, match=r"status 1(.|\n)*no such model"):
        broken.start()


def test_testing_server_leaves_none_of_its_temporary_files(tmp_path: Path) -> None:
    code = "import tempfile; print(tempfile.mkdtemp()); raise SystemExit"
    broken = server(tmp_path, code)
    with pytest.raises(ServerDied):
        broken.start()
    made = Path(broken.logs().strip())
    assert made.name.startswith("tmp")
    assert not made.parent.exists()


def test_free_port_is_given_away_once_as_long_as_its_process_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tests that start servers at the same time would else talk to one of them."""
    port = free_port()
    monkeypatch.setattr(secrets, "choice", lambda ports: port)
    with pytest.raises(OSError, match="no free port"):
        free_port()
    code = f"""
import secrets
from sglang_cake.demo.sglang_server import free_port
secrets.choice = lambda ports: {port}
free_port()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no free port" in done.stderr
