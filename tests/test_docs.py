"""What the documents claim to be shown by a test, is; and their links lead somewhere."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
LINKED = [*DOCS, *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
LINKED += [ROOT / folder / "README.md" for folder in ("benchmarks", "patches")]
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
SHIPPED = "\n".join(p.read_text() for p in (ROOT / "sglang_cake/testing").glob("*_contract.py"))


@cache
def prose(path: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#* *$", prose(path), flags=re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        plain = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        numbers = (f"{plain}-{number}" for number in range(1, 1000))
        found.add(plain if plain not in found else next(n for n in numbers if n not in found))
    return found


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    for name in re.findall(r"`(test_\w+)`", path.read_text()):
        assert f"def {name}(" in TESTS + SHIPPED, name


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        assert there.exists(), link
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.resolve()), link


def test_anchors_are_made_as_github_makes_them(tmp_path: Path) -> None:
    path = tmp_path / "some.md"
    path.write_text(
        "# `auto`, and *more*: what?\n## Own store\n```sh\n# no heading\n```\n## Own store\n"
        "### 10_000 of [them](x.md#y)  ##\n"
    )
    made = {"auto-and-more-what", "own-store", "own-store-1", "10_000-of-them"}
    assert anchors(path) == made
