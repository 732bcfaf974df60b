"""What the documents claim to be shown by a test, is; and their links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from sglang_cake.config import NAMES

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
REPORTS = sorted(ROOT.glob("benchmarks/reports/*.md"))
LINKED = [*DOCS, *REPORTS, *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
LINKED += [ROOT / folder / "README.md" for folder in ("benchmarks", "benchmarks/gpu", "patches")]
LINKED += sorted(ROOT.glob("examples/**/README.md"))
LINKED += [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]
PAGES = [path for path in LINKED if path.name != "CHANGELOG.md"]  # which names what has gone
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
SHIPPED = "\n".join(p.read_text() for p in (ROOT / "sglang_cake/testing").glob("*_contract.py"))
# Files and folders of stores, models and SGLang, and the folder of any version of a patch.
ELSEWHERE = {"config.json", "namespace.json", "index.lock", "corrupt/", "costs/", "np/", "sglang/"}
ELSEWHERE |= {"sglang-X.Y.Z/"}


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


@pytest.mark.parametrize("path", [*DOCS, *REPORTS], ids=lambda path: path.name)
def test_docs_named_tests_exist(path: Path) -> None:
    for name in re.findall(r"`(test_\w+)`", path.read_text()):
        assert f"def {name}(" in TESTS + SHIPPED, name


@cache
def tracked() -> tuple[Path, ...]:
    """All files of the repository, relative to it."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return tuple(Path(name) for name in names.split("\n") if name and (ROOT / name).is_file())


def words_of(paths: Iterable[Path]) -> frozenset[str]:
    texts = (path.read_text(errors="replace") for path in paths)
    return frozenset(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))


@cache
def words() -> frozenset[str]:
    """Every word of the source texts but this one, the names of modules, and those of metrics."""
    kinds = {".py", ".sh", ".diff", ".patch", ".lock", ".txt", ""}
    kinds |= {".json", ".toml", ".yaml", ".yml"}
    paths = (ROOT / path for path in tracked() if path.suffix in kinds)
    sources = words_of(path for path in paths if path != Path(__file__))
    metrics = re.findall(r"`sglang:cake_(\w+)`", (ROOT / "docs/monitoring.md").read_text())
    return sources | {path.stem for path in tracked()} | {*metrics}


@cache
def sglang_words() -> frozenset[str]:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    (folder,) = found.submodule_search_locations or ()
    return words_of(Path(folder).rglob("*.py"))


def is_word(name: str) -> bool:
    plain = name.removeprefix("cake_")
    ours = {name, plain, plain.removesuffix("_total")}
    return not ours.isdisjoint(words()) or name in sglang_words()


@cache
def files_by_ending() -> dict[tuple[str, ...], set[Path]]:
    """The files of the repository, by each end of their paths. Those of folders have none."""
    found: dict[tuple[str, ...], set[Path]] = {}
    for path in tracked():
        for part in (path, *path.parents):
            for first in range(len(part.parts)):
                files = found.setdefault(part.parts[first:], set())
                if part is path:
                    files.add(path)
    return found


def files_of(name: str) -> set[Path] | None:
    """The files whose paths end with `name`; None: neither those of files nor of folders do."""
    return files_by_ending().get(Path(name).parts)


def is_path(name: str) -> bool:
    """Of a file or folder that the repository has or had."""
    if not re.fullmatch(r"[\w.-][\w./-]*", name) or name in ELSEWHERE:
        return False
    first = Path(name).parts[0]
    folders = {part for path in tracked() for part in path.parts[:-1]}
    suffixes = {path.suffix for path in tracked() if path.suffix}
    of_ours = "/" in name and first in folders
    return of_ours or name.endswith("/") or Path(name).suffix in suffixes


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_back_ticked_paths_exist(path: Path) -> None:
    for text in re.findall(r"`([^`\n]+)`", prose(path)):
        name, _, rest = text.partition(": ")
        if is_path(name):
            files = files_of(name)
            assert files is not None, text
            assert words_of(ROOT / file for file in files).issuperset(
                re.findall(r"[A-Za-z_]\w*", rest)
            ), text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_paths_in_blocks_of_code_exist(path: Path) -> None:
    blocks = re.findall(r"^ *```.*?^ *```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    ours = r"(?<![\w./~$-])(?:sglang_cake|tests|benchmarks|docs|patches|examples)/[\w./-]*\w"
    for name in re.findall(ours, "\n".join(blocks)):
        assert files_of(name) is not None, name


def wrong_references(text: str) -> list[str]:
    """References of a source text to pages or sections that do not exist."""
    wrong = []
    for page, anchor in re.findall(r"\b((?:docs|benchmarks)/[\w/-]+\.md)(?:#([\w-]+))?", text):
        path = ROOT / page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            wrong.append(f"{page}#{anchor}")
    # A section is named by its anchor, which can be checked.
    return wrong + re.findall(r"\bdocs/[\w/-]+\.md, (?:\"[^\"]+\"|[A-Z]\b(?:\.\d+)?(?!\())", text)


def test_docs_references_in_sources_exist() -> None:
    own = Path(__file__).relative_to(ROOT)
    sources = [path for path in tracked() if path.suffix in {".py", ".toml"} and path != own]
    assert len(sources) > 300
    wrong = {path: wrong_references((ROOT / path).read_text()) for path in sources}
    assert not {path: each for path, each in wrong.items() if each}


@pytest.mark.parametrize(
    "text",
    ["docs/theorie.md", "docs/theory.md#no-section", "docs/theory.md, B)", 'docs/theory.md, "B"'],
)
def test_docs_wrong_reference_in_a_source_is_found(text: str) -> None:
    assert wrong_references(f"It meets there (see {text}.")
    assert not wrong_references("See docs/theory.md#the-meeting-point, and docs/theory.md, `C(x)`.")


@cache
def words_by_owner() -> dict[str, set[str]]:
    """The words of the files that define a class or module of the package, by its name."""
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("sglang_cake/**/*.py"):
        text = path.read_text()
        for owner in {path.stem, *re.findall(r"^class (\w+)", text, flags=re.MULTILINE)}:
            found.setdefault(owner, set()).update(words_of([path]))
    return found


def is_name(name: str) -> bool:
    """Of a known thing; `Class.member` and `module.member` of the package have that member."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in words_by_owner() and parts[1] not in sglang_words():
        return parts[1] in words_by_owner()[parts[0]]
    return all(is_word(part) for part in parts)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_back_ticked_names_exist(path: Path) -> None:
    for text in re.findall(r"`([^`\n]+)`", prose(path)):
        name = text.removesuffix("()")
        if re.fullmatch(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*", name) and not is_path(name):
            assert is_name(name), text
        for flag in re.findall(r"--(cake-[\w-]+)", text):
            assert flag.removeprefix("cake-").replace("-", "_") in {*NAMES, "config"}, text


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        ("integration/compat.toml", True),
        ("integration/compatible.toml", False),
        ("loading/", True),
        ("unloading/", False),
        ("stores/ejection/", False),
        ("servers.yaml", False),
    ],
)
def test_docs_wrong_path_is_found(text: str, is_there: bool) -> None:
    assert is_path(text)
    assert (files_of(text) is not None) == is_there


@pytest.mark.parametrize("name", ["Unbreaker", "boundary.register_late", "unboundary.register"])
def test_docs_wrong_name_is_found(name: str) -> None:
    assert is_name("boundary.register")
    assert not is_name(name)


def test_docs_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs/generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docs_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "-f", "mkdocs.yml"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.read_text() for path in (tmp_path / "site").glob("*.html")]
    assert len(pages) >= len(DOCS)
    assert not any("<p>```" in page or "|---|" in page for page in pages)  # Markdown left as it is


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_relative_links_have_targets(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        assert there.exists(), link
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.resolve()), link


def test_docs_anchors_equal_those_of_github(tmp_path: Path) -> None:
    path = tmp_path / "some.md"
    path.write_text(
        "# `auto`, and *more*: what?\n## Own store\n```sh\n# no heading\n```\n## Own store\n"
        "### 10_000 of [them](x.md#y)  ##\n"
    )
    made = {"auto-and-more-what", "own-store", "own-store-1", "10_000-of-them"}
    assert anchors(path) == made


def test_docs_readme_is_short_before_its_reference_part() -> None:
    told = re.sub(r"\]\([^)]*\)", "]", prose(ROOT / "README.md").partition("## Reference")[0])
    assert len([word for word in told.split() if re.search("[A-Za-z]", word)]) <= 700
