"""Puts KV-Runahead together with a running server."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_cake.core.config import CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.local_files import cache_folder
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.runahead.runahead_ipc import IpcEngine
from sglang_cake.integration.runahead.runahead_owner import Runahead
from sglang_cake.runahead.messages import Message
from sglang_cake.runahead.mooncake import MooncakeEngine
from sglang_cake.runahead.ring import RingTransport, apart
from sglang_cake.runahead.setting import CUDA_IPC, TCP, GroupSetting
from sglang_cake.runahead.table import WatchedTable, table_path
from sglang_cake.runahead.transport import Transport
from sglang_cake.runahead.zeromq import ZmqTransport

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_cake.integration.build import Engine

logger = logging.getLogger("sglang_cake")


def start(
    ctx: "TreeCacheBuildContext",
    engine: "Engine",
    config: CakeConfig,
    setting: GroupSetting,
    rows: PoolRows,
    gate: LayerGate,
) -> Runahead:
    """Join the group of `setting`. Raises: ConfigError."""
    here = Runahead(
        setting.rank,
        _transport(setting, engine, rows),
        rows,
        gate,
        step_costs=engine.step_costs,
        counters=engine.counters,
        namespace=engine.namespace_hex,
        restore=engine.coordinator.restore,
        loads_only=config.mode == "load",
        least_tokens=config.min_load_tokens,
        page_tokens=ctx.params.page_size,
        limit_tokens=engine.step_costs.chunk_tokens,
        table=WatchedTable(_table_path(engine)),
    )
    logger.info("cake runahead: member %d of %d", setting.rank, len(setting.peers))
    return here


def _transport(setting: GroupSetting, engine: "Engine", rows: PoolRows) -> Transport:
    host, port = setting.peers[setting.rank]

    def connect(greeting: Callable[[int], Message] | None = None) -> ZmqTransport:
        namespace, tcp = engine.namespace_digest, setting.transport == TCP
        assert namespace is not None
        try:
            return ZmqTransport(
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
    assert engine.namespace_digest is not None
    return table_path(folder, engine.device, engine.namespace_digest)
