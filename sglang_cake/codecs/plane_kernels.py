"""The loops of `planes`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from sglang_cake.codecs.kernels import compiled


@compiled
def take_apart(words, start, stride, layers, tokens, channels, out):
    """Plane `p` of `out` gets byte `p` of every number, the uppermost first."""
    count, size = len(out), tokens * channels
    top = 8 * count - 1
    for layer in range(layers):
        source = words[start + layer * stride : start + layer * stride + size]
        for plane in range(count):
            shift = 8 * (count - 1 - plane)
            into = out[plane, layer * size : (layer + 1) * size]
            for i in range(size):
                into[i] = ((source[i] << 1 | source[i] >> top) >> shift) & 255


@compiled
def put_together(words, start, stride, layers, tokens, channels, planes):
    """The inverse of `take_apart`."""
    count, size = len(planes), tokens * channels
    top = 8 * count - 1
    for layer in range(layers):
        target = words[start + layer * stride : start + layer * stride + size]
        first, last = layer * size, (layer + 1) * size
        if count == 2:
            high, low = planes[0, first:last], planes[1, first:last]
            for i in range(size):
                w = high[i] << 8 | low[i]
                target[i] = w >> 1 | (w & 1) << 15
        else:
            for i in range(size):
                w = 0
                for plane in range(count):
                    w = w << 8 | planes[plane, first + i]
                target[i] = w >> 1 | (w & 1) << top
