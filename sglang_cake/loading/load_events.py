"""What the loader thread tells the scheduler thread."""

from dataclasses import dataclass

from sglang_cake.loading.staging import StagedBlock


@dataclass(frozen=True, slots=True)
class Found:
    """The lookup's answer for one prompt: which of its full blocks are stored."""

    rid: str
    stored: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Landed:
    """One block's checked bytes are in host memory; the receiver releases `staged` once."""

    rid: str
    block: int
    staged: StagedBlock
    at_s: float  # when it landed, `time.monotonic()`


@dataclass(frozen=True, slots=True)
class Lost:
    """One block cannot be had: compute it."""

    rid: str
    block: int
    reason: str


LoaderEvent = Found | Landed | Lost
