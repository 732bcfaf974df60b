"""URLs of HTTP stores: `http://host:8700`, `https://host/prefix?token_file=/path&ca=/path`."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError, StoreUnavailable
from sglang_cake.stores.base import Description, Store, StoredNamespace
from sglang_cake.stores.http import protocol
from sglang_cake.stores.http.auth import is_loopback, load_tokens, own_token_path
from sglang_cake.stores.http.http_client import HttpStore
from sglang_cake.stores.http.http_transport import Endpoint, HttpTransport, read_whole, refuse
from sglang_cake.stores.timing import TimeoutLimits
from sglang_cake.stores.url import StoreUrl, absolute_path


@dataclass(frozen=True, slots=True)
class HttpSource:
    """Implements `StoreSource`."""

    base: str  # without a slash at the end
    token_file: Path | None = None  # None: the user's own token, for a loopback address only
    ca: Path | None = None  # trusted certificates; None: those of the system
    reads_count: bool = True  # whether the server counts a GET as a use of the block

    def check(self) -> None:
        """Check that the files can be read, but not that the server runs: it may start later.

        Raises: ConfigError.
        """
        self.locate()

    def open(self, frame: BlockFrame, *, depth: int) -> Store:
        return HttpStore(self.locate, frame, depth=depth)

    async def namespaces(self) -> list[StoredNamespace]:
        """Raises: StoreUnavailable, always on a plain server."""
        transport = HttpTransport(self.locate, TimeoutLimits())

        async def attempt() -> list[StoredNamespace]:
            async with transport.request("GET", protocol.NAMESPACES) as response:
                if response.status != 200:
                    await refuse(response)
                body = await read_whole(response, protocol.MAX_ANSWER_BYTES)
                return protocol.read_namespaces(body)

        try:
            return await transport.call(transport.lookups, protocol.KEY_BYTES, attempt)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"cannot list namespaces: {error}") from error
        finally:
            await transport.close()

    def describe(self) -> Description:
        settings = {
            "base": self.base,
            "token_file": None if self.token_file is None else str(self.token_file),
            "ca": None if self.ca is None else str(self.ca),
        }
        return Description("HttpStore", settings)

    def locate(self) -> Endpoint:
        """The endpoint, with the present content of the files. Raises: ConfigError."""
        ca = b""
        tls = None
        if self.ca is not None:
            try:
                ca = self.ca.read_bytes()
                tls = ssl.create_default_context(cafile=self.ca)
            except OSError as error:  # includes SSLError, for text that is no certificate
                words = error.strerror or "no certificates in it"
                raise ConfigError(f"ca file {self.ca} cannot be read: {words}") from None
        return Endpoint(self.base, self._token(), ca, tls, self.reads_count)

    def _token(self) -> str | None:
        """Raises: ConfigError."""
        if self.token_file is not None:
            return load_tokens(self.token_file)[0]
        if not is_loopback(urlsplit(self.base).hostname or ""):
            return None
        try:
            path = own_token_path()
        except ConfigError:  # no home folder
            return None
        return load_tokens(path)[0] if os.path.exists(path) else None


def parse(url: StoreUrl) -> HttpSource:
    """Raises: ConfigError."""
    source = HttpSource(
        base=_base(url),
        token_file=url.option("token_file", absolute_path, None),
        ca=url.option("ca", absolute_path, None),
        reads_count=url.reads_count,
    )
    if source.ca is not None and url.scheme != "https":
        raise url.error("'ca' needs https")
    return source


def _base(url: StoreUrl) -> str:
    if "@" in url.place:
        raise url.error("write no user or password in it, use ?token_file=/path")
    if "#" in url.place or not url.place.isascii() or not url.place.isprintable():
        raise url.error("not a URL of a server, write for example http://host:8700")
    try:
        parts = urlsplit(f"{url.scheme}://{url.place}")
        host, _ = parts.hostname, parts.port
    except ValueError:  # its message could quote a part of a password
        raise url.error("host or port cannot be read, write for example http://host:8700") from None
    if not host or " " in url.place:
        raise url.error("names no host, write for example http://host:8700")
    return f"{url.scheme}://{url.place}".rstrip("/")
