"""What a request tells the store about itself, so that what to keep is decided with it in mind."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol, runtime_checkable

from sglang_cake.core.keys import BlockKey
from sglang_cake.stores.eviction import Benefit

MOST_ID, MOST_WORKLOAD = 128, 64  # characters
_TENANTS: Final = 2**63
_KINDS: Final = {"id": str, "tokens": int, "workload": str, "tenant": int}


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """None of it says what the prompt is. Raises: ValueError for what is out of bounds."""

    id: str  # the same each time that it tells something, and no other request's
    tokens: int  # of its prompt
    workload: str = ""  # what its user says that it is for
    tenant: int = 0  # whose it is, a hash; 0: nobody said
    benefit: Benefit | None = None  # what blocks save where it runs

    def __post_init__(self) -> None:
        if not 0 < len(self.id) <= MOST_ID or len(self.workload) > MOST_WORKLOAD:
            raise ValueError("an id has 1 to 128 characters, a workload at most 64")
        if not 0 <= self.tokens < 2**31 or not 0 <= self.tenant < _TENANTS:
            raise ValueError("tokens or tenant are out of bounds")
        # Half a surrogate pair, as JSON can hold one, is a ValueError here: no index could keep it.
        (self.id + self.workload).encode()

    def to_json(self) -> str:
        """For the wire: ASCII, one line."""
        fields = asdict(self)
        fields["worth"] = fields.pop("benefit")
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "RequestFacts":
        """Raises: ValueError for anything that `to_json` does not make."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != {*_KINDS, "worth"}:
            raise ValueError("not what a request tells")
        if any(type(fields[name]) is not kind for name, kind in _KINDS.items()):
            raise ValueError("a fact is of another type")
        benefit = fields.pop("worth")
        return cls(**fields, benefit=None if benefit is None else _benefit(benefit))


def _benefit(fields: object) -> Benefit:
    names = set(Benefit.__dataclass_fields__)
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ValueError("not what a block is worth")
    if any(type(value) not in (int, float) for value in fields.values()):
        raise ValueError("worth is numbers")
    if type(fields["block_tokens"]) is not int:
        raise ValueError("tokens are of another type")
    return Benefit(**fields)


@runtime_checkable
class AccessListener(Protocol):
    """A store that decides itself what to keep, or that is in front of one."""

    async def touched(self, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
        """A request's prompt, or what it has become, begins with the blocks of `keys`, stored or
        not. Told again with more keys, only the further ones are news.

        Raises: StoreUnavailable; nothing depends on it.
        """
        ...


async def tell(store: object, keys: Sequence[BlockKey], facts: RequestFacts) -> None:
    """Tell a store, if it listens. Raises: StoreUnavailable."""
    if isinstance(store, AccessListener):
        await store.touched(keys, facts)
