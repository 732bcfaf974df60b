import difflib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_cake.cli.unified_diff import DiffError, apply, parse

# Carriage returns and form feeds: lines end at a newline and nowhere else.
LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "c\r\n", "\f\n", "\n", "- x\n", "@@\n"]), max_size=30
)


def diff_of(old: list[str], new: list[str]) -> bytes:
    return "".join(difflib.unified_diff(old, new, "a/f.py", "b/f.py")).encode()


@given(old=LINES.filter(bool), new=LINES.filter(bool))
def test_diff_random_texts_apply_and_reverse(old: list[str], new: list[str]) -> None:
    assume(old != new)
    [diff] = parse(b"Why.\n\n" + diff_of(old, new))
    before, after = "".join(old).encode(), "".join(new).encode()
    assert apply(before, diff) == after
    assert apply(after, diff.reversed()) == before


def test_diff_hunk_one_line_off_is_refused() -> None:
    [diff] = parse(diff_of(["a\n", "b\n"], ["a\n", "c\n"]))
    with pytest.raises(DiffError, match="line 1"):
        apply(b"new\na\nb\n", diff)


def test_diff_changed_context_line_is_refused() -> None:
    [diff] = parse(diff_of(["a\n", "b\n"], ["a\n", "c\n"]))
    with pytest.raises(DiffError, match="does not fit"):
        apply(b"a \nb\n", diff)


@pytest.mark.parametrize(
    "text",
    [
        b"only a header\n",
        b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/f\n+++ b/f\n",
        b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n+b\n",
        b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\nmore\n",
        b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
        b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
    ],
)
def test_diff_malformed_text_is_refused(text: bytes) -> None:
    with pytest.raises(DiffError):
        parse(text)
