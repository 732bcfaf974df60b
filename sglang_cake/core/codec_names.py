"""The codecs by the names that a user types, and what each promises. Imports nothing heavy."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Final

from sglang_cake.core.errors import ConfigError

RAW: Final = "raw"
AUTO: Final = "auto"
LOSSLESS: Final = (RAW, "zstd")
LOSSY: Final = ("int8", "int4", "kvquant3", "cachegen1", "cachegen2", "cachegen3")
CODECS: Final = (*LOSSLESS, *LOSSY)
"""The built-in codecs. A name has at most nine characters: with `+aesgcm` after it, it must fit
the 16 bytes that a block's header has for it."""
CHOICES: Final = (*CODECS, AUTO)
"""The values of `--cake-codec`, beside the names of `own_names`."""
ON_DEVICE: Final = ("int8", "int4", "kvquant3")
"""Codecs that a GPU decodes itself: those whose chain `catalogue.decodes_on_device`, which this
module may not import. A test compares."""
OWN_CODECS: Final = "sglang_cake.codecs"
"""The entry-point group in which other packages register codecs (`codecs/registered_codecs.py`)."""

SAMPLE_ERROR: Final = "sample_error"
BLOCK_ERROR: Final = "block_error"
SLOW: Final = "slow"
NO_GAIN: Final = "no_gain"
UNKNOWN_LINK: Final = "unknown_link"
REFUSALS: Final = (SAMPLE_ERROR, BLOCK_ERROR, SLOW, NO_GAIN, UNKNOWN_LINK)
"""Why `auto` does not store a block with a codec: it lost too much of the sample, or of this very
block; it decodes more slowly than the link; another codec is as good; the link's speed is unknown.
"""


def own_names() -> tuple[str, ...]:
    """The names of other packages' codecs. They are read from metadata: nothing is imported."""
    names = {point.name for point in entry_points(group=OWN_CODECS)}
    return tuple(sorted(names.difference(CHOICES)))


def namespace_value(codec: str, max_error: float) -> str:
    """The field `codec` of a namespace: blocks that differ in it never mix.

    Args: max_error: the bound of `auto`; other codecs have none.
    """
    return f"{AUTO}<={max_error!r}" if codec == AUTO else codec


def codec_in(value: str) -> str:
    """The codec of a namespace, from its field `codec`."""
    return value.partition("<=")[0]


def may_decode_on_device(codec: str, max_error: float) -> bool:
    """Whether a GPU may decode blocks of the codec itself."""
    return codec in ON_DEVICE or (codec == AUTO and max_error > 0)


def check_installed(codec: str) -> None:
    """Raises: ConfigError if a package that the codec needs is missing."""
    needed = () if codec == RAW else ("constriction", "numba")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"codec {codec!r} needs {', '.join(missing)}: pip install 'sglang-cake[codecs]'"
        )
