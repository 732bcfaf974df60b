"""How encoded blocks are framed. This needs none of the packages that codecs need."""

from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.codec_names import RAW, codec_in
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace

HEAD_BYTES = 1024  # by which an encoded payload may be longer than the block
FIELD = "codec"  # of the namespace


def encoded_frame(namespace: Namespace, layout: BlockLayout, codec: str) -> BlockFrame:
    """How blocks of a codec are framed: with their bytes, or whatever it makes of them."""
    if codec == RAW:
        return BlockFrame(namespace, layout)
    return BlockFrame(namespace, layout, codec=codec, added_bytes=HEAD_BYTES, varies=True)


def frame_of(namespace: Namespace, layout: BlockLayout) -> BlockFrame:
    """How the blocks of a namespace that was found in a store are framed, by its field `codec`."""
    return encoded_frame(namespace, layout, codec_in(namespace.describe().get(FIELD, RAW)))
