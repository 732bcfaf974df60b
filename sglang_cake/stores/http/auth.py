"""Bearer tokens and certificates, from files that may be replaced while they are in use."""

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.secret_file import make_secret_file, own_secret_path, read_secret_file

MIN_TOKEN_CHARS = 16  # fewer could be guessed
MAX_FILE_BYTES = 1 << 16
_SET_ONE = "set --token-file FILE"
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE)"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_token_path() -> Path:
    """The token file of a user's servers and clients on one machine, for those that name none.

    Raises: ConfigError if there is no home folder.
    """
    return own_secret_path("store-token", hint=_SET_ONE)


def make_own_token() -> Path:
    """The user's own token file, which is made if there is none. Raises: ConfigError."""
    path = own_token_path()
    make_secret_file(path, name="token file", hint=_SET_ONE)
    return path


def load_tokens(path: Path) -> list[str]:
    """The tokens in a file, one a line; there is at least one.

    Raises: ConfigError; also if anybody but the owner may read or write the file.
    """
    raw = read_secret_file(path, name="token file", most_bytes=MAX_FILE_BYTES, hint=_MAKE_ONE)
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path} holds more than ASCII text") from None
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or not all("!" <= char <= "~" for char in token):
            raise ConfigError(
                f"token file {path}: write one token a line, of at least {MIN_TOKEN_CHARS} "
                "characters and no spaces, for example from `openssl rand -hex 32`"
            )
    if not tokens:
        raise ConfigError(f"token file {path} holds no token; {_MAKE_ONE}")
    return tokens


class Gate:
    """Who may pass: requests with one of some tokens. Those of `readers` may only read."""

    def __init__(self, tokens: Iterable[str], readers: Iterable[str] = ()) -> None:
        self._writers = [_digest(token) for token in tokens]
        self._all = [*self._writers, *(_digest(token) for token in readers)]

    def lets_pass(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header names a known token."""
        return _names_one(authorization, self._all)

    def may_write(self, authorization: str | None) -> bool:
        """Whether it names one that may write and delete, too."""
        return _names_one(authorization, self._writers)


def _names_one(authorization: str | None, known: list[bytes]) -> bool:
    """Whether an `Authorization` header names one of the tokens with these digests.

    Compared are digests, each in constant time and always all of them, so that neither the bytes of
    a token nor its length nor its place in the file can be measured.
    """
    scheme, _, token = (authorization or "").partition(" ")
    offered = _digest(token.strip())
    matches = [hmac.compare_digest(offered, each) for each in known]
    return scheme.lower() == "bearer" and any(matches)


class Access:
    """What a server holds against strangers: its tokens, and its certificate if it has one."""

    def __init__(
        self,
        token_file: Path,
        read_token_file: Path | None = None,
        tls_files: tuple[Path, Path] | None = None,
    ) -> None:
        """Args:
        read_token_file: with tokens that may only read.
        tls_files: certificate chain and private key, PEM.

        Raises: ConfigError.
        """
        self._token_file, self._read_token_file = token_file, read_token_file
        self._tls_files = tls_files
        self._tokens: list[list[str]] = []
        self._tls_bytes: list[bytes] = []
        self.gate = Gate(())
        self.tls: ssl.SSLContext | None = None  # for new connections
        self.refresh()

    def refresh(self) -> None:
        """Read the files again; may block on a disk.

        Raises: ConfigError. What a bad file held before stays in force.
        """
        readers = [] if self._read_token_file is None else load_tokens(self._read_token_file)
        tokens = [load_tokens(self._token_file), readers]
        if tokens != self._tokens:
            self.gate, self._tokens = Gate(*tokens), tokens
        if self._tls_files is not None:
            self._refresh_tls(*self._tls_files)

    def _refresh_tls(self, cert: Path, key: Path) -> None:
        try:
            found = [cert.read_bytes(), key.read_bytes()]
            if found != self._tls_bytes:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                # With a password, OpenSSL does not ask for one at the terminal.
                context.load_cert_chain(cert, key, password="")
                self.tls, self._tls_bytes = context, found
        except OSError as error:  # SSLError, of what cannot be parsed or does not fit, is one
            words = error.strerror or str(error)
            raise ConfigError(f"--tls-cert and --tls-key cannot be used: {words}") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
