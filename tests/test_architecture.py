"""The rules of docs/architecture.md, kept by a test: which part may import which."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sglang_cake

ROOT = Path(sglang_cake.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if "_patches" not in p.parts)
SHARED = {"core", "codecs", "stores", "config", "loading", "simulator", "runahead"}
MAY_IMPORT = {
    "core": {"core"},
    "codecs": {"core", "codecs"},
    "stores": {"core", "codecs", "stores"},
    "loading": {"core", "codecs", "stores", "loading"},
    "config": {"core", "codecs", "stores", "config"},
    "runahead": {"core", "config", "loading", "runahead"},
    "simulator": {"core", "loading", "stores", "simulator"},
    "demo": {"core", "demo"},
    "testing": SHARED | {"integration", "testing"},
    "cli": SHARED | {"demo", "cli"},
    "integration": SHARED | {"integration"},
}
# `doctor` asks SGLang what a server would. The package itself exports the settings, and what a
# store of one's own implements.
EXCEPTIONS = {
    ("cli/doctor.py", "integration"),
    ("__init__.py", "config"),
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
    part = relative.parts[0].removesuffix(".py")
    part = part if part in MAY_IMPORT else "core"
    if str(relative) == "__main__.py":
        part = "cli"
    for module in _imports(path):
        if module.split(".")[0] == "sglang":
            assert part == "integration", f"{relative} imports {module}"
        if module.split(".")[0] == "sglang_cake":
            other = _part(module)
            allowed = other in MAY_IMPORT[part] or (str(relative), other) in EXCEPTIONS
            assert allowed, f"{relative} imports {module}"


def _imports_at_once(path: Path, *, types: bool = False) -> set[str]:
    """Modules and names that importing the file imports: none of functions, and of type checks
    only with `types`."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_check = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_check and not types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def _module(path: Path) -> str:
    return ".".join(("sglang_cake", *path.relative_to(ROOT).with_suffix("").parts))


def test_architecture_imports_form_no_cycle() -> None:
    """Those for types included, without those of functions, which load optional parts."""
    modules = {_module(file).removesuffix(".__init__"): file for file in FILES}
    imports = {name: _imports_at_once(file, types=True) for name, file in modules.items()}
    TopologicalSorter({m: found & modules.keys() - {m} for m, found in imports.items()}).prepare()


def _loaded_with(module: str) -> set[str]:
    """The modules of the package that importing this one imports."""
    loaded: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        path = ROOT.parent.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name.split(".")[0] == "sglang_cake" and name not in loaded and file.exists():
            loaded.add(name)
            parents = name.split(".")[:-1]
            todo |= {".".join(parents[: n + 1]) for n in range(len(parents))}
            todo |= _imports_at_once(file)
    return loaded


def test_architecture_a_server_imports_only_what_it_uses() -> None:
    hooks = [file for file in FILES if file.name.endswith(("_hook.py", "_hooks.py"))]
    assert len(hooks) > 2
    loaded: set[str] = set()
    for module in (
        *map(_module, hooks),
        "sglang_cake.integration.plugin",
        "sglang_cake.integration.build",
    ):
        loaded |= _loaded_with(module)
    assert "sglang_cake.loading.loader" in loaded  # the test sees what is imported
    optional = ("runahead", "simulator", "cli", "demo", "testing", "codecs.entropy", "stores.s3")
    for part in (*optional, "integration.runahead"):
        assert not {m for m in loaded if f"{m}.".startswith(f"sglang_cake.{part}.")}, part


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


def test_parsing_is_not_disturbed_by_finalizers_that_parse() -> None:
    class Parsing:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            ast.parse("formatting(a.traceback)")

    text = (ROOT / "integration/support_matrix.py").read_text()
    for _ in range(5):
        garbage = [Parsing() for _ in range(5)]
        del garbage
        ast.parse(text)


def test_architecture_class_names_are_unique() -> None:
    """A leading underscore makes no difference."""
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}
