"""Paths, headers and bodies of the HTTP store's protocol (docs/http-store.md).

The paths of blocks are those of a file store's folder, so a plain HTTP server with PUT over such a
folder serves the same blocks. `contains`, `touched` and the list exist on our server only.
"""

import enum
import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, structs
from msgspec.json import Decoder

from sglang_cake.core import untrusted
from sglang_cake.core.errors import StoreUnavailable
from sglang_cake.core.keys import DESCRIPTION, BlockKey, Digest
from sglang_cake.stores.base import (
    EVICTION_COUNTS,
    BlockInfo,
    EvictionCounts,
    StoredNamespace,
    StoreStats,
)

T = TypeVar("T")

KEY_BYTES = 32
MAX_CONTAINS_KEYS = 16384  # in one request
MAX_ANSWER_BYTES = 1 << 24  # of all answers but blocks and lists of blocks
MAX_LIST_LINE_BYTES = 1024
LIST_TYPE = "application/x-ndjson"
BLOCK_TYPE = "application/octet-stream"
FACTS_HEADER = "Cake-Request"  # `RequestFacts` as JSON (stores/base.py)
# A GET with the header `Cake-Use: no` is not counted as a use of the block, for eviction.
USE_HEADER = "Cake-Use"
NO_USE = "no"
STATS = "/stats"
NAMESPACES = "/namespaces"
NAMESPACES_PAGE_BYTES = 1 << 22  # of a page of namespaces, beside its last one
MORE_HEADER = "Cake-More"  # MORE: further namespaces follow those of this page
MORE = "yes"


def block_path(digest: Digest, key: BlockKey) -> str:
    """The path of a block, relative to the store's URL."""
    name = key.hex()
    return f"/{digest.hex()}/{name[:2]}/{name[2:4]}/{name}"


def description_path(digest: Digest) -> str:
    return f"/{digest.hex()}/{DESCRIPTION}"


def contains_path(digest: Digest, framed_bytes: int | None) -> str:
    """The path that lookups of blocks of `framed_bytes` bytes are sent to; None: of any length."""
    return f"/{digest.hex()}/contains?bytes={framed_bytes or 0}"


def touched_path(digest: Digest) -> str:
    """The path that reports of used blocks are sent to."""
    return f"/{digest.hex()}/touched"


def namespaces_path(after: Digest | None) -> str:
    """The path of the page of namespaces behind `after`; None: the first page."""
    return f"{NAMESPACES}?after={after.hex() if after else ''}"


def list_path(digest: Digest) -> str:
    return f"/{digest.hex()}/"


class Kind(enum.StrEnum):
    """What a path names. The values but the last are paths, or what follows a namespace."""

    HEALTH = "health"
    STATS = "stats"
    METRICS = "metrics"
    NAMESPACES = "namespaces"
    LIST = ""
    CONTAINS = "contains"
    TOUCHED = "touched"
    DESCRIPTION = DESCRIPTION
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Resource:
    """A parsed path. Only these bytes become part of a file's name, never the path itself."""

    kind: Kind
    digest: Digest = Digest(b"")  # noqa: RUF009 - immutable
    key: BlockKey = BlockKey(b"")  # noqa: RUF009


# Numbers of an answer, which is not trusted. A caller can add them, and show them as dates.
_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Time = Annotated[float, Meta(ge=0, le=2**35)]  # until the year 3058


class _BlockLine(Struct):
    key: _Hash
    bytes: _Count
    used_s: _Time | None


class _Stats(Struct):
    blocks: _Count | None = None
    block_bytes: _Count | None = None
    used_bytes: _Count | None = None
    capacity_bytes: _Count | None = None
    unused_bytes: _Count | None = None
    policy: Annotated[str, Meta(pattern=r"\A[a-z0-9-]{0,32}\Z")] = ""
    evicted_bytes: _Count = 0
    evicted_blocks: _Count = 0
    evicting_us: _Count = 0
    skipped_blocks: _Count = 0


class _NamespaceEntry(Struct):
    digest: _Hash
    fields: dict[str, str]


_BLOCK_LINE = Decoder(_BlockLine)
_STATS = Decoder(_Stats)
_STORED_NAMESPACES = Decoder(list[_NamespaceEntry])
_FIXED = re.compile(r"/(health|stats|metrics|namespaces)")
_NAMESPACE = re.compile(r"/([0-9a-f]{64})/(|contains|touched|namespace\.json)", re.ASCII)
_BLOCK = re.compile(r"/([0-9a-f]{64})/([0-9a-f]{2})/([0-9a-f]{2})/(\2\3[0-9a-f]{60})", re.ASCII)


def parse_path(path: str) -> Resource | None:
    """Parse `path`, which is percent-encoded and has no query. None for an unknown path."""
    if match := _BLOCK.fullmatch(path):
        digest = Digest(bytes.fromhex(match[1]))
        return Resource(Kind.BLOCK, digest, BlockKey(bytes.fromhex(match[4])))
    if match := _NAMESPACE.fullmatch(path):
        return Resource(Kind(match[2]), Digest(bytes.fromhex(match[1])))
    match = _FIXED.fullmatch(path)
    return Resource(Kind(match[1])) if match else None


def split_keys(body: bytes) -> list[BlockKey] | None:
    """The keys in a body; None if it does not hold whole keys, or holds too many."""
    if len(body) % KEY_BYTES or len(body) > MAX_CONTAINS_KEYS * KEY_BYTES:
        return None
    starts = range(0, len(body), KEY_BYTES)
    return [BlockKey(body[start : start + KEY_BYTES]) for start in starts]


def read_answers(body: bytes, count: int) -> list[bool]:
    """The answer of `contains`: for each key one byte, 0 or 1. Raises: StoreUnavailable."""
    if len(body) != count or body.strip(b"\0\1"):
        raise StoreUnavailable("the answer of contains is malformed")
    return [byte == 1 for byte in body]


def write_block_line(block: BlockInfo) -> bytes:
    """One line of the list."""
    line = {"key": block.key.hex(), "bytes": block.stored_bytes, "used_s": block.used_s}
    return json.dumps(line).encode() + b"\n"


def read_block_line(line: bytes) -> BlockInfo:
    """Raises: StoreUnavailable."""
    found = _read(_BLOCK_LINE, line, "the list has a malformed line")
    return BlockInfo(BlockKey(bytes.fromhex(found.key)), found.bytes, found.used_s)


def write_stats(stats: StoreStats) -> dict[str, object]:
    return {
        "blocks": stats.blocks,
        "block_bytes": stats.block_bytes,
        "used_bytes": stats.used_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "unused_bytes": stats.unused_bytes,
        **asdict(stats.evictions),
        "policy": stats.policy,
    }


def read_stats(body: bytes) -> StoreStats:
    """Raises: StoreUnavailable."""
    found = structs.asdict(_read(_STATS, body, "the answer of stats is malformed"))
    evictions = EvictionCounts(*(found.pop(name) for name in EVICTION_COUNTS))
    return StoreStats(**found, evictions=evictions)


def write_namespaces(namespaces: list[StoredNamespace]) -> list[dict[str, object]]:
    return [{"digest": space.digest.hex(), "fields": space.fields} for space in namespaces]


def page_of(namespaces: list[StoredNamespace], after: str) -> tuple[list[StoredNamespace], bool]:
    """The namespaces behind `after` (hex), by digest, as many as one page takes; and whether more
    follow."""
    page: list[StoredNamespace] = []
    size_bytes = 0
    for space in sorted(namespaces, key=lambda each: each.digest):
        if space.digest.hex() <= after:
            continue
        if size_bytes >= NAMESPACES_PAGE_BYTES:
            return page, True
        page.append(space)
        size_bytes += len(json.dumps(space.fields))
    return page, False


def read_namespaces(body: bytes) -> list[StoredNamespace]:
    """Raises: StoreUnavailable."""
    return [
        StoredNamespace(Digest(bytes.fromhex(one.digest)), one.fields)
        for one in _read(_STORED_NAMESPACES, body, "the answer of namespaces is malformed")
    ]


def _read(decoder: Decoder[T], body: bytes, what: str) -> T:
    try:
        return untrusted.decode(decoder, body)
    except ValueError as error:
        raise StoreUnavailable(f"{what}: {error}") from None
