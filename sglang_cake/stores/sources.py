"""From a store's URL to the one who can open it. Built-in schemes, and others' entry points."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError
from sglang_cake.stores.base import Store, StoredNamespace, StoreSource
from sglang_cake.stores.file.file_source import default_source
from sglang_cake.stores.throttled import ThrottledStore
from sglang_cake.stores.url import (
    DEFAULT_POLICY,
    StoreUrl,
    absolute_path,
    parse_bandwidth,
    split_urls,
)

ENTRY_POINTS = "sglang_cake.stores"
# Imported when a URL asks for them: each may need a package that is an optional extra.
BUILT_IN = {
    "file": "sglang_cake.stores.file.file_source",
    "http": "sglang_cake.stores.http.http_source",
    "https": "sglang_cake.stores.http.http_source",
    "mooncake": "sglang_cake.stores.mooncake.mooncake_url",
    "s3": "sglang_cake.stores.s3.s3_url",
}


def parse_sources(
    text: str, policy: str = DEFAULT_POLICY, *, reads_count: bool = True
) -> list[StoreSource]:
    """The stores that `URL[,URL...]` names, fastest first. No I/O but imports.

    Args: reads_count: as use, for eviction, in stores of ours.
    Raises: ConfigError, one line that names the bad part and what is allowed.
    """
    return [_source(url) for url in split_urls(text, policy, reads_count=reads_count)]


def sources_of(setting: str | None, policy: str) -> list[StoreSource]:
    """The stores of a setting; None is a file store in the user's cache folder.

    Raises: ConfigError.
    """
    return [default_source(policy)] if setting is None else parse_sources(setting, policy)


def _source(url: StoreUrl) -> StoreSource:
    """One URL's source. Options of any scheme wrap it: a sealed block crosses the link as it is."""
    bandwidth = url.option("bandwidth", parse_bandwidth, 0.0)
    key_file = url.option("key_file", absolute_path, None)
    source = _parser(url)(url)
    url.finish()
    if bandwidth:
        source = _ThrottledSource(source, bandwidth)
    if key_file is None:
        return source
    from sglang_cake.stores.encrypted import EncryptedSource  # loads cryptography

    return EncryptedSource(source, key_file)


def _parser(url: StoreUrl) -> Callable[[StoreUrl], StoreSource]:
    if url.scheme in BUILT_IN:
        parse: Callable[[StoreUrl], StoreSource] = importlib.import_module(
            BUILT_IN[url.scheme]
        ).parse
        return parse
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if url.scheme not in others:
        allowed = ", ".join(sorted(BUILT_IN.keys() | others.keys()))
        raise url.error(f"unknown scheme {url.scheme!r}, allowed: {allowed}")
    try:
        loaded: Callable[[StoreUrl], StoreSource] = others[url.scheme].load()
    except Exception as error:  # anybody's code; whatever it raises, the store cannot be used
        why = " ".join(str(error).split())
        raise url.error(f"{others[url.scheme].value} cannot be imported: {why}") from None
    return loaded


@dataclass(frozen=True, slots=True)
class _ThrottledSource:
    """A source whose reads are held to a bandwidth."""

    inner: StoreSource
    bytes_per_s: float

    def check(self) -> None:
        self.inner.check()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return ThrottledStore(
            self.inner.open(frame, depth=depth),
            bytes_per_s=self.bytes_per_s,
            block_bytes=frame.payload_bytes,
        )

    async def namespaces(self) -> list[StoredNamespace]:
        return await self.inner.namespaces()


def missing_extra(url: StoreUrl, package: str, extra: str) -> ConfigError:
    """What to raise when an optional package is not installed."""
    return url.error(f"needs {package}: pip install 'sglang-cake[{extra}]'")
