"""Block keys: a SHA-256 chain over blocks of tokens, seeded with the namespace.

Equal keys mean equal KV: a key covers the namespace digest, the request's `extra_key` (LoRA) and
`cache_salt`, and every token from the start of the prompt to the end of the block. The keys of an
end state are derived from the key of the block before it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockKey = NewType("BlockKey", bytes)  # 32 bytes
Digest = NewType("Digest", bytes)  # 32 bytes


def _sized(part: str | None) -> bytes:
    """Length-prefixed UTF-8, so that no two field lists serialise alike; None differs from ''."""
    if part is None:
        return b"\xff" * 8
    raw = part.encode(errors="surrogatepass")  # `sglang.Engine` takes any text
    return len(raw).to_bytes(8, "little") + raw


@dataclass(frozen=True, slots=True)
class KeySeed:
    """What precedes the tokens in a key: all that the KV depends on but the tokens."""

    namespace: Digest
    extra_key: str | None = None
    cache_salt: str | None = None
    adapter: str | None = None  # digest of the LoRA adapter's weights

    def digest(self) -> bytes:
        """32 bytes that start the chain."""
        head = b"sglang_cake key v1" + self.namespace
        parts = (self.extra_key, self.cache_salt, self.adapter)
        return hashlib.sha256(head + b"".join(_sized(part) for part in parts)).digest()


def block_keys(
    seed: KeySeed, tokens: Sequence[int], block_tokens: int, known: Sequence[BlockKey] = ()
) -> list[BlockKey]:
    """Keys of every full block of `tokens`.

    Args:
        tokens: token ids (each fits a signed 64-bit integer); an `array('q')` is hashed as it is.
        known: keys of the leading blocks, if the caller has them: they are not hashed again.
    """
    ready = isinstance(tokens, array) and tokens.typecode == "q"
    raw = memoryview(tokens if ready else array("q", tokens)).cast("B")  # type: ignore[arg-type]
    stride = block_tokens * 8
    keys = list(known)
    previous = bytes(keys[-1]) if keys else seed.digest()
    for start in range(len(keys) * stride, len(raw) - stride + 1, stride):
        previous = hashlib.sha256(previous + raw[start : start + stride]).digest()
        keys.append(BlockKey(previous))
    return keys


def end_keys(block: BlockKey, count: int) -> list[BlockKey]:
    """Keys of the end state behind a block, which is stored as `count` blocks.

    The last one is put first: whoever finds the first one finds all, unless some are lost later.

    Args:
        block: key of the last block before the end; it covers all that the end state depends on.
    """
    head = b"sglang_cake end v1" + block
    digests = (hashlib.sha256(head + number.to_bytes(8, "little")) for number in range(count))
    return [BlockKey(digest.digest()) for digest in digests]


class KeyChain:
    """The keys of one request's blocks, hashed when first needed, and once.

    Not thread-safe: the I/O thread owns it.
    """

    def __init__(self, seed: KeySeed, block_tokens: int) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._keys: list[BlockKey] = []

    def of(self, tokens: Sequence[int]) -> list[BlockKey]:
        """Keys of every full block of `tokens`. Args: tokens: those of earlier calls, or more."""
        if len(tokens) // self._block_tokens > len(self._keys):
            self._keys = block_keys(self._seed, tokens, self._block_tokens, known=self._keys)
        return self._keys[: len(tokens) // self._block_tokens]
