"""Store URLs: `scheme://place?name=value&...`, several joined by commas."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from sglang_cake.core.buffers import Pin
from sglang_cake.core.errors import ConfigError

Value = TypeVar("Value")
DEFAULT_POLICY = "cake-prefix"
MEMORY = "memory"  # scheme

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = _DECIMAL | _BINARY
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)"
_SIZE = re.compile(_NUMBER + r" ?(?:([kKMGTP]i?)?B)?")
_BANDWIDTH = re.compile(_NUMBER + r" ?([kKMGTP]i?)?(B/s|bit/s|bps)")


# Behind `://`: a user, or a user and any password; then options that hold a secret.
_USER = re.compile(
    r"(?i)(://|%3a%2f%2f)(?:[^/?#\s]*:(?:(?!,\w+://)\S)*|(?:(?!,\w+://)[^/?#\s])*)(@|%40)"
)
_SECRET = re.compile(
    r"(?i)([?&](?![a-z_]*_file=)[^=&\s]*(?:pass|pwd|secret|token|key|credential|signature)[^=&\s]*=)"
    r"[^&,\s'\"]*"
)


def redacted(text: str) -> str:
    """A text that may hold URLs, for messages and logs: without users, passwords and tokens."""
    return _SECRET.sub(r"\1***", _USER.sub(r"\1***\2", text))


def parse_size(text: str) -> int:
    """Bytes in `500GB`, `1.5GiB`, `200kB` or `4096`; GB is 10^9, GiB 2^30. Raises: ConfigError."""
    match = _SIZE.fullmatch(text)
    prefix = (match[2] or "") if match else ""
    if match is None or prefix not in _PREFIXES:
        raise ConfigError(f"{text!r} is not a size: write bytes, or for example 500GB or 1.5GiB")
    return int(Decimal(match[1]) * _PREFIXES[prefix])


def parse_quota(text: str) -> int:
    """As `parse_size`. Raises: ConfigError; also for zero."""
    size_bytes = parse_size(text)
    if not size_bytes:
        raise ConfigError(f"{text!r} would keep nothing: leave it out for no quota")
    return size_bytes


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


def one_of(*allowed: str) -> Callable[[str], str]:
    """A reader for `StoreUrl.option` that takes some words only."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ConfigError(f"{text!r} is not possible, allowed: {', '.join(allowed)}")
        return text

    return read


def matching(pattern: re.Pattern[str], otherwise: str) -> Callable[[str], str]:
    """A reader for `StoreUrl.option` that takes what matches; other text is `otherwise`."""

    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ConfigError(f"{text!r} is {otherwise}")
        return text

    return read


def absolute_path(text: str) -> Path:
    """A reader for `StoreUrl.option` that takes the path of a file. Raises: ConfigError."""
    if not text.startswith("/") or "\0" in text:
        raise ConfigError(f"{text!r} is not an absolute path")
    return Path(text)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """One URL taken apart; its scheme's `parse` takes the options and then calls `finish`."""

    text: str  # as the user wrote it; `shown` is for messages
    scheme: str
    place: str  # between `://` and `?`, still percent-encoded
    options: dict[str, str]  # decoded
    policy: str = DEFAULT_POLICY  # of eviction, where the URL names none
    reads_count: bool = True  # reads are accesses, for eviction; False for tools
    sharers: int = 1  # processes of this machine that open it
    pin: Pin | None = None  # for host memory that a device copies from
    block_bytes: int = 0  # of a block without codec; 0: not known yet
    behind_memory: bool = False  # a tier before it is memory
    _known: list[str] = field(default_factory=list)

    def option(self, name: str, read: Callable[[str], Value], default: Value) -> Value:
        """The value of one option, or `default`. Raises: ConfigError that names the option."""
        self._known.append(name)
        if name not in self.options:
            return default
        try:
            return read(self.options[name])
        except ConfigError as error:
            raise self.error(f"{name!r}: {error}") from None

    def finish(self) -> None:
        """Every option was asked for. Raises: ConfigError for one that was not."""
        for name in self.options:
            if name not in self._known:
                allowed = ", ".join(sorted(self._known))
                raise self.error(f"{name!r}: unknown key, allowed: {allowed}")

    @property
    def shown(self) -> str:
        """The URL for messages, logs and tables: without a password or a token."""
        return redacted(self.text)

    def error(self, message: str) -> ConfigError:
        """One line that names this URL."""
        return ConfigError(f"store URL {self.shown!r}: {redacted(message)}")

    def is_place_of(self, other: "StoreUrl") -> bool:
        """Whether both name the same place, with any options. Follows links."""
        return self._place == other._place

    @property
    def _place(self) -> tuple[str, str, str]:
        if self.scheme == MEMORY:
            return self.scheme, "", ""
        if self.scheme == "file":
            path, _, _ = unquote(self.place).partition("\0")  # which no path may have
            return self.scheme, os.path.realpath(path), ""
        place = re.sub("/+", "/", unquote(self.place)).strip("/")
        host, slash, path = place.partition("/")
        place = host.lower() + slash + path
        return self.scheme, place, self.options.get("endpoint", "").rstrip("/").lower()


def split_urls(text: str) -> list[StoreUrl]:
    """Take apart `URL[,URL...]`; a comma that belongs to a URL is written %2C.

    Raises: ConfigError, one line that names the bad part.
    """
    if not text.strip():
        raise ConfigError("the store URL is empty: write for example file:///nvme/kv")
    if re.search(r"://[^/?#,]*:[^/?#,]*,[^/?#]*@", text):  # half a password would be a URL
        raise ConfigError(f"store URL {redacted(text)!r}: write a ',' in it as %2C")
    urls = [_split(part.strip()) for part in text.split(",")]
    for number, url in enumerate(urls):
        if any(url.is_place_of(before) for before in urls[:number]):
            raise url.error("is named twice: name each store once")
    schemes = [url.scheme for url in urls]
    return [
        replace(url, behind_memory=MEMORY in schemes[:number]) for number, url in enumerate(urls)
    ]


def _split(text: str) -> StoreUrl:
    scheme, separator, rest = text.partition("://")
    if not separator:
        shown = redacted(f"://{text}").removeprefix("://")
        raise ConfigError(f"store URL {shown!r}: write for example file:///absolute/path")
    place, _, query = rest.partition("?")
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name in options:
            raise ConfigError(f"store URL {redacted(text)!r}: {name!r} is given twice")
        options[name] = unquote(value)
    return StoreUrl(text, scheme, place, options)
