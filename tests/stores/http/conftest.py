import pytest
from http_servers import STARTED, OurServer, put_description


@pytest.fixture(autouse=True)
def _no_server_outlives_its_test():
    """Also of a test that failed. Those of wider fixtures were started before."""
    before = len(STARTED)
    yield
    for server in STARTED[before:]:
        server.discard()


@pytest.fixture(autouse=True)
def _connections_may_take_long(monkeypatch):
    """Nothing here is about a server that cannot be reached, and a busy one accepts late."""
    monkeypatch.setattr("sglang_cake.stores.http.http_transport.CONNECT_S", 60.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Our server with the token that it made, and the contract's namespace described."""
    it = OurServer(tmp_path_factory.mktemp("store") / "root")
    try:
        put_description(it)
        yield it
    finally:
        status = it.stop()
    assert status == 0
