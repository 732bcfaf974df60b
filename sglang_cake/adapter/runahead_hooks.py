"""Puts KV-Runahead together with a running server, and hooks the forward."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.adapter.runahead import Runahead
from sglang_cake.adapter.runahead_rows import LayerGate, PoolRows
from sglang_cake.cache_folder import cache_folder
from sglang_cake.config import CakeConfig
from sglang_cake.errors import ConfigError
from sglang_cake.runahead import mooncake
from sglang_cake.runahead.messages import Message
from sglang_cake.runahead.setting import GroupSetting, group_setting
from sglang_cake.runahead.table import WatchedTable, table_path
from sglang_cake.runahead.tcp import TcpTransport
from sglang_cake.runahead.transport import Transport

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_cake.adapter.build import Engine

logger = logging.getLogger("sglang_cake")

_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


class _Here:
    """What runs in this process. One scheduler does."""

    runahead: Runahead | None = None


def install() -> None:
    """Register the hook of the forward. Call while plugins are being loaded."""
    HookRegistry.register(_FORWARD, _forward, HookType.AROUND)


def start(ctx: "TreeCacheBuildContext", engine: "Engine", config: CakeConfig) -> Runahead | None:
    """Join the group that the settings describe, if they do.

    Raises: ConfigError.
    """
    setting = group_setting(config)
    if setting is None:
        return None
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    transport = _transport(setting, engine)
    here = Runahead(
        setting.rank,
        transport,
        PoolRows(engine.kv),
        LayerGate(pool),
        pace=engine.pace,
        counters=engine.counters,
        namespace=engine.namespace_hex,
        restore=engine.coordinator.restore,
        loads_only=config.mode == "load",
        least_tokens=config.min_load_tokens,
        page_tokens=ctx.params.page_size,
        limit_tokens=engine.pace.chunk_tokens,
        table=WatchedTable(_table_path(engine)),
    )
    _Here.runahead = here
    logger.info("cake runahead: member %d of %d", setting.rank, len(setting.peers))
    return here


def _transport(setting: GroupSetting, engine: "Engine") -> Transport:
    host, port = setting.peers[setting.rank]

    def connect(greeting: Callable[[int], Message] | None = None) -> TcpTransport:
        namespace = engine.namespace_digest
        try:
            return TcpTransport(
                setting.rank,
                setting.peers,
                secret=setting.secret,
                namespace=namespace if greeting is None else mooncake.apart(namespace),
                greeting=greeting,
            )
        except OSError as error:
            raise ConfigError(
                f"--cake-runahead-peers: cannot listen on {host}:{port}: {error.strerror or error}"
            ) from None

    if setting.transport == "tcp":
        return connect()
    others = frozenset(range(len(setting.peers))) - {setting.rank}
    try:
        return mooncake.MooncakeTransport(connect, others, mooncake.Engine(host))
    except OSError as error:
        raise ConfigError(f"--cake-runahead-transport mooncake: {error}") from None


def _table_path(engine: "Engine") -> Path | None:
    try:
        folder = cache_folder() / "runahead"
    except RuntimeError:  # no home folder
        return None
    return table_path(folder, engine.device, engine.namespace_digest)


def _forward(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _Here.runahead is None or args or getattr(worker, "is_draft_worker", False):
        return original(worker, batch, *args, **kwargs)
    return _Here.runahead.forward(original, worker, batch, **kwargs)
