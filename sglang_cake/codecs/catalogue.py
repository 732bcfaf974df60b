"""All steps and named codecs, and the parser of the text in front of a block."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from sglang_cake.codecs.block_arrays import KEYS, Block
from sglang_cake.codecs.codec_steps import Malformed, Scratch, check_plain
from sglang_cake.codecs.entropy import Entropy
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import RAW_CHAIN, Chain, Leading, Raw, begin, split
from sglang_cake.codecs.registered_codecs import registered_chain
from sglang_cake.codecs.rope import InverseRope
from sglang_cake.codecs.zstd import BytePlanes, Zstd
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout

MAX_STEPS: Final = 5
_scratch = Scratch()

_CHAINS: Final = {
    "raw": RAW_CHAIN,
    "zstd": Chain(BytePlanes(), compressors=(Zstd(1),)),
    "int8": Chain(Groups(8)),
    "int4": Chain(Groups(4)),
    "kvquant3": Chain(NonUniform(3)),
    "cachegen1": Chain(Entropy(0.06, 2.0)),
    "cachegen2": Chain(Entropy(0.12, 2.0)),
    "cachegen3": Chain(Entropy(0.23, 2.0)),
}
# These codecs take keys before RoPE, if the base of RoPE is known.
BEFORE_ROPE: Final = ("kvquant3", "cachegen1", "cachegen2", "cachegen3")

# By the name of a step: the field of `Chain` that has it, and its class. `chain_of` adds the steps
# of a codec of another package.
_STEPS: Final[dict[str, tuple[str, type[Any]]]] = {
    Leading.name: ("leading", Leading),
    InverseRope.name: ("arrays", InverseRope),
    **{step.name: ("pack", step) for step in (Raw, BytePlanes, Groups, NonUniform, Entropy)},
    Zstd.name: ("compressors", Zstd),
}


def chain_of(codec: str, layout: BlockLayout, rope_theta: float | None = None) -> Chain:
    """The steps of a named codec, built in or of an installed package.

    Args: rope_theta: the base of the model's RoPE, if that rotates whole heads; None: it does not,
        or the base is unknown.
    Raises: ConfigError if there is no such codec, or it cannot take blocks of `layout`.
    """
    chain = _CHAINS.get(codec) or _registered(codec)
    keys = dict(layout.groups[0].parts).get(KEYS)
    if codec in BEFORE_ROPE and rope_theta is not None and keys and keys[-1] % 2 == 0:
        chain = replace(chain, arrays=(InverseRope(rope_theta, keys[-1]),))
    try:
        if codec not in _CHAINS:
            check_plain(layout)
        chain.max_bytes(layout)
    except Malformed as error:
        raise ConfigError(f"codec {codec!r} cannot take this KV cache: {error}") from None
    return chain


def _registered(codec: str) -> Chain:
    """The chain of another package's codec, whose blocks can be decoded from now on.

    Raises: ConfigError.
    """
    chain = registered_chain(codec)
    fields: dict[str, tuple[Any, ...]] = {
        "arrays": chain.arrays,
        "pack": (chain.pack,),
        "compressors": chain.compressors,
    }
    for field, steps in fields.items():
        for step in steps:
            if _STEPS.setdefault(step.name, (field, type(step))) != (field, type(step)):
                raise ConfigError(f"codec {codec!r}: another step is called {step.name!r} already")
    try:
        parse(chain.of_first().describe().encode())  # it has the most steps
    except Malformed as error:
        raise ConfigError(f"codec {codec!r}: {error}") from None
    return chain


@lru_cache(maxsize=256)
def parse(text: bytes) -> Chain:
    """The inverse of `Chain.describe`. Raises: Malformed for any other text."""
    found: dict[str, list[Any]] = {"leading": [], "arrays": [], "pack": [], "compressors": []}
    try:
        steps = json.loads(text)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{len(steps)} steps")
        for name, params in steps:
            field, step = _STEPS[name]
            found[field].append(step(**params))
        (pack,) = found["pack"]
        leading = found["leading"][0] if found["leading"] else None
        chain = Chain(pack, tuple(found["arrays"]), tuple(found["compressors"]), leading)
        if chain.describe().encode() != text:  # also if the order differs, or a step is left over
            raise ValueError("not the canonical text of a chain")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"no chain of steps: {error!r}") from None
    return chain


def decode(layout: BlockLayout, payload: memoryview, out: memoryview) -> Chain:
    """Fill `out`, of `layout.block_bytes`, with the block; returns the payload's chain.

    Raises: Malformed; `out` is undefined then.
    """
    text, body = split(np.frombuffer(payload, np.uint8))
    chain = parse(text)
    chain.decode(body, Block.over(layout, out))
    return chain


def chain_in(payload: memoryview) -> Chain:
    """The chain of a payload. Raises: Malformed."""
    return parse(split(np.frombuffer(payload, np.uint8))[0])


def decodes_on_device(chain: Chain) -> bool:
    """Whether `integration/memory/device_decode.py` decodes it on a device."""
    rope_only = all(isinstance(step, InverseRope) for step in chain.arrays)
    return rope_only and not chain.compressors and isinstance(chain.pack, Raw | Groups | NonUniform)


def prepare(layout: BlockLayout, payload: memoryview, out: memoryview) -> None:
    """Make `out` begin with a payload that a device can decode.

    Args: payload: the start of `out`, as it was stored. It stays if its chain
        `decodes_on_device`. Otherwise it is decoded, and replaced by a payload of the chain `raw`.
    Raises: Malformed; `out` is undefined then.
    """
    text, body = split(np.frombuffer(payload, np.uint8))
    chain = parse(text)
    if decodes_on_device(chain):
        if len(body) != chain.max_bytes(layout):
            raise Malformed(f"{len(body)} bytes, {chain.max_bytes(layout)} expected")
        if isinstance(chain.pack, NonUniform):
            # Here, since an index out of bounds on the device would end the server.
            chain.pack.check(layout, body[chain.leading_bytes(layout) :])
        return
    unpack(layout, payload, out)


def unpack(layout: BlockLayout, payload: memoryview, out: memoryview) -> int:
    """Make `out` begin with a payload of the chain `raw`; returns its size.

    Args: payload: the start of `out`, as it was stored.
    Raises: Malformed; `out` is undefined then.
    """
    text, body = split(np.frombuffer(payload, np.uint8))
    kept = _scratch.bytes("payload", len(body))  # the block will overwrite the payload
    np.copyto(kept, body)
    start = begin(RAW_CHAIN.describe(), np.frombuffer(out, np.uint8))
    stop = start + layout.block_bytes
    parse(text).decode(kept, Block.over(layout, out[start:stop]))
    return stop
