"""The loops of `nonuniform`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import numpy as np

from sglang_cake.codecs.kernels import compiled, number, word


@compiled
def gather(words, start, stride, layers, tokens, channels, kind, along, out):
    """Vectors of numbers: `along` the tokens of a channel, or along the channels of a token."""
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            row = words[at : at + channels]
            if along:
                for c in range(channels):
                    out[layer, c, token] = number(row[c], kind)
            else:
                into = out[layer, token]
                for c in range(channels):
                    into[c] = number(row[c], kind)


@compiled
def set_apart(numbers, places, lows, highs):
    """The places of those farthest from their vector's mean; smallest and largest of the others."""
    layers, vectors, count = numbers.shape
    kept = places.shape[2]
    for layer in range(layers):
        for v in range(vectors):
            vector = numbers[layer, v]
            mean = np.float32(0)
            for i in range(count):
                mean += vector[i] / np.float32(count)
            apart = np.zeros(count, np.bool_)
            for turn in range(kept):
                farthest, at = np.float32(-1), 0
                for i in range(count):
                    far = abs(vector[i] - mean)
                    if far > farthest and not apart[i]:
                        farthest, at = far, i
                apart[at] = True
                places[layer, v, turn] = at
            low, high = np.float32(np.inf), np.float32(-np.inf)
            for i in range(count):
                if not apart[i]:
                    low, high = min(low, vector[i]), max(high, vector[i])
            lows[layer, v], highs[layer, v] = low, high


@compiled
def keep(words, start, stride, layers, tokens, channels, along, places, kept):
    """Copy the words at `places`."""
    for layer in range(layers):
        at = start + layer * stride
        for v in range(places.shape[1]):
            for turn in range(places.shape[2]):
                i = np.int64(places[layer, v, turn])
                kept[layer, v, turn] = words[at + (i * channels + v if along else v * channels + i)]


@compiled
def put_back(words, start, stride, layers, tokens, channels, along, places, kept):
    """The inverse of `keep`."""
    for layer in range(layers):
        at = start + layer * stride
        for v in range(places.shape[1]):
            for turn in range(places.shape[2]):
                i = np.int64(places[layer, v, turn])
                words[at + (i * channels + v if along else v * channels + i)] = kept[layer, v, turn]


@compiled
def normalise(numbers, zeros, scales):
    """In place: what is not set apart comes to lie in 0 to 1."""
    layers, vectors, count = numbers.shape
    for layer in range(layers):
        for v in range(vectors):
            vector, zero, scale = numbers[layer, v], zeros[layer, v], scales[layer, v]
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            for i in range(count):
                vector[i] = (vector[i] - zero) * inverse


@compiled
def count(numbers, counts):
    """A histogram of each layer; what lies outside of 0 to 1 was set apart."""
    layers, vectors, length = numbers.shape
    bins = counts.shape[1]
    for layer in range(layers):
        for v in range(vectors):
            for i in range(length):
                x = numbers[layer, v, i]
                if x >= 0 and x <= 1:
                    counts[layer, min(int(x * bins), bins - 1)] += 1


@compiled
def assign(numbers, borders, along, codes):
    """The code of every number: how many borders lie below it."""
    layers, vectors, length = numbers.shape
    bits = codes.shape[1]
    below = np.empty(length, np.uint8)
    for layer in range(layers):
        for v in range(vectors):
            vector = numbers[layer, v]
            below[:] = 0
            for b in range(borders.shape[1]):
                border = borders[layer, b]
                for i in range(length):
                    below[i] += vector[i] > border
            for i in range(length):
                token, c = (i, v) if along else (v, i)
                for bit in range(bits):
                    codes[layer, bit, token // 8, c] |= ((below[i] >> bit) & 1) << (token % 8)


@compiled
def restore(
    words, start, stride, layers, tokens, channels, kind, along, levels, zeros, scales, codes
):
    """Numbers from their codes; those that were set apart come out wrong."""
    bits = codes.shape[1]
    coded = np.empty(channels, np.uint8)
    for layer in range(layers):
        table = levels[layer]
        for token in range(tokens):
            at = start + layer * stride + token * channels
            target, shift = words[at : at + channels], token % 8
            first = codes[layer, 0, token // 8]
            for c in range(channels):
                coded[c] = (first[c] >> shift) & 1
            for bit in range(1, bits):
                row = codes[layer, bit, token // 8]
                for c in range(channels):
                    coded[c] |= ((row[c] >> shift) & 1) << bit
            if along:
                zero, scale = zeros[layer], scales[layer]
                for c in range(channels):
                    target[c] = word(table[coded[c]] * scale[c] + zero[c], kind)
            else:
                z, s = zeros[layer, token], scales[layer, token]
                for c in range(channels):
                    target[c] = word(table[coded[c]] * s + z, kind)
