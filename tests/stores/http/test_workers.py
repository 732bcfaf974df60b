"""Several processes answer on one port: they count together, end together, and are replaced."""

import contextlib
import errno
import http.client
import os
import signal

import pytest
from http_servers import (
    BIG_FRAME,
    FRAMED_BYTES,
    WAIT_S,
    A,
    OurServer,
    ask,
    connects,
    framed,
    is_alive,
    metrics,
    own_token,
    put_block,
    put_description,
    read_status,
    start_put,
    start_request,
)
from polling import until
from serve_process import SLOW_S
from system_calls import failing

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.server_metrics import FILE_BYTES, FILES, ServerMetrics
from sglang_cake.testing.store_contract import FRAME

PATH = block_path(FRAME.digest, A)


def sent_blocks(server):
    """Counted a moment after the last byte of each has been sent."""
    return metrics(server)["sent_bytes_total"] / FRAMED_BYTES


@pytest.fixture
def server(tmp_path):
    it = OurServer(tmp_path / "root", "--workers", 3)
    put_description(it)
    put_block(it, "a")
    return it


def connected(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.connect()
    return connection


def get(connection, path=PATH):
    connection.request("GET", path, headers={"Authorization": f"Bearer {own_token()}"})
    return connection.getresponse().read()


def answers(server):
    """Whether a worker answers, and was not killed meanwhile."""
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return ask(server, "GET", "/health")[0] == 200
    return False


def test_workers_count_together_and_those_that_die_are_replaced(server):
    readers = [connected(server) for _ in range(6)]
    for _ in range(2):
        for reader in readers:
            assert get(reader) == framed("a")
    until(lambda: sent_blocks(server) == 12, "all are counted")
    found = metrics(server)
    assert found["workers"] == len(server.workers()) == 3
    assert found["connections"] >= 6
    victims = server.workers()
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: len({*server.workers()} - {*victims}) == 3, "they are replaced")
    for reader in readers:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(reader)
        reader.close()
    fresh = [connected(server) for _ in range(6)]
    assert all(get(reader) == framed("a") for reader in fresh)
    # The counts of the dead workers are kept, and their connections are gone.
    until(lambda: sent_blocks(server) == 12 + 6, "all are counted")
    assert metrics(server)["blocks"] == 1
    for reader in fresh:
        reader.close()
    until(lambda: metrics(server)["connections"] == 1, "only the one that asks")
    assert server.stop() == 0


def test_server_metrics_skip_the_file_of_a_process_that_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (tmp_path / "counter_7.db").touch()
    assert ServerMetrics().text({"blocks": 3}).endswith(b"sglang_cake_store_blocks 3.0\n")


def test_store_serve_metrics_files_have_their_room_before_they_are_written(tmp_path, monkeypatch):
    """They are memory-mapped: a page that finds no room on a full disk kills the process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with OurServer(tmp_path / "root", "--workers", 2):
        files = [path.stat() for path in tmp_path.glob("sglang-cake-serve-*/*.db")]
        assert len(files) == 2 * len(FILES)
        for file in files:
            assert file.st_blocks * 512 >= file.st_size == FILE_BYTES


def test_server_metrics_without_room_are_one_error_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(StoreUnavailable, match=f"no room for metrics in {tmp_path}: No space"):
        ServerMetrics()
    assert not list(tmp_path.iterdir())


def test_worker_pool_stopped_or_killed_server_leaves_no_worker(server, tmp_path):
    workers = server.workers()
    assert server.stop() == 0
    assert not any(map(is_alive, workers))
    again = OurServer(tmp_path / "root", "--workers", 3, port=server.port)
    workers = again.workers()
    again.process.kill()
    again.ended()
    until(lambda: not any(map(is_alive, workers)), "workers end with their parent")


def test_store_serve_start_removes_the_temporary_folder_of_a_killed_server(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def folders():
        return list(tmp_path.glob("sglang-cake-serve-*"))

    killed = OurServer(tmp_path / "root")
    (left,) = folders()
    killed.kill()
    assert list(left.glob("counter_*.db"))
    again = OurServer(tmp_path / "root")
    (used,) = folders()
    assert used != left
    assert again.stop() == 0
    assert folders() == []


def test_worker_pool_terminated_worker_finishes_its_put(tmp_path):
    server = OurServer(tmp_path / "root", "--workers", 1)
    put_description(server, BIG_FRAME)
    connection, rest = start_put(server, "a", BIG_FRAME, 1000)
    (worker,) = server.workers()
    until(lambda: metrics(server)["puts_in_progress"] == 1, "the put is in progress")
    os.kill(worker, signal.SIGTERM)
    waiting = start_request(server, "GET /health HTTP/1.1\nHost: x\n")  # for the next worker
    connection.sendall(rest)
    assert read_status(connection) == 201
    assert read_status(waiting) == 200
    until(lambda: server.workers() and worker not in server.workers(), "replaced")
    path = block_path(BIG_FRAME.digest, A)
    assert ask(server, "GET", path)[2] == framed("a", frame=BIG_FRAME)
    assert server.stop() == 0


def test_worker_pool_irreplaceable_worker_is_tried_again_while_others_go_on(tmp_path):
    root, moved = tmp_path / "root", tmp_path / "moved"
    server = OurServer(root, "--workers", 2)
    victim, other = server.workers()
    root.rename(moved)
    root.write_text("no folder")
    os.kill(victim, signal.SIGKILL)
    line = "a worker cannot start; the others go on"
    until(lambda: line in server.stderr(), "there is a line about it")
    assert ask(server, "GET", "/health")[0] == 200
    root.unlink()
    moved.rename(root)
    until(lambda: len(server.workers()) == 2, "it is replaced")
    assert other in server.workers()
    assert server.stop() == 0
    assert "Traceback" not in server.stderr()
    (found,) = (each for each in server.stderr().splitlines() if line in each)
    assert str(root) in found


def test_worker_pool_worker_that_ends_soon_each_time_is_replaced_after_longer_pauses(tmp_path):
    server = OurServer(tmp_path / "root", limits={"workers": 1})
    for pause in ("in 1 s", "in 2 s"):
        assert ask(server, "GET", "/health")[0] == 200
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        line = f"worker {worker} ended and is replaced "
        until(lambda line=line: line in server.stderr(), "there is a line about it")
        assert line + pause in server.stderr()
    assert server.stop() == 0


def test_worker_pool_last_worker_that_cannot_be_replaced_ends_the_server(tmp_path):
    root = tmp_path / "root"
    server = OurServer(root, "--workers", 2)
    workers = server.workers()
    root.rename(tmp_path / "moved")
    root.write_text("no folder")
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    assert server.ended() == 2
    assert not connects(server.port)
    assert "Traceback" not in server.stderr()
    assert str(root) in server.stderr().splitlines()[-1]


def test_worker_pool_suspended_worker_is_killed_and_replaced(tmp_path):
    server = OurServer(tmp_path / "root", limits={"workers": 2, "hang_s": 2})
    victim = server.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: not is_alive(victim), "it is killed")
    until(lambda: len(server.workers()) == 2, "it is replaced")
    # A busy machine may hold a healthy worker up for so long, too: it is killed, and replaced.
    until(lambda: all(answers(server) for _ in range(4)), "both answer")
    assert server.stop() == 0


def test_worker_pool_worker_suspended_before_its_first_report_is_killed_and_replaced(tmp_path):
    server = OurServer(tmp_path / "root", limits={"workers": 2, "hang_s": 2})
    (suspend := tmp_path / "suspend").touch()
    os.kill(server.workers()[0], signal.SIGKILL)
    suspended = int(until(suspend.read_text, "its replacement is suspended"))
    until(lambda: not is_alive(suspended), "it is killed")
    until(lambda: len(server.workers()) == 2, "it is replaced")
    until(lambda: all(answers(server) for _ in range(4)), "both answer")
    assert server.stop() == 0


def test_worker_pool_worker_that_takes_longer_to_start_than_a_hang_is_not_killed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = OurServer(tmp_path / "root", limits={"workers": 2, "hang_s": int(SLOW_S) - 2})
    (slow := tmp_path / "slow").touch()
    os.kill(server.workers()[0], signal.SIGKILL)
    starting = int(until(slow.read_text, "its replacement starts"))
    until(lambda: [*tmp_path.glob(f"*/ready-{starting}")], "it is ready", WAIT_S)
    assert server.stop() == 0


def test_worker_pool_connections_to_a_suspended_worker_are_served_later(tmp_path):
    server = OurServer(tmp_path / "root", limits={"workers": 1, "hang_s": 1000})
    (worker,) = server.workers()
    os.kill(worker, signal.SIGSTOP)
    asked = "GET /stats HTTP/1.1\nHost: x\n"
    connections = [start_request(server, asked) for _ in range(500)]
    os.kill(worker, signal.SIGCONT)
    for connection in connections:
        assert read_status(connection) == 200
        connection.close()
    assert server.stop() == 0


def test_store_serve_signal_to_all_processes_stops_it_once(server):
    """As a service manager sends it, and a terminal."""
    reader = connected(server)
    assert get(reader) == framed("a")
    for pid in (*server.workers(), server.process.pid):
        os.kill(pid, signal.SIGINT)
    assert server.ended() == 0
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(reader)
