"""Idle connections that died without a sign during an outage do not make it longer."""

import asyncio
import contextlib
import ssl
import threading

import pytest
from aiohttp import web
from polling import async_answer
from test_s3 import credentials  # noqa: F401 - a fixture
from web_server import serving

from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.stores.circuit_breaker import FAILURES, LAST_S, TimeoutLimits
from sglang_cake.stores.http.http_transport import Endpoint, HttpTransport
from sglang_cake.stores.s3.bucket import S3Bucket, S3Place

CONNECTIONS = 4 * FAILURES
LIMITS = TimeoutLimits(floor_s=0.3)
WAIT_S = 60.0


class Server:
    """Answers every request, but those on dead connections."""

    def __init__(self):
        self.dead = set()
        self.together = asyncio.Barrier(CONNECTIONS)
        self.unanswered = 0
        self.first = True

    async def handle(self, request):
        if request.transport in self.dead:
            self.unanswered += 1
            await asyncio.sleep(60)
        if self.first:
            await self.together.wait()  # so that each request has a connection of its own
            self.dead.add(request.transport)
        if request.method == "HEAD":  # of an empty answer aiohttp's server closes the connection
            return web.Response(headers={"Content-Length": "1"})
        return web.Response()


def http(port, clock):
    base = f"http://127.0.0.1:{port}"
    transport = HttpTransport(lambda: Endpoint(base), LIMITS, clock=clock)

    async def look_up():
        async def attempt():
            async with transport.request("GET", "/x", None) as answer:
                await answer.read()

        await transport.call(transport.lookups, 1, attempt)

    return look_up, transport.close


def s3(port, clock, limits=LIMITS):
    place = S3Place("bucket", endpoint=f"http://127.0.0.1:{port}", region="us-east-1")
    bucket = S3Bucket(place, connections=CONNECTIONS, limits=limits, clock=clock)
    return lambda: bucket.has("a"), bucket.close


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("kind", [http, s3])
async def test_remote_store_after_timeouts_the_first_probe_dials_anew(kind):
    now_s = 0.0
    server = Server()
    async with serving(server.handle) as port:
        look_up, close = kind(port, lambda: now_s)
        try:
            await asyncio.gather(*(look_up() for _ in range(CONNECTIONS)))
            server.first = False
            assert len(server.dead) == CONNECTIONS
            calls = [look_up() for _ in range(FAILURES)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, StoreUnavailable)
                assert "no whole answer" in str(error)

            async def probe():
                nonlocal now_s
                now_s += LAST_S
                await look_up()
                return True

            await async_answer(probe)  # LIMITS are little on a busy machine
            assert server.unanswered <= FAILURES
        finally:
            await close()


@pytest.mark.usefixtures("credentials")
async def test_s3_certificates_slower_to_read_than_a_call_may_take_are_not_read_for_ever(
    monkeypatch,
):
    """Each reading lasts until the call that began it was given up."""
    limits = TimeoutLimits(first_s=0.3, floor_s=0.3, ceiling_s=0.6)
    load = ssl.SSLContext.load_verify_locations
    given_up = [threading.Event()]  # of each call

    def slowly(*args, **kwargs):
        assert given_up[-1].wait(WAIT_S)
        load(*args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", slowly)
    now_s = 0.0
    server = Server()
    server.first = False
    async with serving(server.handle) as port:
        look_up, close = s3(port, lambda: now_s, limits)
        try:
            for _ in range(20):
                with contextlib.suppress(StoreUnavailable):
                    await look_up()
                    assert len(given_up) > 1
                    return
                given_up[-1].set()
                given_up.append(threading.Event())
                now_s += LAST_S
            raise AssertionError("no call is ever answered")
        finally:
            given_up[-1].set()
            await close()
