"""What a user may write as a store: `file:///abs/path?bandwidth=50MB/s&fsync=off&min_free=20GB`."""

import os
import re
import tempfile
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from sglang_cake.errors import ConfigError
from sglang_cake.store.file import Fsync

# A store never fills a disk to the last byte, even where the user named no bound.
DEFAULT_MIN_FREE_BYTES = 10**9
DEFAULT_MIN_FREE_SHARE = 0.2  # of the file system, for the store nobody asked for by name

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = _DECIMAL | _BINARY
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)"
_SIZE = re.compile(_NUMBER + r" ?(?:([kKMGTP]i?)?B)?")
_BANDWIDTH = re.compile(_NUMBER + r" ?([kKMGTP]i?)?(B/s|bit/s|bps)")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """One store, as the user described it."""

    scheme: str  # "file", the only one so far
    path: Path  # absolute
    bandwidth_bytes_per_s: float | None = None  # cap on reads; None: as fast as it goes
    fsync: Fsync = "off"
    min_free_bytes: int = DEFAULT_MIN_FREE_BYTES


def parse_size(text: str) -> int:
    """Bytes in `500GB`, `1.5GiB`, `200kB` or `4096`; GB is 10^9, GiB 2^30. Raises: ConfigError."""
    match = _SIZE.fullmatch(text)
    prefix = (match[2] or "") if match else ""
    if match is None or prefix not in _PREFIXES:
        raise ConfigError(f"{text!r} is not a size: write bytes, or for example 500GB or 1.5GiB")
    return int(Decimal(match[1]) * _PREFIXES[prefix])


def parse_bandwidth(text: str) -> float:
    """Bytes a second in `50MB/s`, `1GiB/s`, `32Gbps` or `7Gbit/s`; the last two count bits.

    Raises: ConfigError; also for zero.
    """
    match = _BANDWIDTH.fullmatch(text)
    prefix = (match[2] or "") if match else ""
    if match is None or prefix not in _PREFIXES or not Decimal(match[1]):
        raise ConfigError(
            f"{text!r} is not a bandwidth: write for example 50MB/s, or in bits 32Gbps or 7Gbit/s"
        )
    units = Decimal(match[1]) * _PREFIXES[prefix]
    return float(units if match[3] == "B/s" else units / 8)


def parse_store_url(text: str) -> StoreUrl:
    """Read one store URL.

    Raises: ConfigError, one line that names the bad part and what is allowed.
    """
    if not text.strip():
        raise ConfigError("the store URL is empty: write for example file:///nvme/kv")
    if "," in text:
        raise ConfigError(
            f"store URL {text!r}: only one store is possible in this version "
            "(write a comma that belongs to a path as %2C)"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise ConfigError(f"store URL {text!r}: write file:///absolute/path")
    if scheme != "file":
        raise ConfigError(f"store URL {text!r}: unknown scheme {scheme!r}, allowed: file")
    path, _, query = rest.partition("?")
    return StoreUrl(scheme=scheme, path=_path(text, path), **_options(text, query))


def _path(text: str, raw: str) -> Path:
    if "#" in raw:
        raise ConfigError(f"store URL {text!r}: write a '#' that belongs to the path as %23")
    path = unquote(raw)
    if "~" in path.split("/") or "$" in path or path.startswith("~"):
        raise ConfigError(
            f"store URL {text!r}: '~' and '$' are not expanded, write the absolute path"
        )
    if not path.startswith("/"):
        raise ConfigError(
            f"store URL {text!r}: the path is not absolute, write file:///absolute/path"
        )
    if "\0" in path or not path.strip("/"):
        raise ConfigError(f"store URL {text!r}: names no folder, write file:///absolute/path")
    # Path keeps a doubled leading slash, which POSIX lets mean something else.
    return Path("/" + path.lstrip("/"))


def _options(text: str, query: str) -> dict[str, Any]:
    """Keyword arguments of StoreUrl."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name in seen:
            raise ConfigError(f"store URL {text!r}: {name!r} is given twice")
        seen.add(name)
        try:
            found.update(_option(name, unquote(value)))
        except ConfigError as error:
            raise ConfigError(f"store URL {text!r}: {name!r}: {error}") from None
    return found


def _option(name: str, value: str) -> dict[str, Any]:
    if name == "bandwidth":
        return {"bandwidth_bytes_per_s": parse_bandwidth(value)}
    if name == "min_free":
        return {"min_free_bytes": parse_size(value)}
    if name == "fsync":
        if value not in ("off", "data"):
            raise ConfigError(f"{value!r} is not possible, allowed: off, data")
        return {"fsync": cast(Fsync, value)}
    if name == "capacity":
        raise ConfigError("nothing is evicted in this version, bound the disk with min_free")
    raise ConfigError("unknown key, allowed: bandwidth, fsync, min_free")


def default_store_url() -> StoreUrl:
    """The store of who named none: in the user's cache folder, a fifth of the disk kept free.

    Raises: ConfigError if there is no home folder, or its disk cannot be asked for its size.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if not cache.is_absolute():  # unset, or to be ignored by the XDG specification
            cache = Path.home() / ".cache"
        path = cache / "sglang_cake" / "store"
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        stat = os.statvfs(there)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no default store ({error}): name one, as file:///nvme/kv") from None
    size_bytes = stat.f_blocks * stat.f_frsize
    return StoreUrl("file", path, min_free_bytes=int(size_bytes * DEFAULT_MIN_FREE_SHARE))


def check_store_url(url: StoreUrl) -> None:
    """Find out now, and not at the first put, whether the store's folder can be made and written.

    Raises: ConfigError, one line.
    """
    try:
        url.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=url.path) as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as error:
        raise ConfigError(
            f"store folder {url.path} cannot be made or written: {error.strerror}"
        ) from None
