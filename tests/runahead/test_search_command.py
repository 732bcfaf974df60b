"""`sglang-cake runahead search`, and the table that a server takes from it while it runs."""

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_cake.cli import main, runahead_search
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.keys import Span
from sglang_cake.runahead.chain_plan import ChainLimits
from sglang_cake.runahead.partition import Partition, even
from sglang_cake.runahead.partition_table import (
    LOOK_S,
    PartitionTable,
    WatchedTable,
    load_table,
    save_table,
)

TOKENS, BEST = 4096, 2432
NAME = "x86-64-00aa.json"


class FakeServer:
    """Takes longer the further the bound is from the best one."""

    def __init__(self, table: object = NAME) -> None:
        self.asked: list[list[int]] = []
        self.dies_after = 10**9
        self.busy = 0
        self.table = table
        self.step_tokens = TOKENS

    def ask(self, tokens: int, ends: object) -> tuple[float, dict[str, Any]]:
        if ends == "closed":
            return 1.0, {"bounds": [0, min(2400, self.step_tokens), tokens]}
        assert isinstance(ends, list)
        if max(ends[0], tokens - ends[0]) > self.step_tokens:
            return 9.0, {}
        if self.busy:
            self.busy -= 1
            return 9.0, {}
        if len(self.asked) >= self.dies_after:
            raise RunaheadError("the server is gone")
        self.asked.append(ends)
        return 1 + abs(ends[0] - BEST) / 1e4, {"bounds": [0, *ends], "table": self.table}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda pause_s: None)
    return tmp_path / "sglang_cake" / "runahead"


def search(server: FakeServer, said: list[str] | None = None) -> Partition:
    return runahead_search.search_one(
        server.ask,
        TOKENS,
        2,
        limits=ChainLimits(16, server.step_tokens),
        repeats=1,
        points=3,
        say=(said if said is not None else []).append,
    ).partition


def test_runahead_search_best_partition_is_saved_and_reported(folder: Path) -> None:
    server, said = FakeServer(), []
    server.busy = 3
    found = search(server, said)
    assert abs(found.bounds[1] - BEST) <= 16
    assert load_table(folder / NAME).predict(Span(0, TOKENS), 2, page_tokens=16) == found
    assert any("best" in line and "#1" in line for line in said)
    assert [path.name for path in folder.iterdir()] == [NAME]  # the journal is gone
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600


def test_runahead_search_leaves_out_spans_that_no_member_computes() -> None:
    server = FakeServer()
    server.step_tokens = 2192
    assert search(server).bounds == (0, 2192, TOKENS)
    assert len(server.asked) > 2


def test_runahead_search_stopped_resumes_without_repeating(folder: Path) -> None:
    server = FakeServer()
    server.dies_after = 4
    with pytest.raises(RunaheadError, match="gone"):
        search(server)
    first, server.asked, server.dies_after = server.asked[1:], [], 10**9
    (journal,) = folder.glob("*.jsonl")
    assert journal.stat().st_mode & 0o777 == 0o600
    journal.write_text(journal.read_text() + '\n{"bounds": [0, 5')  # as a crash may leave it
    search(server)
    assert first
    assert not [ends for ends in server.asked[1:] if ends in first]  # [0] is the first contact


def test_runahead_search_keeps_other_lengths_and_workers_in_the_table(folder: Path) -> None:
    known = PartitionTable()
    known.put(8192, even(Span(0, 8192), 2))
    known.put(TOKENS, even(Span(0, TOKENS), 3))
    save_table(folder / NAME, known)
    found = search(FakeServer())
    after = load_table(folder / NAME).entries
    assert after[2][8192] == (0.5, 0.5)
    assert after[2][TOKENS] == found.fractions
    assert len(after[3][TOKENS]) == 3


@pytest.mark.parametrize("name", [None, "../../x.json", "/etc/x.json", "a b.json", "x.txt", 7])
def test_runahead_search_invalid_table_name_of_the_server_is_refused(name: object) -> None:
    with pytest.raises(RunaheadError, match="folder for the table"):
        search(FakeServer(table=name))


def test_missing_help_is_one_line() -> None:
    server = FakeServer()
    server.busy = 10**9
    with pytest.raises(RunaheadError, match="no member helps") as error:
        search(server)
    assert "\n" not in str(error.value)


@contextlib.contextmanager
def greeting_with(greeting: bytes) -> Iterator[str]:
    """The URL of a server that says this to its first client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(greeting)
                client.recv(4096)

        greets = threading.Thread(target=greet)
        greets.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        greets.join()


def test_runahead_search_of_a_server_of_another_kind_is_one_error_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with greeting_with(b"SSH-2.0-OpenSSH_9.6\r\n") as url:
        assert main(["runahead", "search", "--url", url]) == 2
    assert "no SGLang server answers there" in capsys.readouterr().err


def test_runahead_search_url_with_a_slash_at_its_end_asks_the_same_paths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.requestline.split()[1])  # `path` has no slash twice at its start
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"page_size": 4, "chunked_prefill_size": 4096}')

        def do_POST(self) -> None:
            asked.append(self.requestline.split()[1])
            self.send_error(500)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        serves = threading.Thread(target=server.serve_forever, args=(0.01,))
        serves.start()
        assert main(["runahead", "search", "--url", f"http://127.0.0.1:{server.server_port}/"]) == 2
        server.shutdown()
        serves.join()
    assert asked == ["/server_info", "/generate"]
    assert "does not answer: /generate: 500" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chunk_tokens", "lengths", "most"), [(4096, "4k,16k", 8192), (-1, "64k", 32768)]
)
def test_runahead_search_length_that_the_workers_cannot_share_is_refused(
    chunk_tokens: int, lengths: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"page_size": 4, "chunked_prefill_size": chunk_tokens, "max_prefill_tokens": 16384}
    with greeting_with(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(settings).encode()) as url:
        assert main(["runahead", "search", "--url", url, "--lengths", lengths]) == 2
    assert f"--lengths: 32 to {most} tokens here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lengths", "x"], "--lengths 'x'"),
        (["--workers", "1"], "2 workers or more"),
        (["--points", "4"], "3, 5, ... points"),
        (["--workers", "8"], "1,000 are possible: lower them"),
        (["--workers", "1000000"], "1,000 are possible: lower them"),
        (["--points", "1001"], "1,000 are possible: lower them"),
        (["--url", "http://127.0.0.1:9"], "no SGLang server answers"),
    ],
)
def test_runahead_search_wrong_flags_exit_with_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runahead", "search", *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_watched_table_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    watched, now_s = WatchedTable(path), 0.0
    assert not watched.read(now_s).entries
    found = PartitionTable()
    for tokens in (1024, 2048):
        found.put(tokens, even(Span(0, tokens), 2))
        save_table(path, found)
        assert tokens not in watched.read(now_s + LOOK_S / 2).entries.get(2, {}), "a moment old"
        now_s += LOOK_S
        assert tokens in watched.read(now_s).entries[2]
    path.unlink()
    assert not watched.read(now_s + LOOK_S).entries
    assert not WatchedTable(None).read(now_s).entries
