"""Files with secrets."""

from pathlib import Path


def write_private(path: Path, text: str) -> Path:
    """Write a file that its owner alone may read, and return its path."""
    path.write_text(text)
    path.chmod(0o600)
    return path
