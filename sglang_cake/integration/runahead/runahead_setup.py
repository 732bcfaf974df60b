"""Puts KV-Runahead together with a running server."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.local_files import cache_folder
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.runahead.runahead_ipc import IpcEngine
from sglang_cake.integration.runahead.runahead_scheduler import Runahead
from sglang_cake.runahead.chain_plan import ChainLimits
from sglang_cake.runahead.group_setting import CUDA_IPC, TCP, GroupSetting, group_setting
from sglang_cake.runahead.mooncake_engine import MooncakeEngine
from sglang_cake.runahead.one_sided_transport import OneSidedTransport, WriteEngine, apart
from sglang_cake.runahead.partition_table import WatchedTable, table_path
from sglang_cake.runahead.zeromq import ZmqTransport

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_cake.integration.build import CakeService

logger = logging.getLogger("sglang_cake")


def start(
    ctx: "TreeCacheBuildContext",
    service: "CakeService",
    config: CakeConfig,
    rows: PoolRows,
    gate: LayerGate,
) -> Runahead:
    """Join the group that `config` describes. Raises: ConfigError."""
    setting = group_setting(config)
    assert setting is not None
    here = Runahead(
        setting.rank,
        _transport(setting, service, rows),
        rows,
        gate,
        step_costs=service.step_costs,
        counters=service.counters,
        namespace=service.namespace_hex,
        record_of=service.coordinator.record,
        loads_only=config.mode == "load",
        least_tokens=config.min_load_tokens,
        limits=ChainLimits(ctx.params.page_size, service.step_costs.chunk_tokens),
        table=WatchedTable(_table_path(service)),
    )
    logger.info("cake runahead: member %d of %d", setting.rank, len(setting.peers))
    return here


def _transport(setting: GroupSetting, service: "CakeService", rows: PoolRows) -> ZmqTransport:
    rank, peers, secret = setting.rank, setting.peers, setting.secret
    namespace, transport = service.namespace_digest, setting.transport
    assert namespace is not None
    try:
        if transport == TCP:
            return ZmqTransport(
                rank, peers, secret=secret, namespace=namespace, new_buffer=rows.buffer
            )
        engine: WriteEngine
        if transport == CUDA_IPC:
            device = service.kv.device
            stream = torch.cuda.Stream(device, priority=-1)
            engine = IpcEngine(device, len(peers) - 1, stream)
        else:
            engine = MooncakeEngine(peers[rank][0])
        namespace = apart(namespace, transport)
        return OneSidedTransport(rank, peers, engine, secret=secret, namespace=namespace)
    except OSError as error:
        if error.errno is None:  # of the engine
            raise ConfigError(f"--cake-runahead-transport {transport}: {error}") from None
        address, port = peers[rank]
        raise ConfigError(
            f"--cake-runahead-peers: cannot listen on {address}:{port}: {error.strerror}"
        ) from None


def _table_path(service: "CakeService") -> Path | None:
    try:
        folder = cache_folder() / "runahead"
    except RuntimeError:  # no home folder
        return None
    assert service.namespace_digest is not None
    return table_path(folder, service.device, service.namespace_digest)
