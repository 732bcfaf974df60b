"""The frame of encrypted blocks. `stores/encrypted.py` encrypts; this needs no cryptography.

A sealed payload is the nonce, the ciphertext (as long as the block) and the tag, in this order.
"""

from dataclasses import replace

from sglang_cake.codecs import encoded_payload
from sglang_cake.codecs.frame import BlockFrame
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.layout import BlockLayout
from sglang_cake.core.namespace import Namespace

NONCE_BYTES, TAG_BYTES = 12, 16
SEALED_BYTES = NONCE_BYTES + TAG_BYTES  # by which a sealed block is longer
FIELD = "sealed"  # of the namespace: which key the blocks are sealed with
_CODEC = "+aesgcm"


def sealed_frame(frame: BlockFrame, key_name: str) -> BlockFrame:
    """How the blocks of `frame` are framed once they are sealed with the key of that name.

    Another key is another namespace, and so is none. Raises: ConfigError if they are already.
    """
    return _sealed(replace(frame, namespace=sealed_namespace(frame.namespace, key_name)))


def sealed_namespace(namespace: Namespace, key_name: str) -> Namespace:
    """The namespace of the sealed blocks of `namespace`.

    Raises: ConfigError if those are sealed already.
    """
    if FIELD in namespace.describe():
        raise ConfigError("these blocks are sealed already: name their store without key_file")
    return Namespace((*namespace.fields, (FIELD, key_name)))


def frame_of(namespace: Namespace, layout: BlockLayout) -> BlockFrame:
    """How the blocks of a namespace that was found in a store lie there."""
    frame = encoded_payload.frame_of(namespace, layout)
    return _sealed(frame) if FIELD in namespace.describe() else frame


def _sealed(frame: BlockFrame) -> BlockFrame:
    return replace(frame, codec=frame.codec + _CODEC, added_bytes=frame.added_bytes + SEALED_BYTES)
