"""Spans of tokens, the namespace, and block keys: a SHA-256 chain over blocks of tokens, seeded
with the namespace.

Equal keys mean equal KV: a key covers all that its KV depends on
(docs/security.md#what-a-key-is-made-of). If a block has KV of a draft model, that is also the next
token, and with several draft layers the next tokens. The keys of an end state are derived from the
key of the block before it.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType


class Span(NamedTuple):
    """Tokens `start` to `stop - 1` of a prompt."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens the span covers."""
        return self.stop - self.start

    def blocks(self, block_tokens: int) -> range:
        """The blocks that the span touches."""
        return range(self.start // block_tokens, -(-self.stop // block_tokens))


BlockKey = NewType("BlockKey", bytes)  # 32 bytes
Digest = NewType("Digest", bytes)  # 32 bytes


def sized(part: str | None) -> bytes:
    """Length-prefixed UTF-8, so that no two field lists serialise alike; None differs from ''."""
    if part is None:
        return b"\xff" * 8
    raw = part.encode(errors="surrogatepass")  # `sglang.Engine` takes any text
    return len(raw).to_bytes(8, "little") + raw


@dataclass(frozen=True, slots=True)
class KeySeed:
    """The part of a key before the tokens: all facts but the tokens that the KV depends on."""

    namespace: Digest
    extra_key: str | None = None
    cache_salt: str | None = None
    adapter: str | None = None  # digest of the LoRA adapter's weights

    def digest(self) -> bytes:
        """32 bytes that start the chain."""
        head = b"sglang_cake key v1" + self.namespace
        parts = (self.extra_key, self.cache_salt, self.adapter)
        return hashlib.sha256(head + b"".join(sized(part) for part in parts)).digest()


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a video or an audio track of a prompt.

    Attributes:
        digest: 32 bytes; equal digests mean equal inputs of the model.
        spans: `[start, stop)` of the tokens that stand for it, ascending.
    """

    digest: bytes
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Media:
    """The facts beside its tokens that the KV of a prompt with images, videos or audio depends on.

    Attributes:
        items: in the order of their first tokens. Their spans do not overlap.
        positions: rows of the positions that RoPE rotates the first tokens by, of equal length,
            'q'; empty: each token's position is its index.
        shift: the position of a token after these rows is its index plus this, in each row.
    """

    items: tuple[MediaItem, ...] = ()
    positions: "tuple[array[int], ...]" = ()
    shift: int = 0

    def __bool__(self) -> bool:
        """Whether keys depend on it: tokens alone decide the keys of a prompt of text."""
        return bool(self.items or self.positions)

    def without_pads(self, tokens: Sequence[int]) -> "array[int]":
        """A copy of `tokens` with -1 for each token of an item. SGLang puts numbers there that
        other processes do not have."""
        found = array("q", tokens)
        for item in self.items:
            for start, stop in item.spans:
                stop = min(stop, len(found))
                found[start:stop] = array("q", [-1]) * (stop - start)
        return found

    def digest(self, start: int, stop: int) -> bytes:
        """32 bytes that stand for the items that begin in `[start, stop)`, whole, and for the
        positions of these tokens. Empty if no item begins there, and each position is the index.
        """
        items = [item for item in self.items if start <= item.spans[0][0] < stop]
        rows = [self._row(row, start, stop) for row in self.positions]
        if all(row == array("q", range(start, stop)) for row in rows):
            rows = []
        if not items and not rows:
            return b""
        hashed = hashlib.sha256(b"sglang_cake media v1")
        hashed.update(array("q", [len(items), len(rows)]))
        for item in items:
            bounds = [bound for span in item.spans for bound in span]
            hashed.update(item.digest)
            hashed.update(array("q", [len(bounds), *bounds]))
        for row in rows:
            hashed.update(row)
        return hashed.digest()

    def _row(self, row: "array[int]", start: int, stop: int) -> "array[int]":
        further = range(max(start, len(row)), stop)
        return row[start:stop] + array("q", [at + self.shift for at in further])


NO_MEDIA = Media()


def block_keys(
    seed: KeySeed,
    tokens: Sequence[int],
    block_tokens: int,
    known: Sequence[BlockKey] = (),
    media: Media = NO_MEDIA,
    next_tokens: int = 0,
) -> list[BlockKey]:
    """Keys of every full block of `tokens` that has so many tokens after it.

    Args:
        tokens: token ids (each fits a signed 64-bit integer); an `array('q')` is hashed as it is.
        known: keys of the leading blocks, if the caller has them: they are not hashed again.
        media: the media of the prompt that begins with `tokens`.
        next_tokens: tokens after a block that its KV depends on.
    """
    if media:
        tokens = media.without_pads(tokens)
    ready = isinstance(tokens, array) and tokens.typecode == "q"
    raw = memoryview(tokens if ready else array("q", tokens)).cast("B")  # type: ignore[arg-type]
    stride = block_tokens * 8
    keys = list(known)
    previous = bytes(keys[-1]) if keys else seed.digest()
    covered = stride + next_tokens * 8
    for start in range(len(keys) * stride, len(raw) - covered + 1, stride):
        message = previous + raw[start : start + covered]
        if media:
            message += media.digest(start // 8, (start + covered) // 8)
        previous = hashlib.sha256(message).digest()
        keys.append(BlockKey(previous))
    return keys


def end_keys(block: BlockKey, count: int, rank: int = 0, ranks: int = 1) -> list[BlockKey]:
    """Keys of the end state after a block, which is stored as `count` blocks.

    The first one is put when all others are stored. So a store that has it has all of them, unless
    it has lost some since.

    Args:
        block: key of the last block before the end; it covers all that the end state depends on.
        rank, ranks: the state is that of rank `rank` of `ranks`, which share the block.
    """
    head = b"sglang_cake end v1" + block
    tail = b"" if ranks == 1 else rank.to_bytes(8, "little") + ranks.to_bytes(8, "little")
    digests = (hashlib.sha256(head + i.to_bytes(8, "little") + tail) for i in range(count))
    return [BlockKey(digest.digest()) for digest in digests]


class KeyChain:
    """The keys of one request's blocks, hashed when first needed, and once.

    Not thread-safe: the I/O thread owns it, but for `block_count` and attributes.

    Attributes:
        media: the media of the request.
        next_tokens: as for `block_keys`.

    Args:
        end_rank: `(rank, ranks)` as for `end_keys`.
    """

    def __init__(
        self,
        seed: KeySeed,
        block_tokens: int,
        media: Media = NO_MEDIA,
        next_tokens: int = 0,
        end_rank: tuple[int, int] = (0, 1),
    ) -> None:
        self.next_tokens = next_tokens
        self._end_rank = end_rank
        self._seed = seed
        self._block_tokens = block_tokens
        self.media = media
        self._keys: list[BlockKey] = []

    def block_count(self, tokens: int) -> int:
        """How many of the blocks of so many tokens have keys."""
        return max(0, tokens - self.next_tokens) // self._block_tokens

    def of(self, tokens: Sequence[int]) -> list[BlockKey]:
        """Keys of every full block of `tokens`. Args: tokens: those of earlier calls, or more."""
        count = self.block_count(len(tokens))
        if count > len(self._keys):
            self._keys = self._hashed(tokens, self._keys)
        return self._keys[:count]

    def end_keys(self, block: BlockKey, count: int) -> list[BlockKey]:
        """As `end_keys`, of this rank's end state. Any thread."""
        return end_keys(block, count, *self._end_rank)

    def prefix_digest(self, tokens: Sequence[int]) -> bytes:
        """32 bytes for all that the KV of `tokens` depends on, also behind the last block. Any
        thread."""
        keys = self._hashed(tokens, ())
        start = len(keys) * self._block_tokens
        rest = self.media.without_pads(tokens)[start:]
        hashed = hashlib.sha256(b"sglang_cake prompt v1")
        hashed.update(keys[-1] if keys else self._seed.digest())
        hashed.update(array("q", [len(rest)]) + rest)
        hashed.update(self.media.digest(start, len(tokens)))
        return hashed.digest()

    def _hashed(self, tokens: Sequence[int], known: Sequence[BlockKey]) -> list[BlockKey]:
        return block_keys(
            self._seed, tokens, self._block_tokens, known, self.media, self.next_tokens
        )


LABEL = "name"  # of the model, for people: equal weights with two names share one namespace
DESCRIPTION = "namespace.json"  # in a store: the name of what describes a namespace
MAX_DESCRIPTION_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """All facts that the meaning of stored KV bytes depends on; their order is part of the digest.

    A change of any fact but the label (model weights, dtype, shard, block size, ...) makes a new
    namespace. There is no other invalidation: stored bytes are never reinterpreted.
    """

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
