"""A web server that a test writes, in the test's own loop."""

import contextlib

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(handle):
    """The port of a server that answers by `handle(request)`."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{name:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
