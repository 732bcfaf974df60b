"""The file with the master key, and what is derived from it."""

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sglang_cake.core.keys import Digest
from sglang_cake.core.secret_file import read_key

KEY_BYTES = 32
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True, slots=True)
class MasterKey:
    """Seals nothing itself: every namespace has a key of its own, so that no two of them can ever
    meet in a nonce."""

    secret: bytes = field(repr=False)  # KEY_BYTES

    @property
    def name(self) -> str:
        """16 hex digits that tell one master key from others and say nothing about it."""
        return self._derived(b"name", 8).hex()

    def block_key(self, namespace: Digest) -> bytes:
        """The key of one namespace, KEY_BYTES long."""
        return self._derived(b"blocks" + namespace, KEY_BYTES)

    def _derived(self, purpose: bytes, length: int) -> bytes:
        info = b"sglang_cake seal v1 " + purpose
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self.secret)


def read_key_file(path: Path) -> MasterKey:
    """Read 64 hex digits from a file that nobody but its owner may read or write.

    Raises: ConfigError, one line that says what to do and nothing of the file's content.
    """
    return MasterKey(read_key(path, name="key file", hint=_MAKE_ONE))
