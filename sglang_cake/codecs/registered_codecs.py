"""Codecs of other packages: chains of steps that an installed package registers by name.

A package is imported only if a flag names its codec. The name in a stored block, or in the
description of a namespace, imports nothing (docs/extending.md#a-codec).
"""

import re
from importlib.metadata import entry_points

from sglang_cake.codecs.frame import ENCODED_HEAD_BYTES
from sglang_cake.codecs.pipeline import Chain
from sglang_cake.core.codec_names import OWN_CODECS
from sglang_cake.core.errors import ConfigError, one_line

# With `+aesgcm` after it, a name must fit the 16 bytes that a block's header has for it.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,8}")
MAX_TEXT_BYTES = ENCODED_HEAD_BYTES - 128  # of a chain; the rest is for `leading` and zeros


def registered_chain(codec: str) -> Chain:
    """Import the package that registers `codec`; returns its chain.

    Raises: ConfigError, one line: no package registers it, several do, or its chain cannot be used.
    """
    found = [point for point in entry_points(group=OWN_CODECS) if point.name == codec]
    if not found:
        raise ConfigError(f"no installed package registers a codec {codec!r}")
    if len({point.value for point in found}) > 1:
        values = ", ".join(sorted(point.value for point in found))
        raise ConfigError(f"several installed packages register a codec {codec!r}: {values}")
    point = found[0]
    where = f"codec {codec!r} of {point.value}"
    if not _NAME.fullmatch(codec):
        raise ConfigError(f"{where}: a name has 1 to 9 characters of a-z, 0-9, _ and -")
    try:
        chain = point.load()
    except Exception as error:  # any code: whatever it raises, the codec cannot be used
        raise ConfigError(f"{where} cannot be imported: {one_line(error)}") from None
    if not isinstance(chain, Chain):
        raise ConfigError(f"{where} is a {type(chain).__name__}, not a Chain")
    if len(chain.describe()) > MAX_TEXT_BYTES:
        raise ConfigError(f"{where}: its parameters need more than {MAX_TEXT_BYTES} bytes")
    return chain
