"""Builds cake in a scheduler process: the tree that SGLang uses, and the service behind it."""

import asyncio
import atexit
import contextlib
import logging
import platform
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.runtime_context import get_parallel

from sglang_cake import __version__
from sglang_cake.config import CakeConfig
from sglang_cake.core.buffers import HostArena, available_bytes
from sglang_cake.core.codec_names import may_decode_on_device, namespace_value
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import ConfigError, StoreError, StoreUnavailable
from sglang_cake.core.keys import Digest, Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.local_files import cache_folder
from sglang_cake.core.threads import IoThread
from sglang_cake.integration import flags
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.compat import reduce_min
from sglang_cake.integration.identity.content import Files
from sglang_cake.integration.identity.identity import (
    LOADED,
    Identity,
    group_namespaces,
    rope_theta,
    server_fields,
)
from sglang_cake.integration.memory.block_saving import BlockSaving, Writer
from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.memory.copier import PATIENCE_S, CopyThread
from sglang_cake.integration.memory.device_slots import DeviceSlots
from sglang_cake.integration.memory.end_states import END_POOLS, EndStates, is_compressed
from sglang_cake.integration.memory.host_pools import host_pools, pin
from sglang_cake.integration.memory.kv_pool import CudaKV, DeviceKV
from sglang_cake.integration.memory.kv_shard import KvShard
from sglang_cake.integration.memory.pool_planes import DraftPools, belongs_to_requests
from sglang_cake.integration.metrics import (
    FailureMetrics,
    Metrics,
    StoreMetrics,
    scheduler_labels,
)
from sglang_cake.integration.overlap import forward_hook
from sglang_cake.integration.overlap.layer_gate import gated
from sglang_cake.integration.overlap.overlapped_step import OverlapRunner
from sglang_cake.integration.request.request_keys import RequestKeys
from sglang_cake.integration.request.request_metadata import tenant_key
from sglang_cake.integration.request.request_reporter import RequestReporter
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.rank_consensus import RankConsensus
from sglang_cake.integration.scheduler.waker import Waker
from sglang_cake.integration.step_costs import StepCosts
from sglang_cake.integration.support_matrix import (
    check_context,
    keys_media,
    may_decode_for_others,
    may_overlap,
)
from sglang_cake.loading.cost_file import CostFile
from sglang_cake.loading.cost_model import LoadCost, PrefillCost
from sglang_cake.loading.loader import Loader
from sglang_cake.stores.base import Store, StoreSource, StoreStats
from sglang_cake.stores.encoded import may_lose
from sglang_cake.stores.file.block_files import this_boot
from sglang_cake.stores.open_store import depths_of, open_blocks, parse_sources
from sglang_cake.stores.request_recording import RequestTraceFile
from sglang_cake.stores.url import redacted

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_cake.integration.runahead.runahead_scheduler import Runahead

logger = logging.getLogger("sglang_cake")
STATS_EVERY_S = 5.0
WRITE_COSTS_EVERY_S = 30.0
PRIOR_BYTES_PER_S = 1e9  # assumed speed of a store that nothing was read from yet
DRAIN_S = 60.0  # how long blocks are written to a store that was replaced
CLOSE_S = 5.0  # how long the end of the process may wait for the store


def build(ctx: "TreeCacheBuildContext") -> CakeRadixCache:
    """The factory of `--radix-cache-backend cake`.

    Raises: ConfigError for a model or a mode of SGLang that cake does not support, and without
        settings in the ServerArgs.
    """
    config = flags.settings_of(ctx.server_args)
    check_context(ctx, config, LOADED.drafts)
    config = replace(config, block_tokens=config.block_tokens_in(ctx.params.page_size))
    tree = create_unified_radix_cache(ctx, cache_class=CakeRadixCache)
    assert isinstance(tree, CakeRadixCache)
    service = CakeService(ctx, tree, config)
    tree.coordinator = service.coordinator
    tree.decode_tokens = get_alloc_reserve_per_decode()
    tree.saving = service.saving
    tree.service = service
    _join_forwards(ctx, tree, service, config)
    labels = scheduler_labels(ctx)
    BOUNDARY.set_handler(tree, None if labels is None else FailureMetrics(labels, BOUNDARY.hooks))
    return tree


def _join_forwards(
    ctx: "TreeCacheBuildContext", tree: CakeRadixCache, service: "CakeService", config: CakeConfig
) -> None:
    """Set up the parts that take part in forwards: KV-Runahead and overlapped last steps.

    Raises: ConfigError.
    """
    in_group = config.runahead_peers is not None
    overlaps = may_overlap(ctx, config) and service.kv.layout.is_plain
    if in_group or overlaps or service.step_costs.pipelined:
        forward_hook.running_tree = tree
    if not in_group and not overlaps:
        return
    if in_group:
        service.identity.wait()  # members of a group compare their namespaces
        if service.identity.is_private:
            raise ConfigError(
                "KV-Runahead needs weights that come from files: see the warning above, or remove "
                "--cake-runahead-peers"
            )
    on_device = in_group and config.runahead_transport == "cuda-ipc"
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    rows, gate = gated(service.kv, pool, on_device=on_device)
    if in_group:
        from sglang_cake.integration.runahead import runahead_setup

        service.runahead = runahead_setup.start(ctx, service, config, rows, gate)
        tree.runahead = service.runahead
    if overlaps:
        tree.overlap_runner = OverlapRunner(
            service.coordinator,
            service.loader,
            service.device_slots,
            rows,
            gate,
            service.counters,
        )
        service.step_costs.overlap_share = 1 - 1 / rows.layers


class CakeService:
    """Cake in one scheduler process: it owns all parts, opens and closes the store, and follows
    changes of the weights.

    Attributes:
        setting: the store in use, as `--cake-store`.
        waker: wakes the scheduler thread.
    """

    runahead: "Runahead | None" = None

    def __init__(
        self, ctx: "TreeCacheBuildContext", tree: CakeRadixCache, config: CakeConfig
    ) -> None:
        self._ctx = ctx
        self._tree = tree
        self._config = config
        allocator = ctx.params.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        # Blocks have the KV of the layers that see all tokens. The rest is in end states.
        apart = [getattr(pool, name, None) for name in END_POOLS]
        models = [draft for draft in LOADED.drafts if not belongs_to_requests(draft.pool)]
        pools = [draft.pool for draft in models]
        own = getattr(ctx.params.req_to_token_pool, "mamba_pool", None)
        seen = dict.fromkeys(draft.states for draft in models)
        states = [each for each in seen if each not in (None, own)]
        drafts = DraftPools.of(pools, pool, states=states)
        parallel = get_parallel()
        alone = parallel.attn_tp_size == 1
        reducer = None if alone else partial(reduce_min, tree)
        self._consensus = RankConsensus(reducer)
        self._consensus.await_ranks()
        machines = self._consensus.gathered(
            _machine(ctx), parallel.attn_tp_rank, parallel.attn_tp_size
        )
        shard = shard_of(ctx, machines, pools)
        self._groups = shard.head_groups(config.head_groups)
        slices = 1 if self._groups is None else len(self._groups)
        self.kv = device_kv(
            ctx,
            pool,
            config,
            [each for each in apart if each is not None],
            drafts.rows,
            sliced=slices > 1,
        )
        ends = EndStates.of(tree, self.kv, drafts)
        tree.ends = ends
        if getattr(pool, "request_window", None) is not None:
            tree.joined = WeakSet()
        stored = _sliced(self.kv.layout, slices, ends)
        self._block_bytes = stored.block_bytes
        lossy = may_lose(stored, config.codec, config.max_error, self._rope_theta)
        facts = server_fields(
            ctx,
            stored,
            shard,
            codec=namespace_value(config.codec, config.max_error),
            head_groups=None if self._groups is None else config.head_groups,
            end_states=None if ends is None else ends.describe(),
            drafts=models,
        )
        writes = parallel.attn_tp_rank == 0  # for the ranks that have the same requests
        tenant_key()  # read now, and not by the first request that has a salt
        labels = scheduler_labels(ctx)
        self._io = IoThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._namespace: Namespace | None = None  # None: not known yet
        self._store: Store | None = None  # the last one that was attached; none after a detach
        trace: RequestTraceFile | None = None
        if config.record_trace is not None and writes:
            trace = RequestTraceFile(Path(config.record_trace), self.kv.layout.block_tokens)
        self.setting = config.store
        self._sources = self._parsed(config.store)  # sources of the store that is set
        self._consensus.check_settings(config, tiers=len(self._sources), version=__version__)
        self.counters = Counters()
        end_blocks = 0 if ends is None else ends.count
        staging, write_queue = host_pools(
            self.kv,
            config,
            chunk_tokens=-(-flags.chunk_tokens(resolving_view(ctx.server_args)) // shard.holders),
            free_bytes=available_bytes(),
            reads=sum(self._depths),
            end_blocks=end_blocks,
        )
        self.waker = Waker()
        block_s = self.kv.layout.block_bytes / PRIOR_BYTES_PER_S
        self.loader = Loader(
            None,
            staging,
            self._io,
            self.counters,
            depths=self._depths,
            prior=LoadCost(0.0, block_s),
            wake=self.waker.wake,
            record=None if trace is None else trace.write,
        )
        self.writer = Writer(None, write_queue, self._io, self.counters)
        # A rank that gave up a late copy alone would compute another step than the others.
        patience_s = PATIENCE_S if alone else None
        self.copier = CopyThread(
            self.kv,
            patience_s=patience_s,
            movers=_movers(allocator) if self.kv.moves else (),
        )
        tree.copier = self.copier if self.kv.moves else None
        self.saving = BlockSaving(self.kv, self.copier, self.writer, shard, ends, alone=alone)
        self.step_costs = _step_costs(ctx, self.loader, alone=alone)
        # The same for any weights. More ranks compute faster, also where they hold the same KV.
        ranks = {"tp_rank": str(ctx.tp_rank), "tp_size": str(ctx.tp_size)}
        self._cost_key = Namespace(tuple((facts | ranks).items())).digest()
        self._cost_file: CostFile | None = None
        self._recall_costs()
        self.device_slots = DeviceSlots(
            self.kv,
            self.copier,
            _block_slots(allocator, tree),
            tree.evict_own,
            self.counters,
            ends,
        )
        self.identity = Identity(ctx, facts, reduce_min=reducer, on_known=self.on_known)
        self.coordinator = Coordinator(
            self.loader,
            self.device_slots,
            config=config,
            page_tokens=ctx.params.page_size,
            step_costs=self.step_costs,
            keys=RequestKeys(
                self.kv.layout.block_tokens,
                self.identity.adapter,
                self.counters,
                # A row of the first draft layer depends on the next token, one of the second layer
                # on the next two, and so on.
                next_tokens=max(len(pools), tree.next_tokens),
                end_rank=shard.end_rank,
                covers_media=keys_media(ctx),
            ),
            consensus=self._consensus,
            counters=self.counters,
            end_blocks=end_blocks,
            tail_tokens=0 if ends is None else ends.tail_tokens,
            reporter=RequestReporter(
                config.trace_file,
                writes=writes,
                metrics=None if labels is None else Metrics(self.counters, labels),
            ),
            lossy=lossy,
            priority_sign=_priority_sign(ctx),
            by_prefix=ctx.server_args.schedule_policy in ("lpm", "dfs-weight"),
        )
        if labels is not None:
            store_metrics = StoreMetrics(labels, len(self._sources))
            self._io.post(self._start, publish_stats, store_metrics, self._in_use)
        self._io.post(self._start, self._keep_costs)
        atexit.register(self.close)
        logger.info("cake is on: %s", redacted(str(config)))
        self.identity.start()

    @property
    def namespace_digest(self) -> Digest | None:
        """The namespace of the KV that this process computes; None: not known yet."""
        return None if self._namespace is None else self._namespace.digest()

    def namespace_hex(self) -> str | None:
        """The same in hex; None also while the tree holds KV of another namespace."""
        digest = self.namespace_digest
        return None if digest is None or self.coordinator.keys.suspended else digest.hex()

    @property
    def device(self) -> str:
        """Name of the GPU or the processor that computes."""
        stream = _forward_stream(self._ctx)
        if stream is None:
            return platform.machine()
        return torch.cuda.get_device_name(stream.device)

    def weights_changing(self) -> None:
        """The server's weights are about to change. Live requests are forgotten: their KV is of
        mixed origin and must never be stored. Until `weights_changed`, no request is loaded."""
        self._namespace = None
        self.identity.weights_changing()
        self.coordinator.rebase(None, suspended=self.coordinator.keys.suspended)
        self._serve(None)

    def weights_changed(
        self, files: Files | None, load_format: str | None, version: str | None, *, idle: bool
    ) -> None:
        """The server's weights have changed.

        Args:
            files: the files that they were loaded from; None: not known.
            load_format: SGLang's format of these files.
            version: the user's name for them, if there is one.
            idle: no live request has KV of the old weights.
        """
        mixed = not idle or sum(self._tree.total_size()) > 0
        self.coordinator.rebase(None, suspended=mixed)
        if mixed:
            logger.info("cake: KV of the old weights is left; nothing is stored until /flush_cache")
        self.identity.weights_changed(files, load_format, version)

    def pool_going(self) -> None:
        """The memory of the KV pool is about to be released, and no forward is under way. Live
        requests are forgotten. On return no copy reads or writes the pool, and none starts before
        the next poll. A save that is late is given up, and its blocks are not stored; a copy that
        was launched is waited for, however long it takes.
        """
        self._tree.give_up_all()  # their slots are withdrawn from loads that are not launched
        self.saving.wait_launched()
        self.kv.wait_for_copies()

    def attach_store(self, setting: str) -> None:
        """From now on new requests use another store. Requests that are being loaded use the old
        store until its pending writes are done, DRAIN_S at most, and are computed from then on. The
        server need not be idle. Every rank must call this at the same point.

        Args: setting: as `--cake-store`. Raises: ConfigError, OSError, or StoreUnavailable if
            another rank raises; nothing changes then, on any rank.
        """
        store: Store | None = None
        sources: list[StoreSource] = []
        failure: Exception | None = None
        try:
            sources = self._parsed(setting)
            if self._namespace is not None:  # otherwise `on_known` opens it
                store = self._open(sources, self._namespace)
        except Exception as error:  # whatever fails, this rank takes part in the reduction
            failure = error
        if not self._consensus.everywhere(failure is None):
            if store is not None:
                self._io.post(self._start, store.close)
            raise failure or StoreUnavailable("another rank cannot make the store: see the log")
        is_other = setting != self.setting
        self.setting = setting
        self._sources = sources
        self.coordinator.store_detached = False
        if store is None:
            self._serve(None)  # for the depths, which costs have from now on
        else:
            self._use(store)
        if is_other:
            self.loader.forget_costs()
            self._recall_costs()
        logger.info("cake: store %s attached", redacted(setting))

    def detach_store(self) -> None:
        """From now on no block is loaded and no block is stored."""
        self.coordinator.store_detached = True
        self._use(None)
        logger.info("cake: store detached")

    def on_known(self, namespace: Namespace) -> None:
        """The namespace of this process is known now."""
        store: Store | None = None
        if not self.coordinator.store_detached:
            store = self._open(self._sources, namespace)
        self._namespace = namespace
        self.coordinator.rebase(namespace.digest(), suspended=self.coordinator.keys.suspended)
        whose = " of this server alone" if self.identity.is_private else ""
        logger.info("cake: namespace %s%s", namespace.digest().hex()[:16], whose)
        if store is not None:
            self._use(store)
            if not self.identity.is_private:  # a private namespace may never need its store
                self._io.post(self._start, open_now, self._in_use)

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run `work(*args)` in the background. I/O thread."""
        task = self._io.loop.create_task(work(*args))
        self._tasks.add(task)  # asyncio keeps no reference to a task
        task.add_done_callback(self._tasks.discard)

    def _in_use(self) -> Store | None:
        return self._store

    def _use(self, store: Store | None) -> None:
        old = self._store
        self._store = store
        self._serve(store)
        if old is not None:
            self._io.post(self._start, close_later, old, self.writer, self._in_use)

    def _serve(self, store: Store | None) -> None:
        """Prompts that begin from now on, and blocks that are saved, use `store`."""
        self.loader.use(store, self._depths)
        self.writer.use(store, self._depths[0])

    def close(self) -> None:
        """Stop reading, and give the store CLOSE_S to end. Blocks that are queued for writing are
        lost. Called when the process ends."""
        if self.runahead is not None:
            self.runahead.close()
        self.loader.close()
        self.copier.close()
        self._write_costs()
        if self._store is not None:
            # The process must end, and an error changes nothing any more.
            with contextlib.suppress(Exception):
                self._io.run(self._store.close(), CLOSE_S)
        self._io.close()

    @property
    def _rope_theta(self) -> float | None:
        model = self._ctx.tp_worker.model_runner.model
        return rope_theta(self._ctx.model_config.hf_text_config, model)

    @property
    def _depths(self) -> list[int]:
        """Reads at once of each tier of the store that is set."""
        return depths_of(self._sources, self._config.queue_depth)

    def _parsed(self, setting: str | None) -> list[StoreSource]:
        """The tiers of a store. Once for each setting, since it looks at the disk of the default
        store, which may hang later. Raises: ConfigError."""
        return parse_sources(
            setting,
            self._config.eviction_policy,
            sharers=machine_schedulers(self._ctx),
            pin=self._pin if self.kv.device.type == "cuda" else None,
            block_bytes=self._block_bytes,
        )

    def _open(self, sources: list[StoreSource], namespace: Namespace) -> Store:
        """Without I/O: the store is opened at its first call, and again until that works. Raises:
        ConfigError; OSError if there is no memory for it."""
        return open_blocks(
            sources,
            group_namespaces(namespace, self._groups),
            self.kv.layout,
            codec=self._config.codec,
            max_error=self._config.max_error,
            rope_theta=self._rope_theta,
            counters=self.counters,
            depth=self._config.queue_depth,
            on_device=self.kv.encoded,
        )

    def _pin(self, arena: HostArena) -> int:
        with self.kv.here():  # a thread that opens a store has no device of its own
            return pin(arena, self.kv.device)

    def _recall_costs(self) -> None:
        """Start from the costs that an earlier process measured with this model and store."""
        with contextlib.suppress(RuntimeError):  # no home folder: costs are not remembered
            self._cost_file = CostFile(
                cache_folder() / "costs",
                model=self._cost_key,
                store=str(self.setting),
                device=self.device,
            )
            learned = self._cost_file.read()
            if learned is not None:
                self.step_costs.recall(*learned)

    def _write_costs(self) -> None:
        if self._cost_file is not None and self.step_costs.measured:
            self._cost_file.write(*self.step_costs.learned)

    async def _keep_costs(self) -> None:
        """Write costs at intervals."""
        while True:
            await asyncio.sleep(WRITE_COSTS_EVERY_S)
            await asyncio.to_thread(self._write_costs)


async def open_now(in_use: Callable[[], Store | None]) -> None:
    """Have the store opened before the first request needs it."""
    try:
        if (store := in_use()) is not None:
            await store.contains([])
    except StoreError as error:
        logger.warning("cake computes all, and tries the store again: %s", error)


async def close_later(old: Store, writer: Writer, in_use: Callable[[], Store | None]) -> None:
    """Close a store that is no longer used, after the writes to it, and once the next one has
    been opened: a tier in memory that both have stays. The next one may hang, or have a bug."""
    await writer.drained(DRAIN_S)
    await asyncio.wait([asyncio.ensure_future(open_now(in_use))], timeout=DRAIN_S)
    await old.close()


async def publish_stats(metrics: StoreMetrics, in_use: Callable[[], Store | None]) -> None:
    """Publish the statistics of the store in use, at intervals."""
    broken: Store | None = None
    asked: Store | None = None
    stats: asyncio.Future[StoreStats | None] | None = None
    while True:
        if (store := in_use()) is None:
            metrics.publish(None, None)
        else:
            if stats is None or stats.done() or store is not asked:  # a disk may hang
                asked = store
                stats = asyncio.ensure_future(_stats(store))
            await asyncio.wait([stats], timeout=STATS_EVERY_S)
            try:
                metrics.publish(store, stats.result() if stats.done() else None)
            except Exception:
                if store is not broken:  # one line for each store
                    logger.exception("a store broke its contract; its metrics are incomplete")
                broken = store
        await asyncio.sleep(STATS_EVERY_S)


async def _stats(store: Store) -> StoreStats | None:
    try:
        return await store.stats()
    except StoreError:  # statistics are optional; failures of blocks are counted elsewhere
        return None


def _movers(allocator: Any) -> list[Any]:
    """The allocators of the pools that share one memory, each of which moves its own slots."""
    names = ("full_attn_allocator", "swa_attn_allocator", "mamba_allocator")
    return [getattr(allocator, name) for name in names if hasattr(allocator, name)]


def _block_slots(allocator: Any, tree: CakeRadixCache) -> Any:
    """The allocator of blocks' slots. Windows get slots when their prefix joins the tree, not with
    each block."""
    full = getattr(allocator, "full_attn_allocator", allocator)
    if tree.copier is None:
        return full
    # Only SGLang knows what is free in a memory of all pools: it also keeps to its own limit.
    return SimpleNamespace(
        alloc=full.alloc, free_segment=full.free_segment, available_size=tree.free_tokens
    )


def device_kv(
    ctx: "TreeCacheBuildContext",
    pool: Any,
    config: CakeConfig,
    apart: Sequence[object],
    drafts: Sequence[Any],
    *,
    sliced: bool,
) -> DeviceKV:
    """Copies of blocks, ordered with the streams that SGLang's forwards run on.

    Args:
        pool, apart, drafts: as for `DeviceKV`.
        sliced: blocks come in slices, which a CPU decodes.
    """
    block_tokens = config.block_tokens_in(ctx.params.page_size)
    stream = _forward_stream(ctx)
    if stream is None:  # on a CPU, the store's threads decode
        return DeviceKV(pool, block_tokens=block_tokens, apart=apart, drafts=drafts)
    kv = CudaKV(
        pool,
        block_tokens=block_tokens,
        forward_stream=stream if _pipelined(ctx) else None,
        encoded=not sliced and may_decode_on_device(config.codec, config.max_error),
        apart=apart,
        drafts=drafts,
    )
    kv.remote_writes = may_decode_for_others(resolving_view(ctx.server_args))
    return kv


def shard_of(
    ctx: "TreeCacheBuildContext", machines: Sequence[float], drafts: Sequence[object] = ()
) -> KvShard:
    """The shard of this process, with the pools of draft models that it has.

    MLA's latent rows are computed from replicated weights and from the sum over all ranks, so they
    are the same on all of them. So are the compressed KV, the index, the windows and the sums of
    DeepSeek V4. SGLang's HiCache stores both once for the same reason. In a hybrid of MLA and
    recurrent layers, ranks divide the states alone.

    Args: machines: as for `KvShard.of_rank`.
    """
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    has_own_states = isinstance(pool, HybridLinearKVPool)
    pool = pool.full_kv_pool if has_own_states else pool
    return KvShard.of_rank(
        get_parallel().attn_tp_rank,
        machines,
        replicated=all(
            isinstance(each, MLATokenToKVPool) or is_compressed(each) for each in (pool, *drafts)
        ),
        has_own_states=has_own_states,
    )


def _machine(ctx: "TreeCacheBuildContext") -> str:
    """Names what has folders of its own: a node of `--nnodes`, a container, or a machine of Ray,
    which may place the ranks of one node on several."""
    node: int = resolving_view(ctx.server_args).node_rank
    return " ".join((str(node), platform.node(), this_boot()))


def machine_schedulers(ctx: "TreeCacheBuildContext") -> int:
    """Scheduler processes of this server on one machine: the ranks of all replicas."""
    replicas: int = get_parallel().num_dp_ranks // get_parallel().attn_dp_size
    schedulers: int = ctx.tp_size * replicas // resolving_view(ctx.server_args).nnodes
    return max(1, schedulers)


def _sliced(layout: BlockLayout, slices: int, ends: EndStates | None) -> BlockLayout:
    """The layout of a slice. Raises: ConfigError if there are no such slices."""
    hint = "set --cake-head-groups to the number of ranks, or remove it"
    if slices > 1 and ends is not None:
        raise ConfigError(f"cake cannot divide end states by heads: {hint}")
    try:
        return layout.sliced(slices)
    except ValueError as error:
        raise ConfigError(f"cake cannot store KV in groups of heads, {error}: {hint}") from None


def _forward_stream(ctx: "TreeCacheBuildContext") -> torch.cuda.Stream | None:
    stream = getattr(ctx.tp_worker.model_runner, "forward_stream", None)
    return stream if isinstance(stream, torch.cuda.Stream) else None


def _step_costs(ctx: "TreeCacheBuildContext", loader: Loader, *, alone: bool) -> StepCosts:
    on_gpu = _forward_stream(ctx) is not None
    model, graphs = ctx.model_config, resolving_view(ctx.server_args).cuda_graph_config.prefill
    has_graphs = on_gpu and graphs.backend != "disabled"
    return StepCosts(
        loader,
        PrefillCost.prior(
            hidden=model.hidden_size,
            on_gpu=on_gpu,
            prefix_flops=_prefix_flops(model) if on_gpu else 0.0,
            graph_tokens=tuple(sorted(graphs.bs or ())) if has_graphs else (),
        ),
        chunk_tokens=flags.chunk_tokens(resolving_view(ctx.server_args)),
        pipelined=_pipelined(ctx),
        alone=alone,
    )


def _prefix_flops(model: "ModelConfig") -> float:
    """FLOPs of a layer in a step, per token of the prefix: with MLA, SGLang's kernels for prefill
    take K and V of all heads, so the latent vectors of the prefix are projected in each step."""
    if model.attention_arch != AttentionArch.MLA:
        return 0.0
    widths = model.qk_nope_head_dim + model.v_head_dim
    return float(2 * model.kv_lora_rank * model.num_attention_heads * widths)


def _pipelined(ctx: "TreeCacheBuildContext") -> bool:
    # On a CPU a forward runs to its end in the scheduler thread, overlap scheduling or not.
    on_gpu = _forward_stream(ctx) is not None
    # SGLang itself turns it off for some models: only the resolved settings tell.
    return on_gpu and not resolving_view(ctx.server_args).disable_overlap_schedule


def _priority_sign(ctx: "TreeCacheBuildContext") -> int:
    """As for `Coordinator`."""
    args = resolving_view(ctx.server_args)
    if not args.enable_priority_scheduling:
        return 0
    return 1 if args.schedule_low_priority_values_first else -1
