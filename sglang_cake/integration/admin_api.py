"""`GET|PUT|DELETE /cake/store`: the store that a running server uses, in the style of SGLang's own
`/hicache/storage-backend`, and sent to the schedulers in the same way. The server need not be idle.

    curl -X PUT  http://127.0.0.1:30000/cake/store -H 'Authorization: Bearer <admin key>' \\
         -H 'Content-Type: application/json' -d '{"store": "file:///nvme/kv?capacity=500GB"}'
"""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.core.config import CakeConfig
from sglang_cake.core.errors import CakeError, ConfigError
from sglang_cake.integration.boundary import BOUNDARY, register
from sglang_cake.integration.compat import answer_without_admin_key, is_hooked, tokenizer_manager
from sglang_cake.stores.sources import sources_of

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

PATH = "/cake/store"
BOUNDARY.hooks[PATH] = []
_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
MAX_BODY_BYTES = 65_536


def install(config: CakeConfig) -> None:
    """Hook the process that serves HTTP; it knows that it does when plugins are long loaded."""
    _StoreEndpoint.setting = config.store
    if not is_hooked(_SERVER):
        register(_SERVER, _add_route, HookType.BEFORE)
        HookRegistry.apply_hooks()


class _StoreEndpoint:
    """What the endpoint knows. One server runs in a process."""

    setting: str | None = None
    attached = True


def _add_route(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app: FastAPI = http_server.app
    if not any(getattr(route, "path", None) == PATH for route in app.router.routes):
        # FastAPI makes its checks from annotations, which are strings it cannot resolve here.
        app.router.add_route(
            PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(_serve), methods=["GET", "PUT", "DELETE"]
        )


async def _serve(request: "Request") -> "Response":
    from fastapi.responses import JSONResponse
    from sglang.srt.runtime_context import get_serving

    if not get_serving().admin_api_key:  # a client that names a store can name any folder
        missing: Response = answer_without_admin_key()
        return missing
    manager = tokenizer_manager()
    try:
        if request.method == "PUT":
            setting = _setting_in(await _body(request))
            await asyncio.to_thread(_check, setting)
            await _tell(manager, setting)
            _StoreEndpoint.setting, _StoreEndpoint.attached = setting, True
        elif request.method == "DELETE":
            await _tell(manager, None)
            _StoreEndpoint.attached = False
    except CakeError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    except Exception as error:
        BOUNDARY.failed(PATH, error)
        return JSONResponse({"error": "cake failed; the server's log says how"}, status_code=500)
    return JSONResponse({"attached": _StoreEndpoint.attached, "store": _StoreEndpoint.setting})


async def _body(request: "Request") -> bytes:
    """At most one piece more than MAX_BODY_BYTES. Raises: ConfigError if there is more."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ConfigError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


def _setting_in(body: bytes) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("store"), str) or len(found) != 1:
        raise ConfigError('send {"store": "URL[,URL...]"}')
    return str(found["store"])


def _check(setting: str) -> None:
    for source in sources_of(setting, "lru"):
        source.check()


async def _tell(manager: Any, setting: str | None) -> None:
    """Reach every scheduler, in the same step on every rank of one. Raises: ConfigError if one
    refuses."""
    from sglang.srt.managers.io_struct import (
        AttachHiCacheStorageReqInput,
        DetachHiCacheStorageReqInput,
    )

    manager.auto_create_handle_loop()
    if setting is None:
        results = await manager.detach_hicache_storage_communicator(DetachHiCacheStorageReqInput())
    else:
        results = await manager.attach_hicache_storage_communicator(
            AttachHiCacheStorageReqInput(hicache_storage_backend=setting)
        )
    refused = [result.message for result in results if not result.success]
    if refused:
        raise ConfigError("; ".join(refused))
