"""The namespace: all facts that the meaning of stored KV bytes depends on.

The digest of a process's namespace seeds its keys. The digest of the stored namespace, which may
have a group of heads or the name of an encryption key as a further field, stands in every block
header. So a change of any fact but the label (model weights, dtype, shard, block size, ...) makes a
new namespace. There is no other invalidation: stored bytes are never reinterpreted. The caller that
opens a store names the facts.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_cake.core.keys import Digest, sized

LABEL = "name"  # of the model, for people: equal weights with two names share one namespace
DESCRIPTION = "namespace.json"  # in a store: the name of what describes a namespace
MAX_DESCRIPTION_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Named facts; their order is part of the digest."""

    fields: tuple[tuple[str, str], ...]  # (name, value); names are unique

    def __post_init__(self) -> None:
        """Raises: ValueError if a name occurs twice, since `describe` would drop one of them."""
        names = [name for name, _ in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"a namespace names each field once, got {names}")

    def digest(self) -> Digest:
        """32 bytes: SHA-256 over the version, then every name and value with its length, without
        the label."""
        hashed = hashlib.sha256(b"sglang_cake namespace v2")
        for name, value in self.fields:
            if name != LABEL:
                hashed.update(sized(name) + sized(value))
        return Digest(hashed.digest())

    def describe(self) -> dict[str, str]:
        """The fields in order, as in `namespace.json`."""
        return dict(self.fields)


def digest_of(fields: Mapping[str, str]) -> Digest:
    """Digest of the namespace that a description describes."""
    return Namespace(tuple(fields.items())).digest()


def read_fields(raw: bytes) -> dict[str, str] | None:
    """The fields in a description, which is not trusted; None if it is malformed.

    All names and values are text that can be encoded, so without surrogates.
    """
    # The copies of a GPU are checked without this library (`make gpu-check`).
    from msgspec.json import Decoder

    from sglang_cake.core import untrusted

    try:
        return untrusted.decode(Decoder(dict[str, str]), raw)
    except ValueError:
        return None
