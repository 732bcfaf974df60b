"""The loops of `entropy`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import numpy as np

from sglang_cake.codecs.distributions import BITS
from sglang_cake.codecs.kernels import compiled, word

# A sum or a shift of uint64 and a plain integer would become another type.
_BITS, _WORD, _LEAST = np.uint64(BITS), np.uint64(32), np.uint64(2**32)


@compiled
def decode(coded, coder, order, classes, lefts, begins, centres, bin_bits, gaps):
    """Numbers `[layers, rows in order, tokens]` from range-coded words, whatever these are;
    or False where no encoder made them.

    What the library's decoder does, which keeps the GIL. Two numbers are followed: how large the
    interval is in which the encoder still was, and how far into it the words point. `far < size`
    holds throughout, and `size >= 2 ** 32` at every number, so that no division is by zero; behind
    the last word come zeros.

    Args:
        coder: `far`, `size` and how many words were read; left as the next call needs it.
        order: the rows of each layer as they were coded.
        lefts, begins, centres, bin_bits: `distributions.Tables`.
    """
    far, size, read = coder[0], coder[1], np.int64(coder[2])
    layers, channels, tokens = gaps.shape
    for layer in range(layers):
        for row in range(channels):
            kind = classes[layer, order[layer, row]]
            table, centre = begins[kind], centres[kind]
            for token in range(tokens):
                scale = size >> _BITS
                quantile = far // scale
                if quantile >> _BITS:
                    return False
                at = np.int64(quantile >> np.uint64(bin_bits))
                low, high = table[at], table[at + 1]
                while low < high:  # seldom: most bins lie in one number's quantiles
                    middle = (low + high + 1) >> 1
                    if lefts[middle] <= quantile:
                        low = middle
                    else:
                        high = middle - 1
                left = np.uint64(lefts[low])
                far -= scale * left
                size = scale * (np.uint64(lefts[low + 1]) - left)
                if size < _LEAST:
                    size, far = size << _WORD, far << _WORD
                    if read < len(coded):
                        far |= np.uint64(coded[read])
                        read += 1
                gaps[layer, row, token] = low - centre
    coder[0], coder[1], coder[2] = far, size, read
    return True


@compiled
def restore(words, start, stride, layers, tokens, channels, kind, steps, means, order, gaps):
    """Numbers from the differences `[layers, channels in order, tokens]`, whatever these are."""
    for layer in range(layers):
        step = steps[layer]
        for row in range(channels):
            c = order[layer, row]
            mean = np.int64(means[layer, c])
            for token in range(tokens):
                at = start + layer * stride + token * channels + c
                words[at] = word(np.float32(mean + gaps[layer, row, token]) * step, kind)
