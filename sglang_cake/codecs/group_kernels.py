"""The loops of `groups`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import numpy as np

from sglang_cake.codecs.kernels import compiled, number, word


@compiled
def extremes(words, start, stride, layers, tokens, channels, group, kind, along, lows, highs):
    """Smallest and largest of every group. All numbers are finite."""
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            row = words[at : at + channels]
            if along:
                low, high = lows[layer, token // group], highs[layer, token // group]
                if token % group == 0:
                    for c in range(channels):
                        low[c] = high[c] = number(row[c], kind)
                for c in range(channels):
                    x = number(row[c], kind)
                    low[c] = x if x < low[c] else low[c]
                    high[c] = x if x > high[c] else high[c]
            else:
                for first in range(0, channels, group):
                    some = row[first : first + group]
                    least = most = number(some[0], kind)
                    for i in range(len(some)):
                        x = number(some[i], kind)
                        least = x if x < least else least
                        most = x if x > most else most
                    lows[layer, token, first // group] = least
                    highs[layer, token, first // group] = most


@compiled
def quantise(
    words, start, stride, layers, tokens, channels, group, kind, along, zeros, inverses, bits, codes
):
    """The nearest code of every number. Two tokens share a byte when `bits` is 4."""
    zero, inverse = np.empty(channels, np.float32), np.empty(channels, np.float32)
    coded = np.empty(channels, np.uint8)
    most = np.float32(2**bits - 1)
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            source = words[at : at + channels]
            if along:
                zero[:] = zeros[layer, token // group]
                inverse[:] = inverses[layer, token // group]
            else:
                for first in range(0, channels, group):
                    zero[first : first + group] = zeros[layer, token, first // group]
                    inverse[first : first + group] = inverses[layer, token, first // group]
            for c in range(channels):
                x = (number(source[c], kind) - zero[c]) * inverse[c] + np.float32(0.5)
                x = min(max(x, np.float32(0)), most)
                coded[c] = np.uint8(np.int32(x))
            row = codes[layer, token if bits == 8 else token // 2]
            if bits == 8 or token % 2 == 0:
                row[:] = coded
            else:
                for c in range(channels):
                    row[c] |= coded[c] << 4


@compiled
def restore8(
    words, start, stride, layers, tokens, channels, group, kind, along, zeros, scales, codes
):
    """Numbers from their codes of 8 bits."""
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            target, row = words[at : at + channels], codes[layer, token]
            if along:
                zero, scale = zeros[layer, token // group], scales[layer, token // group]
                for c in range(channels):
                    target[c] = word(np.float32(row[c]) * scale[c] + zero[c], kind)
            else:
                for first in range(0, channels, group):
                    z, s = zeros[layer, token, first // group], scales[layer, token, first // group]
                    some, into = row[first : first + group], target[first : first + group]
                    for i in range(len(some)):
                        into[i] = word(np.float32(some[i]) * s + z, kind)


@compiled
def restore4(
    words, start, stride, layers, tokens, channels, group, kind, along, zeros, scales, codes
):
    """Numbers from their codes of 4 bits."""
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            target, row, shift = (
                words[at : at + channels],
                codes[layer, token // 2],
                4 * (token % 2),
            )
            if along:
                zero, scale = zeros[layer, token // group], scales[layer, token // group]
                for c in range(channels):
                    code = np.float32((row[c] >> shift) & 15)
                    target[c] = word(code * scale[c] + zero[c], kind)
            else:
                for first in range(0, channels, group):
                    z, s = zeros[layer, token, first // group], scales[layer, token, first // group]
                    some, into = row[first : first + group], target[first : first + group]
                    for i in range(len(some)):
                        into[i] = word(np.float32((some[i] >> shift) & 15) * s + z, kind)
