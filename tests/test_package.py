"""What the wheel says of itself."""

import tomllib
from importlib import resources
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_package_says_that_it_has_types() -> None:
    assert (resources.files("sglang_cake") / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_wheel_names_what_a_registry_shows() -> None:
    assert PROJECT["authors"] == [{"name": "sglang_cake maintainers"}]
    assert {"sglang", "kv-cache"} <= set(PROJECT["keywords"])
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in PROJECT["classifiers"]
