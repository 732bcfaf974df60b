"""Clients that close the connection before their request is answered, as after a time limit."""

import json
import os
import secrets

import pytest
from http_servers import (
    BIG_FRAME,
    WAIT_S,
    A,
    B,
    ServerInProcess,
    ask,
    fill_root,
    framed,
    own_token,
    put_block,
    request_bytes,
    start_put,
)
from polling import until
from system_calls import Held

from sglang_cake.stores.http.protocol import STATS, block_path
from sglang_cake.stores.http.request_body import RECEIVE_BYTES
from sglang_cake.stores.http.server_blocks import READ_THREADS, BlockCheck

PATH = block_path(BIG_FRAME.digest, A)


@pytest.fixture
def server(tmp_path):
    """It has block A of BIG_FRAME."""
    fill_root(tmp_path / "root", BIG_FRAME)
    with ServerInProcess(tmp_path / "root") as it:
        yield it


def hang_up(server, connections):
    """Close them; returns once the server has noticed."""
    for connection in connections:
        connection.close()
    until(lambda: server.metrics()["connections"] == 0, "the server has noticed")


def test_store_serve_readers_that_left_are_not_read_for(server, monkeypatch):
    held = Held(os.pread)
    monkeypatch.setattr(os, "pread", held)
    gone = [server.connect() for _ in range(4 * READ_THREADS)]
    for connection in gone:
        connection.sendall(request_bytes(PATH))
    until(lambda: held.calls == READ_THREADS, "the disk holds every thread")
    until(lambda: server.metrics()["connections"] == len(gone), "all others wait")
    hang_up(server, gone)
    held.go.set()
    assert ask(server, "GET", PATH)[::2] == (200, framed("a", frame=BIG_FRAME))
    assert held.calls == READ_THREADS + 1


# The server reads the whole part of the body that is sent: while its buffer is full, it does not
# notice that the connection is closed.
def stored_in(server):
    stats = json.loads(ask(server, "GET", STATS)[2])
    del stats["unused_bytes"]  # of the disk, which others use
    return stats


@pytest.mark.parametrize(
    ("owner", "name", "sent_bytes"),
    [(secrets, "token_hex", 1), (os, "writev", RECEIVE_BYTES)],  # the first is for the file's name
    ids=["begun", "partly written"],
)
def test_store_serve_put_whose_client_left_leaves_nothing(
    server, tmp_path, monkeypatch, owner, name, sent_bytes
):
    before = stored_in(server)
    held = Held(getattr(owner, name))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, held)
        connection, _ = start_put(server, "b", BIG_FRAME, sent_bytes)
        assert held.entered.wait(WAIT_S)
        hang_up(server, [connection])
        held.go.set()
        until(lambda: server.metrics()["puts_in_progress"] == 0, "it has ended")
    assert stored_in(server) == before
    assert [path.name for path in (tmp_path / "root").rglob("*") if ".tmp-" in path.name] == []
    assert ask(server, "HEAD", block_path(BIG_FRAME.digest, B))[0] == 404
    assert put_block(server, "b", BIG_FRAME) == 201


def test_store_serve_put_whose_client_left_during_the_commit_is_stored(server, monkeypatch):
    held = Held(BlockCheck.finish)
    monkeypatch.setattr(BlockCheck, "finish", lambda check: held(check))
    connection, _ = start_put(server, "b", BIG_FRAME, BIG_FRAME.framed_bytes)
    assert held.entered.wait(WAIT_S)
    hang_up(server, [connection])
    held.go.set()
    until(lambda: server.metrics()["puts_in_progress"] == 0, "it has ended")
    stored = ask(server, "GET", block_path(BIG_FRAME.digest, B))
    assert stored[::2] == (200, framed("b", frame=BIG_FRAME))
    assert put_block(server, "b", BIG_FRAME) == 204


def test_store_serve_check_whose_client_left_sets_the_corrupt_block_aside(
    server, tmp_path, monkeypatch
):
    (file,) = (tmp_path / "root").rglob(A.hex())
    with file.open("r+b") as block:
        block.seek(-1, os.SEEK_END)
        block.write(b"?")
    held = Held(os.pread)
    monkeypatch.setattr(os, "pread", held)
    connection = server.connect()
    report = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {own_token()}\r\n\r\n"
    connection.sendall(report.encode())
    assert held.entered.wait(WAIT_S)
    hang_up(server, [connection])
    held.go.set()
    until(lambda: not file.exists(), "it is set aside")
