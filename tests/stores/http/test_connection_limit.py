"""Which connections are kept when more come than there are places."""

import contextlib
import http.client
import itertools

import pytest
from http_servers import (
    BIG_FRAME,
    WAIT_S,
    A,
    OurServer,
    ask,
    framed,
    metrics,
    own_token,
    put_block,
    put_description,
    start_request,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from polling import until

from sglang_cake.stores.http.connection_limit import ConnectionState, Places
from sglang_cake.stores.http.protocol import block_path
from sglang_cake.testing.store_contract import FRAME

PATH = block_path(FRAME.digest, A)
MOST = 8


class PlacesMachine(RuleBasedStateMachine):
    """Beside a model: lists of numbers in the order in which connections came into them."""

    def __init__(self):
        super().__init__()
        self.places, self.came = Places(MOST), 0
        self.strangers, self.idle, self.busy = [], [], []

    def _forget(self, number):
        for each in (self.strangers, self.idle, self.busy):
            if number in each:
                each.remove(number)
                return True
        return False

    @rule()
    def come(self):
        self.came += 1
        is_full = len(self.strangers) + len(self.idle) + len(self.busy) == MOST
        victim = next(iter(self.strangers or self.idle), None) if is_full else None
        assert self.places.take(self.came) == victim
        if is_full and victim is None:
            assert self.places.state_of(self.came) is None
            return
        self._forget(victim)
        assert self.places.state_of(self.came) is ConnectionState.UNAUTHENTICATED
        self.strangers.append(self.came)

    @rule(data=st.data(), to=st.sampled_from([ConnectionState.BUSY, ConnectionState.IDLE, None]))
    def go_on(self, data, to):
        """Any connection that ever was, also one that has left."""
        number = data.draw(st.integers(1, self.came + 1))
        was_there = self._forget(number)
        if to is None:
            self.places.leave(number)
        else:
            self.places.change(number, to)
        if to is not None and was_there:
            (self.busy if to is ConnectionState.BUSY else self.idle).append(number)
        assert self.places.state_of(number) is (to if was_there else None)

    @invariant()
    def bounded(self):
        assert len(self.places) == len(self.strangers) + len(self.idle) + len(self.busy) <= MOST


TestPlaces = PlacesMachine.TestCase


@pytest.fixture
def small(tmp_path):
    """A server with places for 16 connections, in one worker."""
    server = OurServer(tmp_path / "root", limits={"workers": 1, "max_connections": 16})
    put_description(server)
    put_block(server, "a")
    yield server
    assert server.stop() == 0


def connected(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.connect()
    return connection


def get(connection, path=PATH, token=None):
    headers = {"Authorization": f"Bearer {token or own_token()}"}
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def is_closed(connection):
    with contextlib.suppress(ConnectionError):
        return connection.sock.recv(1) == b""
    return True


def test_store_serve_connections_without_a_token_block_no_client(small):
    strangers = [connected(small) for _ in range(64)]
    beginnings = itertools.cycle((b"", b"GET /hea", b"GET / HTTP/1.1\r\nHost: x\r\nX-"))
    for stranger, beginning in zip(strangers, beginnings, strict=False):
        with contextlib.suppress(ConnectionError):  # it was dropped for another
            stranger.sock.sendall(beginning)
    for _ in range(8):
        assert ask(small, "GET", PATH)[::2] == (200, framed("a"))
    assert metrics(small)["dropped_connections_total"] >= 64 - 16
    assert metrics(small)["refused_connections_total"] == 0
    # 16, and the one that asks has taken another's: what closes is counted a moment later.
    until(lambda: metrics(small)["connections"] <= 16, "there is a bound")
    assert is_closed(strangers[0])
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("path", "token", "status"), [("/health", "none", 200), (PATH, "none", 401), ("/", "x", 401)]
)
def test_store_serve_answer_without_a_valid_token_closes_the_connection(small, path, token, status):
    stranger = connected(small)
    for _ in range(2):
        stranger.connect()
        stranger.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        response = stranger.getresponse()
        assert (response.status, response.headers["Connection"]) == (status, "close")
        response.read()
        assert response.isclosed()


def test_store_serve_wrong_token_on_a_known_connection_closes_it(small):
    connection = connected(small)
    assert get(connection, "/stats")[0] == 200
    assert get(connection, "/health")[0] == 200
    sock = connection.sock
    assert get(connection, "/stats", "x" * 20)[0] == 401
    assert sock.fileno() == -1  # the answer said so


def test_store_serve_full_closes_the_longest_idle_connection(tmp_path):
    limits = {"workers": 1, "max_connections": 4}
    with OurServer(tmp_path / "root", limits=limits) as server:
        known = [connected(server) for _ in range(4)]
        for connection in (*known, known[0]):
            assert get(connection, "/stats")[0] == 200
        fresh = connected(server)
        assert get(fresh, "/stats")[0] == 200
        assert is_closed(known[1])
        for connection in (known[0], known[2], known[3], fresh):
            assert get(connection, "/health")[0] == 200
            connection.close()


def test_store_serve_full_never_drops_a_connection_being_answered(tmp_path):
    limits = {"workers": 1, "max_connections": 2}
    with OurServer(tmp_path / "root", limits=limits) as server:
        put_description(server, BIG_FRAME)
        put_block(server, "a", BIG_FRAME)
        asked = f"GET {block_path(BIG_FRAME.digest, A)} HTTP/1.1\nHost: x\n"
        readers = [start_request(server, asked) for _ in range(2)]
        got = [reader.recv(1000) for reader in readers]  # 8 MiB: the rest waits for us
        assert ask(server, "GET", "/stats")[0] == 503
        for reader, begun in zip(readers, got, strict=True):
            body = bytearray(begun.partition(b"\r\n\r\n")[2])
            while len(body) < BIG_FRAME.framed_bytes:
                body += reader.recv(1 << 20)
            assert body == framed("a", frame=BIG_FRAME)
        until(lambda: ask(server, "GET", "/stats")[0] == 200, "a reader makes room")
        assert metrics(server)["refused_connections_total"] >= 1
