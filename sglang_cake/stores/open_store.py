"""From the URLs of a setting to one open store. Every layer between a loader and its bytes is added
here. Outermost first; a layer in brackets exists only with the setting beside it:

    [HeadSliceStore]            blocks of several head groups: one of all that follows for each
      CountedStore              codec `raw`, or
      EncodedStore              any other codec
        [TieredStore]           several URLs, one tier each
          LazyStore             opened at its first call
            [EncryptedStore]    ?key_file=
              [ThrottledStore]  ?bandwidth=
                HostMemoryStore, FileStore, HttpStore, S3Store, MooncakeStore, or a third party's
                store
"""

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Final

from sglang_cake.codecs.frame import BlockFrame, encoded_frame
from sglang_cake.core.buffers import Pin
from sglang_cake.core.codec_names import AUTO, RAW
from sglang_cake.core.counters import Counters
from sglang_cake.core.errors import one_line
from sglang_cake.core.keys import Namespace
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.threads import DaemonPool, submit
from sglang_cake.stores.base import (
    CountedStore,
    LazyStore,
    Store,
    StoreLayer,
    StoreSource,
    depth_of,
    describe,
)
from sglang_cake.stores.encoded import CodecThreads, Encode, EncodedStore, chains_of, decode_threads
from sglang_cake.stores.file.file_store import default_source
from sglang_cake.stores.head_slices import HeadSliceStore, SliceCounters
from sglang_cake.stores.link_speed import LinkSpeed
from sglang_cake.stores.throttled import ThrottledSource
from sglang_cake.stores.tiers.tier import memory_store_of
from sglang_cake.stores.tiers.tiered_store import COPY_BYTES, TieredStore
from sglang_cake.stores.url import (
    DEFAULT_POLICY,
    MEMORY,
    StoreUrl,
    absolute_path,
    parse_bandwidth,
    split_urls,
)

ENTRY_POINTS: Final = "sglang_cake.stores"


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A scheme of this package. Its module is imported when a URL has the scheme."""

    module: str  # has `parse`
    requires: str = ""  # module of an optional package
    package: str = ""
    extra: str = ""  # installs the package
    product: str = ""  # name of the package in messages
    needs: str = ""  # how to install what the package itself loads


_FILE = _BuiltIn("sglang_cake.stores.file.file_store")
_HTTP = _BuiltIn("sglang_cake.stores.http.http_store")
BUILT_IN: Final = {
    "file": _FILE,
    "http": _HTTP,
    "https": _HTTP,
    MEMORY: _BuiltIn("sglang_cake.stores.memory.host_memory_store"),
    "mooncake": _BuiltIn(
        "sglang_cake.stores.mooncake.mooncake_store",
        requires="mooncake.store",
        package="mooncake-transfer-engine",
        extra="mooncake",
        product="Mooncake",
        needs="on Debian or Ubuntu: apt-get install libibverbs1 libnuma1",
    ),
    "s3": _BuiltIn(
        "sglang_cake.stores.s3.s3_store",
        requires="aiobotocore.session",
        package="aiobotocore",
        extra="s3",
        product="aiobotocore",
        needs="install the version of the extra",
    ),
}


def open_blocks(
    sources: list[StoreSource],
    namespaces: Sequence[Namespace],
    layout: BlockLayout,
    *,
    codec: str,
    depth: int | None = None,
    max_error: float = 0.0,
    rope_theta: float | None = None,
    counters: Counters | None = None,
    on_device: bool = False,
) -> Store:
    """Open the blocks of a server; the caller closes the store. With `auto` and several sources,
    the codec is chosen for each tier.

    Compiles the kernels of the codec, which takes seconds the first time.

    Args:
        namespaces: of the slices by KV heads, in the order of heads; one, if blocks are stored
            whole. They name the codec.
        layout: the layout of whole blocks.
        depth: as for `open_store`.
        max_error: the bound of `auto`.
        rope_theta: see `catalogue.chain_of`.
        on_device: see `EncodedStore`; ignored with codec `raw`.

    Raises: ConfigError if the codec cannot encode such blocks.
    """
    counters = counters or Counters()
    cut = layout.sliced(len(namespaces))
    reads = sum(depths_of(sources, depth))
    copy_bytes = COPY_BYTES // len(namespaces)
    open_namespace = partial(open_store, sources, depth=depth, copy_bytes=copy_bytes)
    threads = CodecThreads(reads)  # none is started without a codec

    def opened(namespace: Namespace, counters: Counters) -> Store:
        frame = encoded_frame(namespace, cut, codec)
        if codec == RAW:
            return CountedStore(open_namespace(frame), counters)
        from sglang_cake.codecs.codec_choice import AutoCodec, FixedCodec

        chains = chains_of(cut, codec, max_error, rope_theta)
        inner = open_namespace(frame)
        link = LinkSpeed()
        encode: Encode
        if codec == AUTO:
            encode = AutoCodec(
                cut,
                chains,
                max_error=max_error,
                links=_speeds_for_auto(inner, link, len(namespaces)),
                decode_threads=decode_threads(reads),
                counters=counters,
                on_device=on_device,
            ).encode
        else:
            encode = FixedCodec(cut, codec, chains[codec]).encode
        return EncodedStore(
            inner,
            cut,
            encode,
            link=link,
            counters=counters,
            payload_bytes=frame.payload_bytes,
            depth=reads,
            on_device=on_device,
            threads=threads,
        )

    first, *others = namespaces
    store = opened(first, counters)
    if others:
        slices = [opened(namespace, SliceCounters(counters)) for namespace in others]
        store = HeadSliceStore([store, *slices], layout, depth=reads)
    return store


def _speeds_for_auto(
    store: Store, link: LinkSpeed, slices: int
) -> list[Callable[[], float | None]]:
    """Bytes per second of each tier, as for `choose`: of all slices together, since they share the
    threads that decode.

    Args:
        link: of a store without tiers.
        slices: as many are read at once as a block has. Each measures its own share of the link.
    """
    if isinstance(store, TieredStore):
        return [_speed_for_auto(tier.store, tier.speed, slices) for tier in store.tiers]
    return [_speed_for_auto(store, link, slices)]


def _speed_for_auto(store: Store, link: LinkSpeed, slices: int) -> Callable[[], float | None]:
    """The measured speed of memory is that of its writes, which wait for threads."""

    def bytes_per_s() -> float | None:
        if memory_store_of(store) is not None:
            return math.inf
        speed = link.bytes_per_s()
        return None if speed is None else slices * speed

    return bytes_per_s


def open_store(
    sources: list[StoreSource],
    frame: BlockFrame,
    *,
    depth: int | None = None,
    copy_bytes: int = COPY_BYTES,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """A namespace without codec; the caller closes it. No I/O: each source is opened by the first
    call, and again until that works.

    Args:
        sources: several are the tiers of one store, fastest first.
        depth: calls of each kind that each source should serve at once; None: as many as its link
            needs.
        copy_bytes: host memory for the copies of each tier.
    """
    depths = depths_of(sources, depth)
    stores = [
        LazyStore(source, frame, depth=each) for source, each in zip(sources, depths, strict=True)
    ]
    if len(stores) == 1:
        return stores[0]
    return TieredStore(
        stores,
        depths=depths,
        block_bytes=frame.payload_bytes,
        copy_bytes=copy_bytes,
        clock=clock,
    )


def depths_of(sources: Sequence[StoreSource], depth: int | None) -> list[int]:
    """Reads at once of each source. Args: depth: as for `open_store`."""
    return [depth or depth_of(source) for source in sources]


def describe_store(sources: list[StoreSource], codec: str = RAW) -> StoreLayer:
    """Layers that `open_blocks` opens for a server. Opens nothing."""
    tiers = tuple(StoreLayer("LazyStore", {}, (describe(source),)) for source in sources)
    inner = tiers[0] if len(tiers) == 1 else StoreLayer("TieredStore", {}, tiers)
    if codec == RAW:
        return StoreLayer("CountedStore", {}, (inner,))
    return StoreLayer("EncodedStore", {"codec": codec}, (inner,))


def parse_sources(
    text: str | None,
    policy: str = DEFAULT_POLICY,
    *,
    reads_count: bool = True,
    sharers: int = 1,
    pin: Pin | None = None,
    block_bytes: int = 0,
) -> list[StoreSource]:
    """Sources of a `--cake-store`, `URL[,URL...]`, fastest first. No I/O but imports, unless `text`
    is None.

    Args:
        text: None is a file store in the user's cache folder.
        policy: eviction policy of file and memory stores whose URL names none.
        reads_count: reads are accesses for eviction; False for tools, which never lead it.
        sharers: processes of this machine that open the stores.
        pin: for host memory that a device copies from.
        block_bytes: of a block without codec; 0: not known yet.

    Raises: ConfigError, one line that names the bad part and the allowed values.
    """
    if text is None:
        return [replace(default_source(policy), reads_count=reads_count)]
    return [
        _source(
            replace(
                url,
                policy=policy,
                reads_count=reads_count,
                sharers=sharers,
                pin=pin,
                block_bytes=block_bytes,
            )
        )
        for url in split_urls(text)
    ]


def check_sources(sources: Sequence[StoreSource]) -> None:
    """Call the `check` of every source, each in a thread of its own, so that servers that do not
    answer are waited for once.

    Raises: ConfigError of the first tier that has one.
    """
    pool = DaemonPool(len(sources), "cake-check")
    checks = [submit(pool, source.check) for source in sources]
    pool.shutdown(wait=False)
    for check in checks:
        check.result()


def _source(url: StoreUrl) -> StoreSource:
    """Source of one URL. The limited link carries ciphertext."""
    bytes_per_s = url.option("bandwidth", parse_bandwidth, 0.0)
    key_file = url.option("key_file", absolute_path, None)
    source = _parser(url)(url)
    url.finish()
    if bytes_per_s:
        source = ThrottledSource(source, bytes_per_s)
    if key_file is None:
        return source
    from sglang_cake.stores.encrypted import EncryptedSource  # imports cryptography

    return EncryptedSource(source, key_file)


def _parser(url: StoreUrl) -> Callable[[StoreUrl], StoreSource]:
    """The function `parse` of the scheme. Raises: ConfigError."""
    parse: Callable[[StoreUrl], StoreSource]
    built_in = BUILT_IN.get(url.scheme)
    if built_in is not None:
        try:
            if built_in.requires:
                importlib.import_module(built_in.requires)
        except ModuleNotFoundError:
            raise url.error(
                f"needs {built_in.package}: pip install 'sglang-cake[{built_in.extra}]'"
            ) from None
        except ImportError as error:
            raise url.error(
                f"{built_in.product} cannot be loaded ({error}); {built_in.needs}"
            ) from None
        parse = importlib.import_module(built_in.module).parse
        return parse
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if url.scheme not in others:
        allowed = ", ".join(sorted(BUILT_IN.keys() | others.keys()))
        raise url.error(f"unknown scheme {url.scheme!r}, allowed: {allowed}")
    try:
        parse = others[url.scheme].load()
    except Exception as error:  # third-party code may raise anything
        point = others[url.scheme].value
        raise url.error(f"{point} cannot be imported: {one_line(error)}") from None
    return parse
