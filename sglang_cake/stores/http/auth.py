"""Bearer tokens and certificates, read from files that may be replaced while a server runs."""

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from pathlib import Path

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.secret_file import make_secret_file, own_secret_path, read_secret_file

MIN_TOKEN_CHARS = 16  # shorter tokens could be guessed
MAX_FILE_BYTES = 1 << 16
_SET_ONE = "set --token-file FILE"
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE)"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, to which only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_token_path() -> Path:
    """The default token file of the user's servers and clients on this machine.

    Raises: ConfigError if there is no home folder.
    """
    return own_secret_path("store-token", hint=_SET_ONE)


def make_own_token() -> Path:
    """The default token file, made with a random token if it is absent. Raises: ConfigError."""
    path = own_token_path()
    make_secret_file(path, name="token file", hint=_SET_ONE)
    return path


def load_tokens(path: Path) -> list[str]:
    """The tokens in a file, one a line; at least one.

    Raises: ConfigError; also if other users than the owner may read or write the file.
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


class AcceptedTokens:
    """The tokens that a server accepts: for everything, or for reading only."""

    def __init__(self, tokens: Iterable[str] = (), read_tokens: Iterable[str] = ()) -> None:
        """Args: tokens: allow everything. read_tokens: allow everything but writing."""
        self._writers = [_digest(token) for token in tokens]
        self._readers = [_digest(token) for token in read_tokens]

    def may_read(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header has an accepted token."""
        return _has_one_of([*self._writers, *self._readers], authorization)

    def may_write(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header has a token that allows writing."""
        return _has_one_of(self._writers, authorization)


def _has_one_of(digests: list[bytes], authorization: str | None) -> bool:
    """Whether an `Authorization` header has a token with one of the digests.

    The comparison is of digests, in constant time, and with all of them. So its duration shows
    neither the bytes nor the length of a token, nor its place in the file.
    """
    scheme, _, token = (authorization or "").partition(" ")
    offered = _digest(token.strip())
    matches = [hmac.compare_digest(offered, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(matches)


class ServerCredentials:
    """The tokens and the certificate of a server, as its files say."""

    def __init__(
        self,
        token_file: Path,
        read_token_file: Path | None = None,
        tls_files: tuple[Path, Path] | None = None,
    ) -> None:
        """Args:
        read_token_file: holds tokens that allow everything but writing.
        tls_files: certificate chain and private key, PEM. Without them there is no TLS.

        Raises: ConfigError.
        """
        self._token_file = token_file
        self._read_token_file = read_token_file
        self._tls_files = tls_files
        self._file_certificate: list[bytes] = []
        self._tokens: list[str] = []
        self._read_tokens: list[str] = []
        self.tokens = AcceptedTokens()
        # For listening sockets; None without TLS. New connections use the latest certificate.
        self.tls: ssl.SSLContext | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the files again; may block on a disk.

        Raises: ConfigError with all faults, after all were read. The former content of an unusable
            file stays in force.
        """
        faults: list[ConfigError] = []
        for refresh in (self._refresh_tokens, self._refresh_read_tokens, self._refresh_certificate):
            try:
                refresh()
            except ConfigError as error:
                faults.append(error)
        self.tokens = AcceptedTokens(self._tokens, self._read_tokens)
        if faults:
            raise ConfigError("; ".join(map(str, faults)))

    def _refresh_tokens(self) -> None:
        self._tokens = load_tokens(self._token_file)

    def _refresh_read_tokens(self) -> None:
        if self._read_token_file is not None:
            self._read_tokens = load_tokens(self._read_token_file)

    def _refresh_certificate(self) -> None:
        if self._tls_files is None:
            return
        cert, key = self._tls_files
        try:
            found = [cert.read_bytes(), key.read_bytes()]
            if found == self._file_certificate:
                return
            latest = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            latest.minimum_version = ssl.TLSVersion.TLSv1_2
            # With a password, OpenSSL does not ask for one at the terminal.
            latest.load_cert_chain(cert, key, password="")
        except OSError as error:  # includes SSLError, for files that are malformed or do not match
            words = error.strerror or str(error)
            raise ConfigError(f"--tls-cert and --tls-key cannot be used: {words}") from None
        if self.tls is None:
            self.tls = latest
        self._file_certificate = found

        def use_latest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = latest

        # OpenSSL calls this early in every handshake, whether the client names a host or not.
        self.tls.sni_callback = use_latest


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
