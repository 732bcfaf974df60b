"""What the wheel says of itself."""

import tomllib
from importlib import resources
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_package_is_marked_as_typed() -> None:
    assert (resources.files("sglang_cake") / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_package_metadata_has_authors_keywords_and_python_version() -> None:
    assert PROJECT["authors"] == [{"name": "sglang_cake maintainers"}]
    assert {"sglang", "kv-cache"} <= set(PROJECT["keywords"])
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in PROJECT["classifiers"]
