"""Messages between the members of a group: typed, versioned and bounded, in MessagePack.

A job is one chain for one prompt. `chain` has the first worker first, and the owner last. The owner
offers a span to each helper; helpers accept or refuse. Then KV flows down the chain, layer by layer
(`LayerPart`). A worker that cannot go on reports it, and the owner tells the others to stop.

Every field of a received message is checked here, before any other code sees it.
"""

import uuid
from array import array
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from sglang_cake.core import untrusted
from sglang_cake.core.errors import RunaheadError
from sglang_cake.core.layout import MAX_LAYERS
from sglang_cake.runahead.partition import Partition

VERSION = 5
MAX_PART_BYTES = 4 * 2**20  # of KV at once
MAX_MESSAGE_BYTES = 16 * 2**20  # an offer of 4 million tokens
MAX_MEMBERS = 256
PATH_BYTES = 16
KEY_BYTES = 32
MAX_TEXT_CHARACTERS = 512
MAX_SESSION_CHARACTERS = 2**16  # a handle of CUDA memory names each of its segments
_TOKEN_BYTES = 4
_T = TypeVar("_T")

Job = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
Session = Annotated[int, Meta(ge=0, lt=2**62)]
if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # no generic class before Python 3.12


def new_job() -> str:
    """A unique name for a job: 32 hex digits."""
    return uuid.uuid4().hex


class LayerPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names a piece of KV: one layer of tokens `[start, stop)`, all planes."""

    job: Job
    layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    start: Count
    stop: Count

    def __post_init__(self) -> None:
        if self.start >= self.stop:
            raise ValueError(f"no part of a layer: tokens {self.start} to {self.stop}")


class PartHead(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a part's KV."""

    part: LayerPart
    before_bytes: Count  # of KV in the previous part
    before_us: Count  # microseconds of sending it; 0: there was none


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. Raises: ValueError from a subclass whose fields disagree."""


class HelpOffer(_Message, frozen=True, tag=1):
    """Asks the receiver to compute its span of this job, on top of the previous worker's KV.

    `bounds` are those of the partition: span j belongs to worker `chain[j]`. The chain sends KV
    from `bounds[0]` on. Earlier tokens must be in the tree of every worker.
    """

    job: Job
    chain: Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)]  # the owner last
    bounds: Annotated[tuple[Count, ...], Meta(max_length=MAX_MEMBERS + 1)]
    namespace: Text  # of the KV, hex digest
    extra_key: Text | None
    cache_salt: Text | None
    tokens: Tokens  # of the prompt, up to the end of the receiver's span

    def __post_init__(self) -> None:
        workers = self.partition.workers
        if len(self.chain) != workers or len(set(self.chain)) < workers:
            raise ValueError("an offer has one span for each worker of the chain")
        if len(self.tokens) not in self.bounds[1:-1]:
            raise ValueError("the tokens of an offer end where the receiver's span ends")

    @property
    def partition(self) -> Partition:
        """The spans, one a worker of `chain`."""
        return Partition(self.bounds)

    @property
    def owner(self) -> int:
        """Rank of the member that asks."""
        return self.chain[-1]


class Accept(_Message, frozen=True, tag=2):
    """The sender computes its span."""

    job: Job


class Refuse(_Message, frozen=True, tag=3):
    """The sender does not compute."""

    job: Job
    reason: Text


class Cancel(_Message, frozen=True, tag=4):
    """The receiver must stop, and forget the job."""

    job: Job
    reason: Text


class Failed(_Message, frozen=True, tag=5):
    """The sender cannot go on with an accepted job. `culprit`, maybe the sender, is to blame."""

    job: Job
    culprit: Count
    reason: Text


class PartWritten(_Message, frozen=True, tag=6):
    """A part was written into a section of the receiver."""

    part: LayerPart
    section: Count
    size: Count  # bytes
    checksum: Annotated[int, Meta(ge=0)]  # XXH3-64
    took_us: Count  # microseconds of the write


class Credit(_Message, frozen=True, tag=7):
    """A section of the sender was read; it may be written again."""

    section: Count


class ReceiveBuffer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a member takes parts that peers write into its memory."""

    # The engine's address of the member.
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)]
    address: Annotated[int, Meta(ge=0)]


class Hello(_Message, frozen=True, tag=8):
    """The sender's identity, and where it takes and gives KV. Sent again after every change."""

    version: Count
    size: Count  # members of the group
    namespace: Annotated[bytes, Meta(min_length=32, max_length=32)]
    session: Session  # of the sender's connection to the receiver; 0: there is none
    heard: Session  # the receiver's session; 0 while the sender cannot take KV
    kv_port: Annotated[int, Meta(gt=0, lt=65536)]  # where the receiver connects for KV
    kv_password: Annotated[str, Meta(max_length=64)]
    path: Annotated[bytes, Meta(max_length=PATH_BYTES)]  # of KV to the sender; empty: no `heard`
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)]  # that encrypts it
    buffer: ReceiveBuffer | None  # of the sender, for this receiver; None: KV takes a path

    def __post_init__(self) -> None:
        sizes = (len(self.path), len(self.key))
        if sizes != ((PATH_BYTES, KEY_BYTES) if self.heard else (0, 0)):
            raise ValueError("a member that takes KV names a path and a key")


# Between transports; `Member` never gets them.
TransportMessage = PartWritten | Credit | Hello
Message = HelpOffer | Accept | Refuse | Cancel | Failed | TransportMessage


class PeerGone(RunaheadError):
    """The peer cannot be reached now, or does not accept data."""

    reason = "peer"


class BadMessage(RunaheadError):
    """A peer sent bytes that are no message of this version."""

    reason = "protocol"


def can_carry(text: str | None) -> bool:
    """Whether a message can have this text in a field."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:  # half a character, which JSON allows
        return False
    return text is None or len(text) <= MAX_TEXT_CHARACTERS


def encode(message: Message | PartHead) -> bytes:
    return _ENCODER.encode(message)


def decode(body: bytes) -> Message:
    """The message in `body`. Raises: BadMessage."""
    message: Message = _decoded(_MESSAGES, body)
    return message


def decode_head(head: bytes) -> PartHead:
    """The header of a part. Raises: BadMessage."""
    return _decoded(_HEADS, head)


def _decoded(decoder: "msgspec.msgpack.Decoder[_T]", body: bytes) -> _T:
    try:
        return untrusted.decode(decoder, body)
    except ValueError as error:
        raise BadMessage(f"not a message: {error}") from None


def _to_bytes(tokens: Any) -> bytes:
    return bytes(tokens.tobytes())


def _to_tokens(_: type[Any], data: Any) -> Tokens:
    if not isinstance(data, bytes) or len(data) % _TOKEN_BYTES:
        raise ValueError("tokens are words of 32 bits")
    tokens = array("i")
    tokens.frombytes(data)
    if min(tokens, default=0) < 0:
        raise ValueError("a token is a number from 0")
    return tokens


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_MESSAGES = msgspec.msgpack.Decoder(Message, dec_hook=_to_tokens)
_HEADS = msgspec.msgpack.Decoder(PartHead)
