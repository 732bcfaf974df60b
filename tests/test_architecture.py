"""The rules of docs/architecture.md, kept by a test: which part may import which."""

import ast
from pathlib import Path

import pytest

import sglang_cake

ROOT = Path(sglang_cake.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if "_patches" not in p.parts)
SHARED = {"core", "codecs", "stores", "loading", "writeback", "simulator", "runahead"}
MAY_IMPORT = {
    "core": {"core"},
    "codecs": {"core", "codecs"},
    "stores": {"core", "codecs", "stores"},
    "loading": {"core", "codecs", "stores", "loading"},
    "writeback": {"core", "codecs", "stores", "writeback"},
    "runahead": {"core", "loading", "runahead"},
    "simulator": {"core", "loading", "stores", "simulator"},
    "demo": {"core", "demo"},
    "testing": SHARED | {"integration", "testing"},
    "cli": SHARED | {"demo", "cli"},
    "integration": SHARED | {"integration"},
}
# `config` checks store URLs and codecs of other packages, so that a bad one fails before anything
# starts. `doctor` asks SGLang what a server would. The package itself exports what a store of one's
# own implements.
EXCEPTIONS = {
    ("cli/doctor.py", "integration"),
    ("core/config.py", "stores"),
    ("core/config.py", "codecs"),
    ("__init__.py", "stores"),
}


def _part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in MAY_IMPORT else "core"


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_architecture_modules_import_only_allowed_parts(path: Path) -> None:
    relative = path.relative_to(ROOT)
    part = relative.parts[0] if relative.parts[0] in MAY_IMPORT else "core"
    if str(relative) == "__main__.py":
        part = "cli"
    for module in _imports(path):
        if module.split(".")[0] == "sglang":
            assert part == "integration", f"{relative} imports {module}"
        if module.split(".")[0] == "sglang_cake":
            other = _part(module)
            allowed = other in MAY_IMPORT[part] or (str(relative), other) in EXCEPTIONS
            assert allowed, f"{relative} imports {module}"


# Of the decisions, these carry out what others decide, or measure it.
EFFECTS = {"loading/loader.py", "loading/cost_file.py", "simulator/eviction_replay.py"}
CLOCKS_AND_THREADS = {"asyncio", "concurrent", "datetime", "sched", "threading", "time"}


@pytest.mark.parametrize("folder", ["loading", "simulator", "stores/eviction"])
def test_architecture_decisions_import_no_torch_clock_or_thread(folder: str) -> None:
    paths = [*(ROOT / folder).glob("*.py")]
    assert paths
    for path in paths:
        relative = str(path.relative_to(ROOT))
        found = {module.split(".")[0] for module in _imports(path)}
        assert "torch" not in found, relative
        if relative not in EFFECTS:
            assert not found & CLOCKS_AND_THREADS, relative


def test_architecture_eviction_imports_no_clock_disk_or_lock() -> None:
    """It decides: no clock, no disk, no lock, nothing of the store."""
    paths = [*(ROOT / "stores" / "eviction").glob("*.py")]
    assert paths
    for path in paths:
        for module in _imports(path):
            assert module.split(".")[0] not in {"os", "pathlib", "sqlite3", "threading", "time"}
            if module.startswith("sglang_cake."):
                assert module.startswith("sglang_cake.stores.eviction."), f"{path.name}: {module}"
