"""An S3 service that sends its clients elsewhere, or answers without an end."""

import asyncio
import contextlib
import dataclasses

import pytest
from aiohttp import web
from filestore import closing
from moto_process import patient
from test_s3 import credentials  # noqa: F401 - a fixture
from web_server import serving

from sglang_cake.core.errors import ConfigError, StoreError, StoreUnavailable
from sglang_cake.stores.circuit_breaker import TimeoutLimits
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.s3.bucket import MAX_PAGE_BYTES, MAX_WORDS_BYTES
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

A = key_of("a")
BUFFERED_BYTES = 2**23  # of sockets and pipes between a server and its client, both ends


def source_at(port):
    (source,) = parse_sources(f"s3://bucket?endpoint=http://127.0.0.1:{port}&region=us-east-1")
    return patient(source)


@contextlib.asynccontextmanager
async def served_source(handle):
    async with serving(handle) as port:
        yield source_at(port)


async def outcomes(source):
    """What each call of a store on it ends with."""
    store = source.open(FRAME, depth=2)

    async def of(call):
        try:
            return await call
        except StoreError as error:
            return error

    try:
        return [
            await of(store.put(A, block_of("a"))),
            await of(store.contains([A])),
            await of(read(store, A)),
            await of(anext(store.list_blocks())),
            await of(store.delete(A)),
        ]
    finally:
        await store.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_s3_store_redirect_to_another_host_is_not_followed(status, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-a-session")
    reached = []

    async def elsewhere(request):
        reached.append((request.method, dict(request.headers), await request.read()))
        data = FRAME.header(A, block_of("a")) + bytes(block_of("a"))
        return web.Response(body=data if request.method == "GET" else b"")

    async def redirect(request):
        await request.read()
        where = f"http://key:secret@127.0.0.1:{port}{request.path}?X-Amz-Signature=ab"
        return web.Response(status=status, headers={"Location": where})

    async with serving(elsewhere) as port, served_source(redirect) as source:
        ended = await outcomes(source)
    for outcome in ended:
        assert isinstance(outcome, StoreUnavailable)
        assert f"answers {status}" in str(outcome)
        assert "127.0.0.1" in str(outcome)
        assert "secret" not in str(outcome)
        assert "Signature" not in str(outcome)
    assert reached == []


WRONG_REGION = {
    "PermanentRedirect": (301, "<Endpoint>bucket.s3.eu-west-3.example</Endpoint>"),
    "TemporaryRedirect": (307, "<Endpoint>bucket.s3.eu-west-3.example</Endpoint>"),
    "AuthorizationHeaderMalformed": (400, "<Region>eu-west-3</Region>"),
    "IllegalLocationConstraintException": (400, "<Region>eu-west-3</Region>"),
}


@pytest.mark.parametrize(
    ("code", "headers"),
    [
        *((code, {}) for code in WRONG_REGION),
        ("PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}),
    ],
)
async def test_s3_source_check_of_a_bucket_elsewhere_names_its_region(code, headers):
    status, detail = WRONG_REGION[code]
    regions = []

    async def wrong(request):
        await request.read()
        regions.append(request.headers["Authorization"].split("/")[2])
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code>{detail}</Error>"
        return web.Response(status=status, text=text, headers=headers)

    async with served_source(wrong) as source:
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(source.check)
        asked = len(regions)
        for outcome in await outcomes(source):
            assert isinstance(outcome, StoreUnavailable)
    said = str(caught.value)
    assert asked == 1
    assert set(regions) == {"us-east-1"}
    assert "eu-west-3" in said
    assert "write the bucket's own endpoint= and region=" in said
    assert "\n" not in said


@pytest.mark.parametrize("status", [200, 301, 403, 404, 500])
async def test_s3_store_endless_answer_is_cut_off_as_unavailable(status):
    sent = []

    async def handle(request):
        count = 0
        await request.read()
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        try:
            while count <= 16 * MAX_PAGE_BYTES:
                await answer.write(bytes(2**16))
                count += 2**16
        finally:
            sent.append((request.method, request.query_string, count))
        return answer

    async with served_source(handle) as source:
        ended = await outcomes(source)
    for outcome in ended[2:4]:
        assert isinstance(outcome, StoreUnavailable)
    for method, query, count in sent:
        listing = method == "GET" and "list-type" in query and status == 200
        at_most = MAX_PAGE_BYTES if listing else MAX_WORDS_BYTES
        if method != "HEAD":
            assert count <= at_most + BUFFERED_BYTES, (method, query)
    assert {method for method, _, _ in sent} >= {"PUT", "GET", "DELETE"}


async def test_s3_store_listing_of_the_longest_names_is_read():
    name = FRAME.digest.hex() + "/" + 959 * "&"
    item = f"<Contents><Key>{name.replace('&', '&amp;')}</Key><Size>1</Size></Contents>"

    async def handle(request):
        text = f"<?xml version='1.0'?><ListBucketResult>{1000 * item}</ListBucketResult>"
        return web.Response(text=text, content_type="application/xml")

    async with served_source(handle) as source, closing(source.open(FRAME, depth=1)) as store:
        # None of them is a block's name.
        assert [block async for block in store.list_blocks()] == []


@pytest.mark.parametrize("part", ["head", "body"])
async def test_s3_store_trickling_answer_times_out_as_unavailable(part):
    impatient = TimeoutLimits(first_s=0.3, floor_s=0.3)

    async def serve_slowly(reader, writer):
        head = b"HTTP/1.1 200 OK\r\n"
        if part == "body":
            head += f"Content-Length: {FRAME.framed_bytes}\r\n\r\n".encode()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(3000):  # far less than READ_TIMEOUT_S apart
                writer.write(head + b"x")
                head = b""
                await writer.drain()
                await asyncio.sleep(0.01)

    server = await asyncio.start_server(serve_slowly, "127.0.0.1", 0)
    source = source_at(server.sockets[0].getsockname()[1])
    store = dataclasses.replace(source, limits=impatient).open(FRAME, depth=2)
    try:
        with pytest.raises(StoreUnavailable, match="no whole"):
            await read(store, A)
    finally:
        await store.close()
        server.close()


async def test_s3_source_endless_namespace_listing_is_unavailable():
    pages = []

    async def handle(request):
        pages.append(request)
        assert len(pages) < 20
        folders = "".join(
            f"<CommonPrefixes><Prefix>{len(pages):032x}{n:032x}/</Prefix></CommonPrefixes>"
            for n in range(10)
        )
        return web.Response(
            content_type="application/xml",
            text="<?xml version='1.0'?><ListBucketResult><IsTruncated>true</IsTruncated>"
            f"<NextContinuationToken>{len(pages)}</NextContinuationToken>{folders}"
            "</ListBucketResult>",
        )

    async with served_source(handle) as source:
        with pytest.raises(StoreUnavailable, match="more than 50 folders"):
            await dataclasses.replace(source, most_namespaces=50).namespaces()
