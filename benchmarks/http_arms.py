r"""A minimal server of blocks on aiohttp, which `bench_http_store` compares with the package's own.

    CAKE_BENCH_ROOT=DIR python -m gunicorn benchmarks.http_arms:application \
        --worker-class aiohttp.GunicornWebWorker

For a GET it checks the token, finds the block's file and sends it by `aiohttp.web.FileResponse`
(kernel sendfile under asyncio; 256 KiB pieces through the process under uvloop, which cannot send
files). It does nothing else: no lock against eviction, no record of the access, no counters, no
bound on connections. So its speed is an upper bound for any real server on aiohttp.
"""

import os
from pathlib import Path

from aiohttp import web

from sglang_cake.stores.http.auth import AcceptedTokens, load_tokens, make_own_token
from sglang_cake.stores.http.protocol import Kind, parse_path

ROOT_VARIABLE = "CAKE_BENCH_ROOT"


async def application() -> web.Application:
    """As gunicorn's aiohttp workers call it, once in each process."""
    root = Path(os.environ[ROOT_VARIABLE])
    tokens = AcceptedTokens(load_tokens(make_own_token()))

    async def get(request: web.Request) -> web.StreamResponse:
        if not tokens.may_read(request.headers.get("Authorization")):
            raise web.HTTPUnauthorized
        path = request.rel_url.raw_path
        target = parse_path(path)
        if target is None or target.kind is not Kind.BLOCK:
            raise web.HTTPNotFound
        return web.FileResponse(root / path[1:])

    app = web.Application()
    app.router.add_get("/{path:.*}", get)
    return app
