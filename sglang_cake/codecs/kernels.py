"""Common parts of all compiled loops: reading and writing of numbers, and compilation.

A kernel works on a whole part of a block in one call, without the GIL. Loops over channels are the
innermost, so that the compiler makes vector instructions of them. Kernels do not check bounds:
their callers check every length, and every index that came from stored bytes.

Rounding is to the nearest, ties to even, as in PyTorch. Products and sums are rounded separately
(never fused), so that every machine computes the same values.
"""

# numba reads types off the arguments, not off annotations
# mypy: disable-error-code="no-untyped-def"

import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

from sglang_cake.codecs.block_arrays import BFLOAT16, FLOAT16

logger = logging.getLogger(__name__)
_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
HALF_MAX = np.float32(65504)


# A loop includes functions of other files here.
_SOURCES = tuple(
    (file.name, file.stat().st_mtime_ns, file.stat().st_size)
    for file in sorted(Path(__file__).parent.glob("*.py"))
)


class _DiskFiles(IndexDataCacheFile):  # type: ignore[misc]  # numba has no types
    """A name of a file is that of one source and one type of arguments. Numba gives the names of
    an older source again, before it replaces their content: another process may load that."""

    def save(self, key: Any, data: Any) -> None:
        name = hashlib.sha256(repr((self._version, self._source_stamp, key)).encode()).hexdigest()
        file = f"{self._index_name}.{name[:32]}.nbc"
        self._save_data(file, data)
        self._save_index({**self._load_index(), key: file})


class _DiskCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Keeps a compiled function on disk. Files that cannot be written, or that a crash of the
    machine left damaged, count as absent."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = (self._impl.locator.get_source_stamp(), _SOURCES)
        self._cache_file = _DiskFiles(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, *args: Any) -> Any:
        return self._tried(super().load_overload, *args)

    def save_overload(self, *args: Any) -> None:
        self._tried(super().save_overload, *args)

    def _tried(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # damaged bytes raise anything
            logger.info("compiled loops in %s are not used: %r", self.cache_path, error)
            with contextlib.suppress(OSError):
                self.flush()  # else the index may name a file of an older source
            return None


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call. The result is kept on disk, if a folder for it can be written."""
    dispatcher = numba.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # no folder can be written
        dispatcher._cache = _DiskCache(function)
    return dispatcher


# Written in LLVM's language: Numba would compute small integers in 64 bits, which wastes most of a
# vector.


@intrinsic
def _from_bfloat(context, word):
    def build(context, builder, signature, args):
        wide = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(wide, _F32)

    return types.float32(types.uint16), build


@intrinsic
def _to_bfloat(context, number):
    def build(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, _I32(16)), _I16)

    return types.uint16(types.float32), build


@intrinsic
def _from_half(context, word):
    def build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], _F16), _F32)

    return types.float32(types.uint16), build


@intrinsic
def _to_half(context, number):
    def build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)

    return types.uint16(types.float32), build


@numba.njit(nogil=True)
def number(word, kind):
    """A word as float32. `kind` must be constant within a loop."""
    if kind == BFLOAT16:
        return _from_bfloat(np.uint16(word))
    if kind == FLOAT16:
        return _from_half(np.uint16(word))
    return np.uint32(word).view(np.float32)


@numba.njit(nogil=True)
def word(number, kind):
    """A finite float32 as a word. Numbers too large for float16 become its largest number."""
    if kind == BFLOAT16:
        return np.uint32(_to_bfloat(number))
    if kind == FLOAT16:
        number = min(max(number, -HALF_MAX), HALF_MAX)
        return np.uint32(_to_half(number))
    return np.float32(number).view(np.uint32)


@compiled
def all_finite(words, kind):
    """Whether no number is infinite or not a number."""
    mask = 0x7F800000
    if kind == BFLOAT16:
        mask = 0x7F80
    elif kind == FLOAT16:
        mask = 0x7C00
    odd = 0
    for i in range(len(words)):
        odd += (words[i] & mask) == mask
    return odd == 0
