"""`GET|PUT|DELETE /cake/store`: reads or changes the store of a running server. The server need not
be idle. The request reaches the schedulers like one to SGLang's own `/hicache/storage-backend`.

    curl -X PUT  http://127.0.0.1:30000/cake/store -H 'Authorization: Bearer <admin key>' \\
         -H 'Content-Type: application/json' -d '{"store": "file:///nvme/kv?capacity=500GB"}'
"""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import CakeError, ConfigError
from sglang_cake.integration.boundary import BOUNDARY, register_and_apply
from sglang_cake.integration.compat import answer_without_admin_key, tokenizer_manager
from sglang_cake.stores.open_store import check_sources, parse_sources

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PATH = "/cake/store"
BOUNDARY.hooks[PATH] = []
_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
MAX_BODY_BYTES = 65_536


def install(config: CakeConfig) -> None:
    """Install the hook of the HTTP server. Called when the process is known to serve HTTP, which it
    is not while plugins are loaded."""
    _EndpointState.store = config.store
    register_and_apply(_SERVER, _add_route, HookType.BEFORE)


class _EndpointState:
    """The answer to a GET. A process runs one server."""

    store: str | None = None
    store_attached = True


def _add_route(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app: FastAPI = http_server.app
    if not any(getattr(route, "path", None) == PATH for route in app.router.routes):
        # FastAPI's own decorators would resolve the annotations, which are imported for mypy only.
        app.router.add_route(
            PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(_serve), methods=["GET", "PUT", "DELETE"]
        )


async def _serve(request: "Request") -> "Response":
    from fastapi.responses import JSONResponse
    from sglang.srt.runtime_context import get_serving

    if not get_serving().admin_api_key:  # a client that can set the store can name any folder
        missing: Response = answer_without_admin_key()
        return missing
    manager = tokenizer_manager()
    try:
        if request.method == "PUT":
            store = _parse(await _body(request))
            await asyncio.to_thread(_check, store)
            await _change_store(manager, store)
            _EndpointState.store = store
            _EndpointState.store_attached = True
        elif request.method == "DELETE":
            await _change_store(manager, None)
            _EndpointState.store_attached = False
    except CakeError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    except Exception as error:
        BOUNDARY.failed(PATH, error)
        return JSONResponse({"error": "cake failed; see the server's log"}, status_code=500)
    return JSONResponse({"attached": _EndpointState.store_attached, "store": _EndpointState.store})


async def _body(request: "Request") -> bytes:
    """Raises: ConfigError if there are more than MAX_BODY_BYTES."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ConfigError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


def _parse(body: bytes) -> str:
    """The store in a body of PUT. Raises: ConfigError."""
    try:
        match json.loads(body):
            case {"store": str(store), **others} if not others:
                store.encode()  # JSON may have one half of a pair of surrogates, a path may not
                return store
    except (ValueError, RecursionError):
        pass
    raise ConfigError('send {"store": "URL[,URL...]"}')


def _check(store: str) -> None:
    check_sources(parse_sources(store, "lru"))


async def _change_store(manager: Any, store: str | None) -> None:
    """Attach the store in all schedulers, or detach it (None). All ranks of a scheduler do it in
    the same step. Raises: ConfigError if a scheduler refuses; those of other replicas may have
    changed then."""
    from sglang.srt.managers.io_struct import (
        AttachHiCacheStorageReqInput,
        DetachHiCacheStorageReqInput,
    )

    manager.auto_create_handle_loop()
    if store is None:
        results = await manager.detach_hicache_storage_communicator(DetachHiCacheStorageReqInput())
    else:
        results = await manager.attach_hicache_storage_communicator(
            AttachHiCacheStorageReqInput(hicache_storage_backend=store)
        )
    refused = [result.message for result in results if not result.success]
    if refused:
        if changed := len(results) - len(refused):
            refused.append(f"{changed} of {len(results)} replicas have changed: send it again")
        raise ConfigError("; ".join(refused))
