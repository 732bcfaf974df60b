"""Data that a store, a peer or an older process wrote, checked as it is decoded."""

from typing import TypeVar

import msgspec

_T = TypeVar("_T")
_Decoder = msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T]


def decode(decoder: _Decoder[_T], data: bytes | str) -> _T:
    """The value of the decoder's type. Raises: ValueError, one line."""
    try:
        return decoder.decode(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)[:200]) from None
