"""`file:///abs/path?capacity=500GB&min_free=20GB&fsync=off`: blocks in a folder."""

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.keys import Digest
from sglang_cake.core.local_files import cache_folder
from sglang_cake.stores.base import BlockInfo, Store, StoredNamespace, StoreStats
from sglang_cake.stores.eviction import POLICIES
from sglang_cake.stores.eviction.policy import ADMIT_ALL, AdmissionPolicy
from sglang_cake.stores.eviction.tenants import NO_TENANT_RULES, TenantRules
from sglang_cake.stores.file import read_only_view
from sglang_cake.stores.file.disk import SHARED, file_system_type
from sglang_cake.stores.file.file_store import FileStore
from sglang_cake.stores.file.folder import BlockFolder
from sglang_cake.stores.file.os_errors import foreign_errors
from sglang_cake.stores.file.ownership import check_folder
from sglang_cake.stores.url import DEFAULT_POLICY, StoreUrl, one_of, parse_size

# A store never fills a disk to the last byte, even where the user named no bound.
DEFAULT_MIN_FREE_BYTES = 10**9
# Of the file system, for the store nobody asked for by name: what it may take, what stays free.
DEFAULT_SHARE, DEFAULT_MIN_FREE_SHARE = 0.5, 0.2
LEAST_CAPACITY_BYTES = 16 << 20  # the index alone may take 5 MiB


@dataclass(frozen=True, slots=True)
class FileSource:
    """Implements `StoreSource`."""

    path: Path  # absolute
    fsync: str = "off"  # or "data"
    min_free_bytes: int = DEFAULT_MIN_FREE_BYTES
    capacity_bytes: int | None = None
    policy: str = DEFAULT_POLICY
    reads_count: bool = True  # as use, for eviction
    tenant_rules: TenantRules = NO_TENANT_RULES
    admission: AdmissionPolicy = ADMIT_ALL

    def check(self) -> None:
        try:
            check_folder(self.path)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"probe")
                probe.flush()
            shared = SHARED.get(file_system_type(self.path))
        except OSError as error:
            raise ConfigError(
                f"store folder {self.path} cannot be made or written: {error.strerror}"
            ) from None
        if shared:
            raise ConfigError(
                f"store folder {self.path} is on {shared}, over which processes of several "
                "machines cannot share the index: take a folder on a disk of this machine, or an "
                "http:// URL of `sglang-cake store serve` on the machine that has the disk"
            )

    def check_ours(self) -> None:
        """The folder is absent, empty, or a store. Changes nothing.

        Raises: ConfigError; StoreUnavailable if it cannot be read.
        """
        with foreign_errors(self.path):
            check_folder(self.path)

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        folder = self.folder()
        try:
            return FileStore(folder, frame, threads=depth, reads_count=self.reads_count)
        except BaseException:
            folder.close()
            raise

    async def namespaces(self) -> list[StoredNamespace]:
        """Changes nothing. Raises: ConfigError; StoreUnavailable."""
        self.check_ours()
        return await asyncio.to_thread(read_only_view.namespaces_in, self.path)

    def blocks_in(self, digest: Digest) -> Iterator[BlockInfo]:
        """The blocks of one namespace, for who only looks. Changes nothing."""
        self.check_ours()
        return read_only_view.blocks_in(self.path, digest)

    def stats(self) -> StoreStats:
        """Totals of all namespaces, for who only looks. Changes nothing."""
        self.check_ours()
        found = read_only_view.stats_in(self.path)
        return dataclasses.replace(found, capacity_bytes=self.capacity_bytes, policy=self.policy)

    def folder(self) -> BlockFolder:
        """All namespaces at once, for tools; the caller closes it.

        Raises: StoreUnavailable; ConfigError if it is somebody else's.
        """
        self.check_ours()
        return BlockFolder(
            self.path,
            sync=self.fsync == "data",
            min_free_bytes=self.min_free_bytes,
            capacity_bytes=self.capacity_bytes,
            policy=self.policy,
            tenant_rules=self.tenant_rules,
            admission=self.admission,
        )


def parse(url: StoreUrl) -> FileSource:
    """Raises: ConfigError."""
    return FileSource(
        path=_path(url),
        fsync=url.option("fsync", one_of("off", "data"), "off"),
        min_free_bytes=url.option("min_free", parse_size, DEFAULT_MIN_FREE_BYTES),
        capacity_bytes=url.option("capacity", _parse_capacity, None),
        policy=url.option("policy", one_of(*POLICIES), url.policy),
        reads_count=url.reads_count,
        tenant_rules=TenantRules(
            quota_bytes=url.option("tenant_quota", parse_size, None),
            fair=url.option("fair", one_of("on", "off"), "off") == "on",
        ),
        admission=url.option("admit", _parse_admission, ADMIT_ALL),
    )


def _parse_admission(text: str) -> AdmissionPolicy:
    try:
        min_benefit_ratio = float(text)
    except ValueError:
        min_benefit_ratio = -1.0
    if not 0 <= min_benefit_ratio <= 1e6:
        raise ConfigError(f"{text!r} is not possible, write a number from 0 on, as 0.3")
    return AdmissionPolicy(min_benefit_ratio)


def _parse_capacity(text: str) -> int | None:
    size_bytes = parse_size(text)
    if size_bytes < LEAST_CAPACITY_BYTES:
        raise ConfigError(f"{text!r} is too small, at least {LEAST_CAPACITY_BYTES} bytes")
    return size_bytes


def _path(url: StoreUrl) -> Path:
    if "#" in url.place:
        raise url.error("write a '#' that belongs to the path as %23")
    path = unquote(url.place)
    if "~" in path.split("/") or "$" in path or path.startswith("~"):
        raise url.error("'~' and '$' are not expanded, write the absolute path")
    if not path.startswith("/"):
        raise url.error("the path is not absolute, write file:///absolute/path")
    if "\0" in path or not path.strip("/"):
        raise url.error("names no folder, write file:///absolute/path")
    # Path keeps a doubled leading slash, which POSIX lets mean something else.
    return Path("/" + path.lstrip("/"))


def default_source(policy: str = DEFAULT_POLICY) -> FileSource:
    """The store of who named none: in the user's cache folder, at most half of the disk, and a
    fifth of it kept free.

    Raises: ConfigError if there is no home folder, or its disk cannot be asked for its size.
    """
    try:
        path = cache_folder() / "store"
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        stat = os.statvfs(there)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no default store ({error}): name one, as file:///nvme/kv") from None
    size_bytes = stat.f_blocks * stat.f_frsize
    return FileSource(
        path,
        min_free_bytes=int(size_bytes * DEFAULT_MIN_FREE_SHARE),
        capacity_bytes=int(size_bytes * DEFAULT_SHARE),
        policy=policy,
    )
