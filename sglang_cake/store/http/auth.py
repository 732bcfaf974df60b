"""Bearer tokens, from files that only their owner can read."""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from sglang_cake.errors import ConfigError

MIN_TOKEN_CHARS = 16  # fewer could be guessed
MAX_FILE_BYTES = 1 << 16


def load_tokens(path: Path) -> list[str]:
    """The tokens in a file, one a line; there is at least one.

    Raises: ConfigError; also if anybody but the owner may read or write the file.
    """
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ConfigError(f"token file {path} is open to others: chmod 600 {path}")
            text = file.read(MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from None
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
        raise ConfigError(f"token file {path} holds no token")
    return tokens


class Gate:
    """Who may pass: everybody if there are no tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._known = [_digest(token) for token in tokens]

    def lets_pass(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header names a known token.

        Compared are digests, each in constant time and always all of them, so that neither the
        bytes of a token nor its length nor its place in the file can be measured.
        """
        if not self._known:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        offered = _digest(token.strip())
        matches = [hmac.compare_digest(offered, known) for known in self._known]
        return scheme.lower() == "bearer" and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
