"""Codecs as they are, and as they could be: what else the papers have, at about equal bytes."""

import numpy as np
import numpy.typing as npt

from sglang_cake.codecs.block_arrays import Part
from sglang_cake.codecs.catalogue import chain_of
from sglang_cake.codecs.entropy import Entropy
from sglang_cake.codecs.groups import Groups
from sglang_cake.codecs.nonuniform import NonUniform
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.codecs.rope import InverseRope
from sglang_cake.core.layout import BlockLayout

MIDDLE = (1 / 3, 5 / 6)  # of the layers: those that carry most of the loss of SmolLM2
FINER = 1.2


class FinerMiddle(Entropy):
    """The middle half of the layers has finer steps, and the other half coarser ones. So the mean
    of the bits stays."""

    __slots__ = ()

    def share(self, part: Part) -> npt.NDArray[np.float64]:
        at = (np.arange(part.layers) + 0.5) / part.layers
        middle = (at > MIDDLE[0]) & (at < MIDDLE[1])
        return super().share(part) * np.where(middle, 1 / FINER, FINER)


def variants(layout: BlockLayout, theta: float) -> dict[str, Chain]:
    """By what a table calls them. Those with a codec's bare name are the codec as it is."""

    def codec(name: str) -> Chain:
        return chain_of(name, layout, theta)

    keys = layout.groups[0].parts[0][1]
    before_rope = (InverseRope(theta, keys[-1]),)
    return {
        "int4": codec("int4"),
        "int4, keys before RoPE": Chain(Groups(4), before_rope),
        "int4, 1 % kept": Chain(NonUniform(4)),
        "int4, groups of 64": Chain(Groups(4, 64)),
        "int4, 1 % kept, keys before RoPE": Chain(NonUniform(4), before_rope),
        "int4, groups of 64, keys before RoPE": Chain(Groups(4, 64), before_rope),
        "kvquant3": codec("kvquant3"),
        "kvquant3, keys after RoPE": Chain(NonUniform(3)),
        "cachegen3": codec("cachegen3"),
        "cachegen3, keys after RoPE": Chain(Entropy(0.23, 2.0)),
        "cachegen3, steps of values as of keys": Chain(Entropy(0.325, 1.0), before_rope),
        "cachegen3, steps of values four times those of keys": Chain(
            Entropy(0.163, 4.0), before_rope
        ),
        "cachegen3, middle layers finer": Chain(FinerMiddle(0.23, 2.0), before_rope),
    }
