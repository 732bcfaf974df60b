"""What the documents claim to be shown by a test, is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
SHIPPED = "\n".join(p.read_text() for p in (ROOT / "sglang_cake/testing").glob("*_contract.py"))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    for name in re.findall(r"`(test_\w+)`", path.read_text()):
        assert f"def {name}(" in TESTS + SHIPPED, name


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
