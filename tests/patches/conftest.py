"""A copy of the pinned SGLang's files, so that no test writes into the environment."""

import importlib.metadata
from pathlib import Path

import pytest
from sglang_copy import VERSION, Copies, record_hash, write_metadata

from sglang_cake.cli import patch as patch_command
from sglang_cake.core.errors import PatchError


@pytest.fixture(scope="session")
def copies() -> Copies:
    try:
        installation = patch_command.find_installation()
    except PatchError:
        pytest.skip("SGLang is not installed")
    plan = patch_command.plan_of(installation)
    # Not taken from the plan's word: the environment may be repaired, so what was undone in memory
    # has to be what the wheel recorded.
    recorded = {
        file.as_posix(): file.hash.value
        for file in importlib.metadata.files("sglang") or ()
        if file.hash is not None
    }
    for path, content in plan.released.items():
        assert record_hash(content) == recorded[path]
    return Copies(
        dict(plan.released), dict(plan.repaired), {path: recorded[path] for path in plan.installed}
    )


@pytest.fixture
def site(tmp_path: Path, copies: Copies) -> Path:
    """A site-packages with a released SGLang of the patched files only, and its metadata."""
    root = tmp_path / "site"
    for path, content in copies.released.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    # Importing this SGLang must never happen: the command works where it cannot be imported.
    (root / "sglang" / "__init__.py").write_text("raise RuntimeError('SGLang was imported')\n")
    write_metadata(root, VERSION, copies.recorded)
    return root
