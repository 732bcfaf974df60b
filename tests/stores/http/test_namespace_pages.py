"""The namespaces of a store, which the server lists in pages."""

import json

import pytest
from bad_server import bad_server
from http_servers import ServerInProcess, ask
from namespace_folder import NamespaceFolder

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import MAX_DESCRIPTION_BYTES, digest_of
from sglang_cake.stores.base import StoredNamespace
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.http_store import HttpSource
from sglang_cake.stores.open_store import parse_sources


def stored_namespaces(count, size_bytes=100):
    described = [{"number": str(number), "more": "x" * size_bytes} for number in range(count)]
    return [StoredNamespace(digest_of(fields), fields) for fields in described]


@pytest.fixture
def served(tmp_path):
    """A server, and a function that writes namespaces to its folder."""

    def write(namespaces):
        for each in namespaces:
            place = NamespaceFolder(tmp_path, each.digest)
            place.folder.mkdir()
            place.description.write_text(json.dumps(each.fields))

    with ServerInProcess(tmp_path) as server:
        yield server, write


def by_digest(namespaces):
    return sorted(namespaces, key=lambda each: each.digest)


async def listed(base):
    (source,) = parse_sources(base)
    return await source.namespaces()


async def test_http_source_namespaces_that_exceed_one_answer_are_all_listed(served):
    server, write = served
    spaces = stored_namespaces(
        protocol.MAX_ANSWER_BYTES // MAX_DESCRIPTION_BYTES + 10, MAX_DESCRIPTION_BYTES - 100
    )
    write(spaces)
    assert await listed(f"http://127.0.0.1:{server.port}") == by_digest(spaces)


async def test_http_source_namespaces_of_one_page_take_one_request(served):
    server, write = served
    spaces = stored_namespaces(3)
    write(spaces)
    assert await listed(f"http://127.0.0.1:{server.port}") == by_digest(spaces)
    assert server.metrics()['requests_total{method="GET",status="200"}'] == 1


def test_store_serve_namespaces_without_a_page_are_all(served, monkeypatch):
    """As clients of 0.1.0 ask for them."""
    monkeypatch.setattr(protocol, "NAMESPACES_PAGE_BYTES", 1)
    server, write = served
    spaces = stored_namespaces(3)
    write(spaces)
    _, headers, body = ask(server, "GET", protocol.NAMESPACES)
    assert by_digest(protocol.read_namespaces(body)) == by_digest(spaces)
    assert protocol.MORE_HEADER.lower() not in headers
    _, headers, body = ask(server, "GET", protocol.namespaces_path(None))
    assert protocol.read_namespaces(body) == by_digest(spaces)[:1]
    assert headers[protocol.MORE_HEADER.lower()] == protocol.MORE


async def test_http_source_namespaces_of_a_server_without_pages_are_all_listed():
    spaces = stored_namespaces(3)

    async def answer(asked):
        asked.answer(200, json.dumps(protocol.write_namespaces(spaces)).encode())

    async with bad_server(answer) as server:
        assert await listed(server.base) == spaces
        assert len(server.asked) == 1


@pytest.mark.parametrize("spaces", [[], stored_namespaces(1)], ids=["empty", "the same again"])
async def test_http_source_pages_that_lead_nowhere_are_unavailable(spaces):
    async def answer(asked):
        body = json.dumps(protocol.write_namespaces(spaces)).encode()
        asked.answer(200, body, headers=f"{protocol.MORE_HEADER}: {protocol.MORE}\r\n")

    async with bad_server(answer) as server:
        with pytest.raises(StoreUnavailable, match="out of order"):
            await listed(server.base)


async def test_http_source_namespaces_without_end_are_an_error_beyond_a_bound():
    pages = iter(by_digest(stored_namespaces(1000)))

    async def answer(asked):
        body = json.dumps(protocol.write_namespaces([next(pages)])).encode()
        asked.answer(200, body, headers=f"{protocol.MORE_HEADER}: {protocol.MORE}\r\n")

    async with bad_server(answer) as server:
        source = HttpSource(server.base, max_namespaces_bytes=10_000)
        with pytest.raises(StoreUnavailable, match="more than 10000 bytes"):
            await source.namespaces()
