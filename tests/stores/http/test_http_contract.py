"""The client passes the shipped contract against real servers: ours in all its forms, and nginx."""

import secrets
from dataclasses import replace

import pytest
from http_servers import A, B, Nginx, OurServer, make_certificate, opened_client, write_token
from private_files import write_private

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import Namespace
from sglang_cake.stores.base import StoredNamespace
from sglang_cake.stores.encrypted import EncryptedStore
from sglang_cake.stores.http.http_store import HttpStore
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.testing.store_contract import FRAME, StoreContract, block_of, read


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="module")
def open_server(places):
    server = OurServer(places / "open")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def guarded_server(places):
    """With TLS, a token and a capacity."""
    cert, key = make_certificate(places)
    server = OurServer(
        places / "guarded",
        *("--tls-cert", cert, "--tls-key", key),
        *("--token-file", write_token(places), "--capacity", "64MB"),
    )
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def nginx(places):
    folder = places / "nginx"
    folder.mkdir()
    server = Nginx(folder, folder / "root")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(open_server, places):
    folder = places / "proxy"
    folder.mkdir()
    server = Nginx(folder, folder, before=open_server.base)
    yield server
    server.stop()


def fresh_frame(frame=FRAME):
    """A namespace that no test has written in yet."""
    fields = (*frame.namespace.fields, ("test", secrets.token_hex(8)))
    return replace(frame, namespace=Namespace(fields))


class TestHttpStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, open_server):
        self.base = open_server.base

    def open(self, folder):
        store = parse_sources(self.base)[0].open(fresh_frame(self.frame), depth=4)
        assert isinstance(store, HttpStore)
        return store


class TestHttpsStoreWithTokenAndCapacity(TestHttpStore):
    @pytest.fixture(autouse=True)
    def _serve(self, guarded_server, places):
        self.base = f"{guarded_server.base}?token_file={places}/token&ca={places}/cert.pem"


class TestSealedHttpStore(TestHttpStore):
    """One call at a time."""

    tells_progress = False

    @pytest.fixture(autouse=True)
    def _serve(self, open_server, places):
        path = write_private(places / "key", "0" * 64)
        self.base = f"{open_server.base}?key_file={path}"

    def open(self, folder):
        store = parse_sources(self.base)[0].open(fresh_frame(self.frame), depth=1)
        assert isinstance(store, EncryptedStore)
        return store


class TestHttpStoreOnNginx(TestHttpStore):
    can_list = False

    @pytest.fixture(autouse=True)
    def _serve(self, nginx):
        self.base = nginx.base


class TestHttpStoreBelowAPath(TestHttpStore):
    """Another server in front that knows nothing of blocks."""

    @pytest.fixture(autouse=True)
    def _serve(self, proxy):
        self.base = f"{proxy.base}/kv/"


async def test_http_store_block_put_through_store_serve_is_read_through_nginx(open_server, places):
    """The same folder, two servers: the paths are those of a file store."""
    folder = places / "beside"
    folder.mkdir()
    nginx, frame = Nginx(folder, places / "open"), fresh_frame()
    try:
        async with opened_client(open_server.base, frame=frame) as store:
            assert await store.put(A, block_of("a"))
        async with opened_client(nginx.base, frame=frame) as store:
            assert await store.contains([A, B]) == [True, False]
            assert await read(store, A) == block_of("a")
            assert await store.put(A, block_of("a")) is False
            with pytest.raises(StoreUnavailable, match="cannot list"):
                await anext(aiter(store.list_blocks()))
    finally:
        nginx.stop()


async def test_http_source_namespaces_are_listed_by_store_serve_not_nginx(open_server, nginx):
    frame = fresh_frame()

    async def look(base):
        (source,) = parse_sources(base)
        return await source.namespaces()

    async with opened_client(open_server.base, frame=frame) as store:
        assert await store.put(A, block_of("a"))
    told = StoredNamespace(frame.digest, frame.namespace.describe())
    assert told in await look(open_server.base)
    with pytest.raises(StoreUnavailable, match="cannot list"):
        await look(nginx.base)
