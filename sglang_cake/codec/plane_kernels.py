"""The loops of `planes`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from sglang_cake.codec.kernels import compiled


@compiled
def take_apart(words, start, stride, layers, tokens, channels, by_channel, out):
    """Plane `p` of `out` gets byte `p` of every number, the uppermost first."""
    count = len(out)
    top = 8 * count - 1
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            row = words[at : at + channels]
            for plane in range(count):
                shift = 8 * (count - 1 - plane)
                if by_channel:
                    into = out[plane, layer * tokens * channels + token :]
                    for c in range(channels):
                        into[c * tokens] = ((row[c] << 1 | row[c] >> top) >> shift) & 255
                else:
                    to = (layer * tokens + token) * channels
                    line = out[plane, to : to + channels]
                    for c in range(channels):
                        line[c] = ((row[c] << 1 | row[c] >> top) >> shift) & 255


@compiled
def put_together(words, start, stride, layers, tokens, channels, by_channel, planes):
    """The inverse of `take_apart`."""
    count = len(planes)
    top = 8 * count - 1
    for layer in range(layers):
        for token in range(tokens):
            at = start + layer * stride + token * channels
            row = words[at : at + channels]
            step = tokens if by_channel else 1
            first = layer * tokens * channels + (token if by_channel else token * channels)
            if count == 2:
                high, low = planes[0, first:], planes[1, first:]
                if step == 1:
                    for c in range(channels):
                        w = high[c] << 8 | low[c]
                        row[c] = w >> 1 | (w & 1) << 15
                else:
                    for c in range(channels):
                        w = high[c * step] << 8 | low[c * step]
                        row[c] = w >> 1 | (w & 1) << 15
            else:
                for c in range(channels):
                    w = 0
                    for plane in range(count):
                        w = w << 8 | planes[plane, first + c * step]
                    row[c] = w >> 1 | (w & 1) << top
