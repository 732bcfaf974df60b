"""The loop of `entropy`. See `kernels` for its rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import numpy as np

from sglang_cake.codec.kernels import compiled, word


@compiled
def restore(
    words, start, stride, layers, tokens, channels, kind, group, steps, bases, classes, gaps
):
    """Numbers from the differences `[layers, channels, tokens]`, whatever these are."""
    for layer in range(layers):
        step = steps[layer]
        for c in range(channels):
            leader = np.int64(bases[layer, c])
            from_mean = classes[layer, c] >= 128
            for token in range(tokens):
                x = leader + gaps[layer, c, token]
                if token % group == 0 and not from_mean:
                    leader = x
                at = start + layer * stride + token * channels + c
                words[at] = word(np.float32(x) * step, kind)
