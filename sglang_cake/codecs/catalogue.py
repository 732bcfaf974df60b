"""Every step and every named codec; from the text in front of a block to the steps that made it."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from sglang_cake.codecs.blocks import KEYS, Block
from sglang_cake.codecs.entropy import Entropy
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.leading import Leading
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import RAW_CHAIN, Chain, Raw, begin, split
from sglang_cake.codecs.planes import Planes
from sglang_cake.codecs.rope import InverseRope
from sglang_cake.codecs.steps import ArrayStep, BytesStep, Malformed, PackStep, Scratch
from sglang_cake.codecs.zstd import Zstd
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout

MAX_STEPS: Final = 5
_scratch = Scratch()
_ARRAYS: Final[dict[str, type[ArrayStep]]] = {InverseRope.name: InverseRope}
_PACKS: Final[dict[str, type[PackStep]]] = {
    step.name: step for step in (Raw, Planes, Groups, NonUniform, Entropy)
}
_SQUEEZES: Final[dict[str, type[BytesStep]]] = {step.name: step for step in (Zstd,)}

# These take keys before RoPE, where they can.
BEFORE_ROPE: Final = ("kvquant3", "cachegen1", "cachegen2", "cachegen3")
_CHAINS: Final = {
    "raw": RAW_CHAIN,
    "zstd": Chain(Planes(), squeezes=(Zstd(1),)),
    "int8": Chain(Groups(8)),
    "int4": Chain(Groups(4)),
    "kvquant3": Chain(NonUniform(3)),
    "cachegen1": Chain(Entropy(0.06, 2.0)),
    "cachegen2": Chain(Entropy(0.12, 2.0)),
    "cachegen3": Chain(Entropy(0.23, 2.0)),
}


def chain_of(codec: str, layout: BlockLayout, rope_theta: float | None = None) -> Chain:
    """The steps of a named codec.

    Args: rope_theta: of the model's keys, whole heads of which are turned; None: not known, or not.
    Raises: ConfigError if it cannot take blocks of `layout`.
    """
    chain = _CHAINS[codec]
    keys = dict(layout.parts).get(KEYS)
    if codec in BEFORE_ROPE and rope_theta is not None and keys and keys[-1] % 2 == 0:
        chain = replace(chain, arrays=(InverseRope(rope_theta, keys[-1]),))
    try:
        chain.max_bytes(layout)
    except Malformed as error:
        raise ConfigError(f"codec {codec!r} cannot take this KV cache: {error}") from None
    return chain


def decode(layout: BlockLayout, payload: memoryview, out: memoryview) -> Chain:
    """Fill `out`, of `layout.block_bytes`, with the block; returns what the payload was made by.

    Raises: Malformed; `out` is undefined then.
    """
    text, body = split(np.frombuffer(payload, np.uint8))
    chain = parse(text)
    chain.decode(body, Block.over(layout, out))
    return chain


def left_to_device(chain: Chain) -> bool:
    """Whether the adapter can decode it on a device (`adapter.device_decode`)."""
    turned_only = all(isinstance(step, InverseRope) for step in chain.arrays)
    return turned_only and not chain.squeezes and isinstance(chain.pack, Raw | Groups | NonUniform)


def prepare(layout: BlockLayout, payload: memoryview, out: memoryview) -> None:
    """Have `out` begin with a payload that a device can decode.

    Args: payload: the start of `out`, as it was stored. It stays if its chain is `left_to_device`;
        if not, it gives way to the block as it is.
    Raises: Malformed; `out` is undefined then.
    """
    text, body = split(np.frombuffer(payload, np.uint8))
    chain = parse(text)
    if left_to_device(chain):
        if len(body) != chain.max_bytes(layout):
            raise Malformed(f"{len(body)} bytes, {chain.max_bytes(layout)} expected")
        if isinstance(chain.pack, NonUniform):
            lead = chain.leading_bytes(layout)
            # A device that is sent astray takes the server with it.
            chain.pack.check(layout, body[lead:])
        return
    kept = _scratch.bytes("payload", len(body))  # the block takes its place
    np.copyto(kept, body)
    start = begin(RAW_CHAIN.describe(), np.frombuffer(out, np.uint8))
    chain.decode(kept, Block.over(layout, out[start : start + layout.block_bytes]))


@lru_cache(maxsize=256)
def parse(text: bytes) -> Chain:
    """The chain that `Chain.describe` gave the text for. Raises: Malformed for anything else."""
    leading: Leading | None = None
    arrays: list[ArrayStep] = []
    packs: list[PackStep] = []
    squeezes: list[BytesStep] = []
    try:
        steps = json.loads(text)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{len(steps)} steps")
        for name, params in steps:
            if name == Leading.name:
                leading = Leading(**params)
            elif name in _ARRAYS:
                arrays.append(_ARRAYS[name](**params))
            elif name in _PACKS:
                packs.append(_PACKS[name](**params))
            else:
                squeezes.append(_SQUEEZES[name](**params))
        (pack,) = packs
        chain = Chain(pack, tuple(arrays), tuple(squeezes), leading)
        if chain.describe().encode() != text:  # also if the order is another
            raise ValueError("it is not spelled as it should be")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"no chain of steps: {error!r}") from None
    return chain
