"""Numbers and tables as text for people."""

from collections.abc import Sequence
from datetime import datetime

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(size_bytes: float | None) -> str:
    """`1.5 GB`, in powers of 1000; `-` if it is not known."""
    if size_bytes is None:
        return "-"
    for unit in _UNITS:
        if abs(size_bytes) < 999.5 or unit == _UNITS[-1]:
            digits = 0 if unit == "B" or abs(size_bytes) >= 99.95 else 1
            return f"{size_bytes:.{digits}f} {unit}"
        size_bytes /= 1000
    raise AssertionError


def exact_size_text(size_bytes: int) -> str:
    """`16 MiB` if that is exact, as for most block sizes; otherwise as `size_text`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return size_text(size_bytes)


def count_text(count: float | None) -> str:
    """`1,234`; `-` if it is not known."""
    return "-" if count is None else f"{count:,.0f}"


def time_text(at_s: float | None) -> str:
    """Local time; `-` if it is not known, or no calendar has it. Args: at_s: seconds since 1970."""
    if at_s is None:
        return "-"
    try:
        return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, OverflowError, ValueError):  # any program may set the times of a file
        return "-"


def printable(text: str, at_most: int = 60) -> str:
    """Untrusted text from a store, without control characters and of limited length."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= at_most else clean[: at_most - 3] + "..."


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table with columns as wide as their cells. Args: right: right-aligned columns, from 0."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
