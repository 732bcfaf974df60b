"""Who may read a file with a secret."""

import os
from pathlib import Path

import pytest

from sglang_cake.core.errors import ConfigError
from sglang_cake.core.secret_file import read_secret_file

ROOT_USER, READER, OTHER = 0, 10001, 10002


@pytest.mark.skipif(os.geteuid() != ROOT_USER, reason="only root can give files away")
@pytest.mark.parametrize(
    ("mode", "owner", "reader", "readable"),
    [
        (0o400, READER, READER, True),
        (0o600, READER, READER, True),
        (0o440, READER, READER, False),
        (0o440, ROOT_USER, READER, True),  # as Kubernetes mounts a secret
        (0o640, ROOT_USER, READER, True),
        (0o660, ROOT_USER, READER, False),
        (0o450, ROOT_USER, READER, False),
        (0o444, ROOT_USER, READER, False),
        (0o440, ROOT_USER, ROOT_USER, False),
        (0o440, OTHER, READER, False),
    ],
)
def test_secret_file_is_read_if_only_its_owner_or_a_group_of_roots_may_read_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    owner: int,
    reader: int,
    readable: bool,
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"abc")
    path.chmod(mode)
    os.chown(path, owner, READER)
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    if readable:
        assert read_secret_file(path, name="key", most_bytes=9, hint="-") == b"abc"
    else:
        with pytest.raises(ConfigError, match=f"key {path} is open to others: chmod 600"):
            read_secret_file(path, name="key", most_bytes=9, hint="-")


def test_secret_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a" * 9)
    path.chmod(0o600)
    assert read_secret_file(path, name="key", most_bytes=9, hint="-") == b"a" * 9
    with pytest.raises(ConfigError, match=f"key {path} is too long: write at most 8 bytes"):
        read_secret_file(path, name="key", most_bytes=8, hint="-")
