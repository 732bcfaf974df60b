"""What the tests of the patches share: metadata of a copied SGLang, functions cut from sources."""

import ast
import base64
import hashlib
import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VERSION = importlib.metadata.version("sglang")


def record_hash(content: bytes) -> str:
    """The form in which a wheel's RECORD writes a sha256."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class Copies:
    """Both forms of every patched file, by path below site-packages."""

    released: dict[str, bytes]
    repaired: dict[str, bytes]
    recorded: dict[str, str]


def write_metadata(root: Path, version: str, recorded: dict[str, str]) -> None:
    for old in root.glob("sglang-*.dist-info"):
        shutil.rmtree(old)
    info = root / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (info / "RECORD").write_text(
        "".join(f"{path},sha256={digest},1\n" for path, digest in recorded.items())
    )


def cut_out(source: bytes, names: set[str], namespace: dict[str, Any]) -> SimpleNamespace:
    """Run only the functions and methods called `names`, without their module or class.

    Importing the module would need a repaired SGLang, and could not give both forms in one process.
    """
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            # A static method outside its class is a plain function.
            node.decorator_list = []
            node.returns = None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            found.append(node)
    exec(compile(ast.Module(found, []), "<cut out>", "exec"), namespace)
    return SimpleNamespace(**{node.name: namespace[node.name] for node in found})
