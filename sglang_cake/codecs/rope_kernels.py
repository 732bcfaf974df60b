"""The loops of `rope`. See `kernels` for their rules."""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

from sglang_cake.codecs.kernels import compiled, number, word


@compiled
def turn(words, start, stride, layers, tokens, channels, kind, out, head, cosines, sines):
    """Turn every pair of channels by its token's angle."""
    half = head // 2
    for layer in range(layers):
        for token in range(tokens):
            cos, sin = cosines[token], sines[token]
            for first in range(0, channels, head):
                at = start + layer * stride + token * channels + first
                left, right = words[at : at + half], words[at + half : at + head]
                into, beside = out[at : at + half], out[at + half : at + head]
                for i in range(half):
                    a, b = number(left[i], kind), number(right[i], kind)
                    into[i] = word(a * cos[i] - b * sin[i], kind)
                    beside[i] = word(b * cos[i] + a * sin[i], kind)


@compiled
def copy(words, start, stride, layers, tokens, channels, out):
    """The same numbers."""
    for layer in range(layers):
        at = start + layer * stride
        out[at : at + tokens * channels] = words[at : at + tokens * channels]
