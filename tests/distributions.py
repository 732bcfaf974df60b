"""Installed distributions, as far as Python looks for them."""

from pathlib import Path


def install(site: Path, name: str, group: str, *entry_points: str, version: str = "1.0") -> None:
    """A distribution without modules is in this folder.

    Args:
    site: made if it is not there; the test has it in `sys.path`.
    entry_points: of `group`, as "name = module:attribute".
    """
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entry_points, ""]))
