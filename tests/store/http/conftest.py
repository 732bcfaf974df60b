import pytest
from http_servers import OurServer, claim


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Our server, open to everybody on this machine, with the contract's namespace claimed."""
    it = OurServer(tmp_path_factory.mktemp("store") / "root")
    try:
        claim(it)
        yield it
    finally:
        status = it.stop()
    assert status == 0
