"""Exact application of unified diffs. Pure: bytes in, bytes out.

There is no fuzz and no offset: a hunk fits only at the line of its header, with every context line
equal. A fresh machine may lack `patch` and `git apply`. Of the libraries on PyPI, patch-ng searches
for the place of a hunk and writes files itself; whatthepatch and unidiff would be dependencies for
less code than this module has.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """A malformed diff, or a hunk that does not fit."""


@dataclass(frozen=True)
class Hunk:
    """Replacement of the lines `old` by the lines `new`. Line numbers count from 1."""

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """Hunks of one file, in the order of its lines."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> "FileDiff":
        """The diff that reverts this one."""
        hunks = (Hunk(each.new_start, each.new, each.old_start, each.old) for each in self.hunks)
        return FileDiff(self.path, tuple(hunks))


def _lines(content: bytes) -> list[bytes]:
    """Lines with their newlines. `splitlines` would also split at a lone carriage return."""
    *whole, rest = content.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def parse(text: bytes) -> list[FileDiff]:
    """Diffs of the files in `text`. Text before the first `--- a/` is ignored.

    Raises: DiffError: the diff is malformed. Created, deleted and renamed files and a last line
        without its newline are not supported.
    """
    lines = _lines(text)
    at = next((i for i, line in enumerate(lines) if line.startswith(b"--- a/")), len(lines))
    files = []
    while at < len(lines):
        path = lines[at][len(b"--- a/") :].rstrip(b"\n")
        partner = [b"+++ b/" + path + b"\n"]
        if not lines[at].startswith(b"--- a/") or lines[at + 1 : at + 2] != partner:
            raise DiffError(f"line {at + 1}: expected '--- a/PATH' and '+++ b/PATH' of one path")
        at += 2
        hunks = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _parse_hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"line {at}: {path.decode()} has no hunk")
        files.append(FileDiff(path.decode(), tuple(hunks)))
    if not files:
        raise DiffError("no file in the diff")
    return files


def _parse_hunk(lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    header = _HUNK.match(lines[at])
    if header is None:
        raise DiffError(f"line {at + 1}: not a hunk header")
    old_start, old_count, new_start, new_count = (
        1 if group is None else int(group) for group in header.groups()
    )
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while len(old) < old_count or len(new) < new_count:
        line = lines[at] if at < len(lines) else b""
        mark = line[:1]
        body = line[1:]
        if mark not in (b" ", b"-", b"+") or not body.endswith(b"\n"):
            raise DiffError(f"line {at + 1}: not a line of a hunk")
        if mark != b"+":
            old.append(body)
        if mark != b"-":
            new.append(body)
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise DiffError(f"line {at}: the hunk is longer than its header says")
    return Hunk(old_start, tuple(old), new_start, tuple(new)), at


def apply(content: bytes, diff: FileDiff) -> bytes:
    """`content` with all hunks of `diff`. Raises: DiffError if one does not fit exactly."""
    lines = _lines(content)
    result: list[bytes] = []
    done = 0
    for hunk in diff.hunks:
        start = hunk.old_start - 1
        if start < done or tuple(lines[start : start + len(hunk.old)]) != hunk.old:
            raise DiffError(f"{diff.path}: the hunk at line {hunk.old_start} does not fit")
        result += lines[done:start]
        if len(result) != hunk.new_start - 1:
            raise DiffError(f"{diff.path}: the hunk at line {hunk.old_start} has a wrong offset")
        result += hunk.new
        done = start + len(hunk.old)
    return b"".join(result + lines[done:])
