"""Puts KV-Runahead together with a running server, and hooks the forward."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_cake.adapter.pools import DeviceKV
from sglang_cake.adapter.runahead import Runahead
from sglang_cake.adapter.runahead_cuda import CudaGate, CudaRows
from sglang_cake.adapter.runahead_ipc import IpcEngine
from sglang_cake.adapter.runahead_rows import LayerGate, PoolRows
from sglang_cake.cache_folder import cache_folder
from sglang_cake.config import CakeConfig
from sglang_cake.errors import ConfigError
from sglang_cake.runahead.messages import Message
from sglang_cake.runahead.mooncake import MooncakeEngine
from sglang_cake.runahead.ring import RingTransport, apart
from sglang_cake.runahead.setting import CUDA_IPC, TCP, GroupSetting, group_setting
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
    rows, gate = _pool(engine.kv, pool, on_device=setting.transport == CUDA_IPC)
    here = Runahead(
        setting.rank,
        _transport(setting, engine, rows),
        rows,
        gate,
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


def _pool(kv: DeviceKV, pool: Any, *, on_device: bool) -> tuple[PoolRows, LayerGate]:
    if kv.device.type == "cpu":
        return PoolRows(kv), LayerGate(pool)
    rows = CudaRows(kv, on_device=on_device)
    return rows, CudaGate(pool, rows)


def _transport(setting: GroupSetting, engine: "Engine", rows: PoolRows) -> Transport:
    host, port = setting.peers[setting.rank]

    def connect(greeting: Callable[[int], Message] | None = None) -> TcpTransport:
        namespace, tcp = engine.namespace_digest, setting.transport == TCP
        try:
            return TcpTransport(
                setting.rank,
                setting.peers,
                secret=setting.secret,
                namespace=namespace if tcp else apart(namespace, setting.transport),
                greeting=greeting,
                new_buffer=rows.buffer if tcp else bytearray,
            )
        except OSError as error:
            raise ConfigError(
                f"--cake-runahead-peers: cannot listen on {host}:{port}: {error.strerror or error}"
            ) from None

    if setting.transport == TCP:
        return connect()
    others = frozenset(range(len(setting.peers))) - {setting.rank}
    try:
        if setting.transport == CUDA_IPC:
            device = engine.kv.device
            ipc = IpcEngine(device, len(others), torch.cuda.Stream(device))
            return RingTransport(connect, others, ipc)
        return RingTransport(connect, others, MooncakeEngine(host))
    except OSError as error:
        raise ConfigError(f"--cake-runahead-transport {setting.transport}: {error}") from None


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
