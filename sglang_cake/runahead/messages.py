"""What the members of a group tell each other: typed, versioned, bounded, and checked.

A job is one chain for one prompt. Its owner offers a span to each helper, first worker first in
`chain`, itself last; helpers accept or refuse; from then on KV flows down the chain, layer by layer
(`LayerPart`). Whoever cannot go on says so, and the owner tells the others to stop.

A message is JSON and a tail of raw bytes (the tokens of an offer). What comes from a peer is judged
here, field by field, before anybody acts on it.
"""

import json
import re
import struct
import uuid
from array import array
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from sglang_cake.errors import RunaheadError
from sglang_cake.runahead.partition import Partition

MAX_MESSAGE_BYTES = 16 * 2**20  # an offer of 4 million tokens
MAX_MEMBERS = 256
_MAX_TEXT = 512
_TOKEN_BYTES = 4
_LENGTH = struct.Struct("<I")
_JOB = re.compile(r"[0-9a-f]{32}")
_PART = struct.Struct("<16sIII")
PART_HEAD_BYTES = _PART.size
MAX_LAYERS = 4096


def new_job() -> str:
    """A name for a job: 32 hex digits that nobody else has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Offer:
    """Compute your span of this job, on top of what comes from the worker before you.

    `bounds` are those of the partition: span j is worker `chain[j]`'s. The KV that the chain hands
    on begins at `bounds[0]`; what is before, everybody must have in its tree.
    """

    kind: ClassVar[int] = 1
    job: str
    chain: tuple[int, ...]  # ranks, the owner last
    bounds: tuple[int, ...]
    namespace: str  # hex digest: whose KV this is
    extra_key: str | None
    cache_salt: str | None
    tokens: "array[int]"  # of the prompt, up to the end of the receiver's span

    @property
    def partition(self) -> Partition:
        """The spans, one a worker of `chain`."""
        return Partition(self.bounds)


@dataclass(frozen=True, slots=True)
class Accept:
    """I am computing; `matched` tokens of the prompt were in my tree."""

    kind: ClassVar[int] = 2
    job: str
    matched: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """I am not computing."""

    kind: ClassVar[int] = 3
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop, and forget the job."""

    kind: ClassVar[int] = 4
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """I cannot go on with what I accepted; the member `culprit` is to blame, maybe I myself."""

    kind: ClassVar[int] = 5
    job: str
    culprit: int
    reason: str


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Which KV a piece of data is: one layer of tokens `[start, stop)`, every plane of it."""

    job: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Ring:
    """Of transports that write into a peer's memory: where you may write parts for me."""

    kind: ClassVar[int] = 6
    session: str  # how the engine finds me
    address: int
    slots: int  # of MAX_PART_BYTES each


@dataclass(frozen=True, slots=True)
class Landed:
    """A part of a layer is in one of your slots."""

    kind: ClassVar[int] = 7
    job: str
    layer: int
    start: int
    stop: int
    slot: int
    size: int  # bytes
    checksum: int  # XXH3-64
    took_us: int  # microseconds that writing it took

    @property
    def part(self) -> LayerPart:
        """Which part."""
        return LayerPart(self.job, self.layer, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Credit:
    """What was in one of my slots is used; write the next part there."""

    kind: ClassVar[int] = 8
    slot: int


Ours = Ring | Landed | Credit  # between transports; members never see them
Message = Offer | Accept | Refuse | Cancel | Failed | Ours
_KINDS: dict[int, type[Any]] = {
    each.kind: each for each in (Offer, Accept, Refuse, Cancel, Failed, Ring, Landed, Credit)
}


class BadMessage(RunaheadError):
    """A peer sent something that is no message of this version."""

    reason = "protocol"


def encode(message: Message) -> bytes:
    """The bytes of a message, without its frame."""
    head = asdict(message)
    tail = b""
    if isinstance(message, Offer):
        del head["tokens"]
        tail = array("i", message.tokens).tobytes()
    text = json.dumps(head, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text + tail


def decode(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """The message of this kind in `body`. Raises: BadMessage."""
    try:
        if kind not in _KINDS:
            raise ValueError(f"kind {kind}")
        (size,) = _LENGTH.unpack_from(body)
        head = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + size]))
        tail = bytes(body[_LENGTH.size + size :])
        made: Message = _make(_KINDS[kind], head, tail)
    except BadMessage:
        raise
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise BadMessage(f"not a message: {str(error)[:200]}") from None
    return made


def encode_part(part: LayerPart) -> bytes:
    """What stands before the KV of a part."""
    return _PART.pack(bytes.fromhex(part.job), part.layer, part.start, part.stop)


def decode_part(head: bytes | memoryview) -> LayerPart:
    """The part that `head`, PART_HEAD_BYTES long, describes. Raises: BadMessage."""
    job, layer, start, stop = _PART.unpack(head)
    return _checked(LayerPart(job.hex(), layer, start, stop))


def _checked(part: LayerPart) -> LayerPart:
    if part.layer >= MAX_LAYERS or not part.start < part.stop < 2**31:
        raise BadMessage(f"no part of a layer: {part.layer}, {part.start} to {part.stop}")
    return part


def _make(kind: type[Any], head: dict[str, Any], tail: bytes) -> Any:
    names = {field.name for field in fields(kind)} - {"tokens"}
    if not isinstance(head, dict) or set(head) != names:
        raise ValueError(f"fields of {kind.__name__}: {sorted(names)}")
    checked: dict[str, Any] = {name: _CHECKS[name](head[name]) for name in names}
    if kind is not Offer:
        if tail:
            raise ValueError("bytes behind a message")
        made = kind(**checked)
        if isinstance(made, Landed):
            _checked(made.part)
        return made
    if len(tail) % _TOKEN_BYTES:
        raise ValueError("half a token")
    tokens = array("i")
    tokens.frombytes(tail)
    offer = Offer(tokens=tokens, **checked)
    if len(offer.chain) != offer.partition.workers or len(set(offer.chain)) < len(offer.chain):
        raise ValueError("one span for each worker of the chain")
    if len(tokens) not in offer.bounds[1:-1] or min(tokens, default=0) < 0:
        raise ValueError("the tokens end where the receiver's span ends")
    return offer


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError("a text of at most 512 characters")
    return value


def _job(value: object) -> str:
    if not isinstance(value, str) or not _JOB.fullmatch(value):
        raise ValueError("the name of a job: 32 hex digits")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _word(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError("a number of 64 bits")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_MEMBERS + 1:
        raise ValueError("a list of numbers")
    return tuple(_count(each) for each in value)


_CHECKS: dict[str, Any] = {
    "job": _job,
    "reason": _text,
    "namespace": _text,
    "extra_key": _text_or_none,
    "cache_salt": _text_or_none,
    "matched": _count,
    "culprit": _count,
    "layer": _count,
    "start": _count,
    "stop": _count,
    "session": _text,
    "address": _word,
    "slots": _count,
    "slot": _count,
    "size": _count,
    "checksum": _word,
    "took_us": _count,
    "chain": _counts,
    "bounds": _counts,
}
