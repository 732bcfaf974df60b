"""Facts about a request that stores use for eviction, with their JSON form."""

import json
from dataclasses import asdict, dataclass
from typing import Final

from sglang_cake.stores.eviction.benefit import Benefit

MOST_ID: Final = 128  # characters
MOST_WORKLOAD: Final = 64  # characters
_TENANTS: Final = 2**63
_KINDS: Final = {"id": str, "tokens": int, "workload": str, "tenant": int}


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about a request, without its prompt. Raises: ValueError for values out of bounds."""

    id: str  # unique; the same in all reports of the request
    tokens: int  # length of the prompt
    workload: str = ""  # purpose that the user declared
    tenant: int = 0  # hash of the tenant; 0: the request names none
    benefit: Benefit | None = None  # costs of the server that runs the request

    def __post_init__(self) -> None:
        if not 0 < len(self.id) <= MOST_ID or len(self.workload) > MOST_WORKLOAD:
            raise ValueError("an id has 1 to 128 characters, a workload at most 64")
        if not 0 <= self.tokens < 2**31 or not 0 <= self.tenant < _TENANTS:
            raise ValueError("tokens or tenant are out of bounds")
        # JSON may hold half a surrogate pair, which the index cannot: encoding it is a ValueError.
        (self.id + self.workload).encode()

    def to_json(self) -> str:
        """One line of ASCII."""
        fields = asdict(self)
        # Servers and clients of other versions call the benefit `worth`: a name of the protocol.
        fields["worth"] = fields.pop("benefit")
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "RequestFacts":
        """Raises: ValueError for text that `to_json` cannot have made."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != {*_KINDS, "worth"}:
            raise ValueError("unknown or missing fields")
        if any(type(fields[name]) is not kind for name, kind in _KINDS.items()):
            raise ValueError("a field has another type")
        benefit = fields.pop("worth")
        return cls(**fields, benefit=None if benefit is None else _benefit(benefit))


def _benefit(fields: object) -> Benefit:
    names = set(Benefit.__dataclass_fields__)
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ValueError("unknown or missing fields of worth")
    if any(type(value) not in (int, float) for value in fields.values()):
        raise ValueError("worth has other values than numbers")
    if type(fields["block_tokens"]) is not int:
        raise ValueError("block_tokens has another type")
    return Benefit(**fields)
