"""The S3 store against servers that only resemble S3, break in the middle, or lie."""

import asyncio
import contextlib
import dataclasses

import pytest
from aiohttp import web
from filestore import closing
from polling import PATIENCE_S
from test_s3 import credentials  # noqa: F401 - a fixture
from web_server import serving

from sglang_cake.core.errors import BlockCorrupt, StoreFull, StoreUnavailable
from sglang_cake.stores.circuit_breaker import AdaptiveTimeout
from sglang_cake.stores.open_store import parse_sources
from sglang_cake.stores.s3.s3_store import LIMITS
from sglang_cake.testing.store_contract import FRAME, block_of, key_of, read

A, B = key_of("a"), key_of("b")
RAW = FRAME.header(A, block_of("a")) + bytes(block_of("a"))


def error(code, status):
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


class Odd:
    """A server of objects in a dict, each of whose answers a test may replace."""

    def __init__(self, **answers):
        self.answers, self.objects, self.seen = answers, {}, []

    async def handle(self, request):
        verb, name = request.method, request.path
        self.seen.append(verb)
        data = await request.read()
        if verb in self.answers:
            answer = await self.answers[verb](self, request)
            if answer is not None:
                return answer
        if verb == "PUT":
            self.objects[name] = data
        elif name not in self.objects:
            return error("NoSuchKey", 404)
        elif verb in ("GET", "HEAD"):
            return web.Response(body=self.objects[name])
        else:
            del self.objects[name]
        return web.Response(status=204 if verb == "DELETE" else 200)

    @contextlib.asynccontextmanager
    async def opened_store(self, limits=LIMITS):
        async with serving(self.handle) as port:
            (source,) = parse_sources(f"s3://bucket?endpoint=http://127.0.0.1:{port}")
            store = dataclasses.replace(source, limits=limits).open(FRAME, depth=2)
            async with closing(store):
                yield store


async def no_conditions(server, request):
    return error("NotImplemented", 501) if "If-None-Match" in request.headers else None


async def test_s3_store_without_conditional_puts_looks_before_each_put():
    server = Odd(PUT=no_conditions)
    async with server.opened_store() as store:
        assert await store.put(A, block_of("a")) is True
        assert await store.put(A, block_of("a")) is False
        assert await read(store, A) == block_of("a")
    # The first put of all finds out; then there are the namespace's description and two blocks.
    assert server.seen == ["PUT", "HEAD", "PUT", "HEAD", "PUT", "HEAD", "GET"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error("InsufficientStorage", 507), StoreFull),
        (error("QuotaExceeded", 403), StoreFull),
        (error("XMinioStorageFull", 507), StoreFull),
        (error("AccessDenied", 403), StoreUnavailable),
        (error("NoSuchKey", 404), StoreUnavailable),  # to a put: that is no S3 service
        (web.Response(status=404, text="<html>not here"), StoreUnavailable),
        (web.Response(status=405), StoreUnavailable),
        (error("SlowDown", 503), StoreUnavailable),
    ],
    ids=lambda value: getattr(value, "__name__", None) or f"{value.status}-{value.text}",
)
async def test_s3_store_refused_put_is_full_or_unavailable(answer, expected):
    async def refuse(server, request):
        return web.Response(
            status=answer.status, text=answer.text, content_type=answer.content_type
        )

    async with Odd(PUT=refuse).opened_store() as store:
        with pytest.raises(expected) as caught:
            await store.put(A, block_of("a"))
        assert isinstance(caught.value, expected)
        assert isinstance(caught.value, StoreFull) == (expected is StoreFull)


async def test_s3_store_puts_of_blocks_that_are_there_leave_the_time_limit(monkeypatch):
    limits = []
    usual_limit = AdaptiveTimeout.timeout_s

    def timeout_s(limit, size_bytes):
        limits.append(usual_limit(limit, size_bytes))
        return limits[-1]

    monkeypatch.setattr(AdaptiveTimeout, "timeout_s", timeout_s)

    async def there(server, request):
        return error("PreconditionFailed", 412)

    async with Odd(PUT=there).opened_store() as store:
        for _ in range(3):
            assert await store.put(A, block_of("a")) is False
    assert limits == [LIMITS.first_s] * 4, "one is that of the description"


async def streamed(request, data, **headers):
    answer = web.StreamResponse(headers=headers)
    await answer.prepare(request)
    await answer.write(data)
    return answer


async def cut_off(server, request):
    await streamed(request, RAW[: len(RAW) // 2], **{"Content-Length": str(len(RAW))})
    request.transport.close()
    return web.Response()


async def without_length(server, request):
    return await streamed(request, RAW)


async def not_allowed(server, request):
    return error("AccessDenied", 403)


async def nonsense(server, request):
    return web.Response(text="<ListBucketResult><Contents><Key>", content_type="application/xml")


async def out_of_order(server, request):
    return error("InternalError", 500)


@pytest.mark.parametrize("answer", [cut_off, without_length, not_allowed, out_of_order])
async def test_s3_store_failed_get_is_unavailable_and_deletes_no_object(answer):
    server = Odd(GET=answer)
    async with server.opened_store() as store:
        await store.put(A, block_of("a"))
        with pytest.raises(StoreUnavailable):
            await read(store, A)
        server.answers.clear()
        assert await read(store, A) == block_of("a")
    assert "DELETE" not in server.seen


async def test_s3_store_undeletable_corrupt_block_stays_corrupt():
    server = Odd(DELETE=not_allowed)
    async with server.opened_store() as store:
        await store.put(A, block_of("a"))
        server.objects = {name: bytes(len(RAW)) for name in server.objects}
        for _ in range(2):
            with pytest.raises(BlockCorrupt):
                await read(store, A)
            async with asyncio.timeout(PATIENCE_S):
                while await store.contains([A]) == [False]:  # until the delete has failed
                    pass


@pytest.mark.parametrize("answer", [not_allowed, out_of_order])
async def test_s3_store_lookup_with_one_failed_request_is_unavailable(answer):
    async def sometimes(server, request):
        return await answer(server, request) if request.path.endswith(B.hex()) else None

    async with Odd(HEAD=sometimes).opened_store() as store:
        await store.put(A, block_of("a"))
        assert await store.contains([A]) == [True]
        with pytest.raises(StoreUnavailable):
            await store.contains([A, B, key_of("c")])


async def test_s3_store_malformed_listing_is_unavailable():
    async with Odd(GET=nonsense).opened_store() as store:
        with pytest.raises(StoreUnavailable):
            await anext(store.list_blocks())


async def test_s3_store_listing_with_a_repeated_token_ends():
    async def again(server, request):
        text = (
            "<?xml version='1.0'?><ListBucketResult><IsTruncated>true</IsTruncated>"
            "<NextContinuationToken>same</NextContinuationToken>"
            "<Contents><Key>x</Key></Contents></ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")

    server = Odd(GET=again)
    async with server.opened_store() as store:
        assert [block async for block in store.list_blocks()] == []
    assert server.seen == ["GET", "GET"]


async def test_s3_store_server_error_text_is_one_short_printable_line():
    async def shout(server, request):
        return error("Access\nDenied\x9b31m" + 1000 * "!", 403)

    async with Odd(GET=shout).opened_store() as store:
        with pytest.raises(StoreUnavailable) as caught:
            await read(store, A)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400
