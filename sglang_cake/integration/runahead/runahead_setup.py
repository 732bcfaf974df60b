"""Puts KV-Runahead together with a running server."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_cake.config import CakeConfig
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import Digest
from sglang_cake.core.local_files import cache_folder
from sglang_cake.integration.memory.kv_pool import DeviceKV
from sglang_cake.integration.overlap.layer_gate import LayerGate, PoolRows
from sglang_cake.integration.runahead.runahead_ipc import IpcEngine
from sglang_cake.integration.runahead.runahead_scheduler import Runahead
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.runahead.group_setting import CUDA_IPC, TCP, GroupSetting, group_setting
from sglang_cake.runahead.messages import Message
from sglang_cake.runahead.mooncake_engine import MooncakeEngine
from sglang_cake.runahead.one_sided_transport import OneSidedTransport, apart
from sglang_cake.runahead.partition_table import WatchedTable, table_path
from sglang_cake.runahead.transport import Transport
from sglang_cake.runahead.zeromq import ZmqTransport

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger("sglang_cake")


class Host(Protocol):
    """The parts of `build.CakeService` that a member of a group uses."""

    kv: DeviceKV
    counters: Counters
    step_costs: StepCosts
    coordinator: Coordinator

    @property
    def device(self) -> str:
        """Name of the GPU or the processor that computes."""
        ...

    @property
    def namespace_digest(self) -> Digest | None:
        """The namespace of the KV that this process computes."""
        ...

    def namespace_hex(self) -> str | None:
        """The same in hex; None while the tree holds KV of another namespace."""
        ...


def start(
    ctx: "TreeCacheBuildContext",
    host: Host,
    config: CakeConfig,
    rows: PoolRows,
    gate: LayerGate,
) -> Runahead:
    """Join the group that `config` describes. Raises: ConfigError."""
    setting = group_setting(config)
    assert setting is not None
    here = Runahead(
        setting.rank,
        _transport(setting, host, rows),
        rows,
        gate,
        step_costs=host.step_costs,
        counters=host.counters,
        namespace=host.namespace_hex,
        record_of=host.coordinator.record,
        loads_only=config.mode == "load",
        least_tokens=config.min_load_tokens,
        page_tokens=ctx.params.page_size,
        limit_tokens=host.step_costs.chunk_tokens,
        table=WatchedTable(_table_path(host)),
    )
    logger.info("cake runahead: member %d of %d", setting.rank, len(setting.peers))
    return here


def _transport(setting: GroupSetting, host: Host, rows: PoolRows) -> Transport:
    address, port = setting.peers[setting.rank]

    def connect(greeting: Callable[[int], Message] | None = None) -> ZmqTransport:
        namespace, tcp = host.namespace_digest, setting.transport == TCP
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
            why = error.strerror or error
            raise ConfigError(
                f"--cake-runahead-peers: cannot listen on {address}:{port}: {why}"
            ) from None

    if setting.transport == TCP:
        return connect()
    others = frozenset(range(len(setting.peers))) - {setting.rank}
    try:
        if setting.transport == CUDA_IPC:
            device = host.kv.device
            ipc = IpcEngine(device, len(others), torch.cuda.Stream(device, priority=-1))
            return OneSidedTransport(connect, others, ipc)
        return OneSidedTransport(connect, others, MooncakeEngine(address))
    except OSError as error:
        raise ConfigError(f"--cake-runahead-transport {setting.transport}: {error}") from None


def _table_path(host: Host) -> Path | None:
    try:
        folder = cache_folder() / "runahead"
    except RuntimeError:  # no home folder
        return None
    assert host.namespace_digest is not None
    return table_path(folder, host.device, host.namespace_digest)
