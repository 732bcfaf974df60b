"""Several processes answer on one port: they count together, end together, and are replaced."""

import http.client
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from http_servers import (
    BIG_FRAME,
    FRAMED_BYTES,
    WAIT_S,
    A,
    OurServer,
    ask,
    claim,
    connects,
    framed,
    is_alive,
    own_token,
    poll,
    put_block,
    read_status,
    serve_environment,
    start_put,
    start_request,
)

from sglang_cake.stores.http.protocol import block_path
from sglang_cake.stores.http.shared_counters import STATUSES, SharedCounters
from sglang_cake.testing.store_contract import FRAME

PATH = block_path(FRAME.digest, A)


@pytest.fixture
def server(tmp_path):
    it = OurServer(tmp_path / "root", "--workers", 3)
    claim(it)
    put_block(it, "a")
    return it


def metrics(server):
    return parsed(ask(server, "GET", "/metrics")[2])


def parsed(said):
    return dict(re.findall(r"^sglang_cake_store_(\S+) (\d+)$", said.decode(), re.MULTILINE))


def sent_blocks(server):
    """Counted a moment after the last byte of each has been sent."""
    return int(metrics(server)["sent_bytes_total"]) / FRAMED_BYTES


def connected(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.connect()
    return connection


def get(connection, path=PATH):
    connection.request("GET", path, headers={"Authorization": f"Bearer {own_token()}"})
    return connection.getresponse().read()


def metrics_over(connection):
    return parsed(get(connection, "/metrics"))


def test_connections_are_dealt_evenly_and_counted_together(server):
    readers = [connected(server)]
    # A worker counts a connection as closed a moment after the one who closed it has gone on.
    poll(lambda: metrics_over(readers[0])["connections"] == "1", "the fixture's have ended")
    readers += [connected(server) for _ in range(5)]
    for _ in range(2):
        for reader in readers:
            assert get(reader) == framed("a")
    poll(lambda: sent_blocks(server) == 12, "all are counted")
    assert int(metrics(server)["workers"]) == len(server.workers()) == 3
    victim = server.workers()[0]
    os.kill(victim, signal.SIGKILL)
    broken = 0
    for reader in readers:
        try:
            assert get(reader) == framed("a")
        except (ConnectionError, http.client.HTTPException):
            broken += 1
    assert broken == 2
    poll(lambda: len(server.workers()) == 3 and victim not in server.workers(), "replaced")
    fresh = [connected(server) for _ in range(6)]
    assert all(get(reader) == framed("a") for reader in fresh)
    # What the dead one had counted is still there.
    poll(lambda: sent_blocks(server) == 12 + 4 + 6, "all are counted")
    assert int(metrics(server)["blocks"]) == 1
    for reader in (*readers, *fresh):
        reader.close()
    assert server.stop() == 0


def test_none_is_left_when_the_server_has_stopped_or_was_killed(server, tmp_path):
    workers = server.workers()
    assert server.stop() == 0
    assert not any(map(is_alive, workers))
    again = OurServer(tmp_path / "root", "--workers", 3, port=server.port)
    workers = again.workers()
    again.process.kill()
    again.ended()
    poll(lambda: not any(map(is_alive, workers)), "workers end with their parent")
    once_more = OurServer(tmp_path / "root", port=server.port)
    assert ask(once_more, "GET", PATH)[2] == framed("a")
    assert once_more.stop() == 0


def test_a_worker_that_is_told_to_end_finishes_what_it_has(tmp_path):
    server = OurServer(tmp_path / "root", "--workers", 1)
    claim(server, BIG_FRAME)
    connection, rest = start_put(server, "a", BIG_FRAME, 1000)
    (worker,) = server.workers()
    poll(lambda: int(metrics(server)["puts_in_progress"]) == 1, "the put is under way")
    os.kill(worker, signal.SIGTERM)
    waiting = start_request(server, "GET /health HTTP/1.1\nHost: x\n")  # for the next worker
    connection.sendall(rest)
    assert read_status(connection) == 201
    assert read_status(waiting) == 200
    poll(lambda: server.workers() and worker not in server.workers(), "replaced")
    path = block_path(BIG_FRAME.digest, A)
    assert ask(server, "GET", path)[2] == framed("a", frame=BIG_FRAME)
    assert server.stop() == 0


def test_the_server_ends_when_a_worker_cannot_be_replaced(tmp_path, capfd):
    root = tmp_path / "root"
    server = OurServer(root, "--workers", 2)
    workers = server.workers()
    root.rename(tmp_path / "moved")
    root.write_text("no folder")
    os.kill(workers[0], signal.SIGKILL)
    assert server.ended() == 2
    assert not any(map(is_alive, workers))
    assert not connects(server.port)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert str(root) in said.splitlines()[-1]


WORKER_THAT_HANGS = """
import signal, socket
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.http.prefork import WorkerPool
from sglang_cake.stores.http.shared_counters import SharedCounters

def answer(channel, counts):
    channel.send(b"no disk")
    while True:
        signal.pause()

try:
    WorkerPool(socket.create_server(("127.0.0.1", 0)), SharedCounters(2), answer).run(lambda: None)
except StoreUnavailable as error:
    print(error)
"""


def test_a_worker_that_hangs_after_it_said_why_it_cannot_begin_holds_nothing_up():
    command = [sys.executable, "-c", WORKER_THAT_HANGS]
    done = subprocess.run(
        command, env=serve_environment(), timeout=WAIT_S, check=True, capture_output=True, text=True
    )
    assert done.stdout == "no disk\n"


def test_a_worker_that_is_stopped_for_good_is_replaced(tmp_path):
    server = OurServer(tmp_path / "root", "--workers", 2, limits={"prefork.DEAD_LOOKS": 5})
    victim = server.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    poll(lambda: not is_alive(victim), "it is killed")
    poll(lambda: len(server.workers()) == 2, "it is replaced")
    for _ in range(4):
        assert ask(server, "GET", "/health")[0] == 200
    assert server.stop() == 0


def test_connections_that_no_worker_takes_in_wait_until_one_does(tmp_path):
    """More than wait on the way to a worker."""
    limits = {"prefork.DEAD_LOOKS": 10**6}
    server = OurServer(tmp_path / "root", "--workers", 1, limits=limits)
    (worker,) = server.workers()
    os.kill(worker, signal.SIGSTOP)
    asked = "GET /stats HTTP/1.1\nHost: x\n"
    connections = [start_request(server, asked) for _ in range(500)]
    os.kill(worker, signal.SIGCONT)
    for connection in connections:
        assert read_status(connection) == 200
        connection.close()
    assert server.stop() == 0


def test_a_parent_without_descriptors_waits_and_goes_on(tmp_path, capfd):
    server, said = OurServer(tmp_path / "root", "--workers", 1), []
    pid = server.process.pid

    def cpu_s():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def warnings():
        said.append(capfd.readouterr().err)
        return "".join(said).count("no connection is accepted")

    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    waiting = start_request(server, "GET /health HTTP/1.1\nHost: x\n")
    poll(warnings, "it has noticed")
    before_s, before = cpu_s(), warnings()
    poll(lambda: warnings() >= before + 2, "it tries again")
    assert cpu_s() - before_s < 0.5  # of about two seconds; it would take all of them
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert read_status(waiting) == 200
    assert server.stop() == 0


def test_a_signal_to_all_processes_at_once_is_one_stop(server):
    """As a service manager sends it, and a terminal."""
    reader = connected(server)
    assert get(reader) == framed("a")
    for pid in (*server.workers(), server.process.pid):
        os.kill(pid, signal.SIGINT)
    assert server.ended() == 0
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(reader)


def test_what_processes_count_adds_up():
    tally = SharedCounters(2)
    one, two = tally.rows
    one["sent_bytes"] += 5
    two["sent_bytes"] += 7
    two["puts"] += 1
    two.answered("GET", 200)
    one.answered("GET", 200)
    one.answered("BREW", 418)
    assert tally.total("sent_bytes") == 12
    assert tally.total("puts") == 1
    assert list(tally.answers()) == [("GET", 200, 2), ("other", 0, 1)]
    two.begin_anew()
    assert tally.total("puts") == 0
    assert tally.total("sent_bytes") == 12


def test_every_status_the_server_answers_with_is_counted_by_name():
    import sglang_cake.stores.http as package

    folder = Path(package.__path__[0])
    files = [
        folder / f"{name}.py"
        for name in ("http_server", "server_blocks", "request_body", "error_responses")
    ]
    text = "".join(path.read_text() for path in files)
    words = re.findall(r"(?:Refused|_error|status=|set_status)\(?(\d{3})", text)
    assert len(words) > 10
    assert {int(word) for word in words} <= set(STATUSES)
