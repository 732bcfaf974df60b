"""Who is in the group: every mistake is one line, before anything is started."""

import sys
from pathlib import Path

import pytest

from sglang_cake.config import CakeConfig
from sglang_cake.errors import ConfigError
from sglang_cake.runahead.setting import GroupSetting, group_setting

PEERS = "10.0.0.1:7000,[::1]:7001,host.example:7002"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


def setting(peers: str | None, secret: Path | None, rank: int | None = 1) -> GroupSetting | None:
    return group_setting(
        CakeConfig(
            runahead_rank=rank,
            runahead_peers=peers,
            runahead_secret=None if secret is None else str(secret),
        )
    )


def test_a_group_from_a_flag_or_from_a_file(tmp_path: Path, secret: Path) -> None:
    expected = (("10.0.0.1", 7000), ("::1", 7001), ("host.example", 7002))
    found = setting(PEERS, secret)
    assert found is not None
    assert (found.rank, found.peers, found.secret) == (1, expected, b"0123456789abcdef")
    assert "0123456789abcdef" not in repr(found)
    file = tmp_path / "peers"
    file.write_text(PEERS.replace(",", "\n") + "\n")
    assert setting(str(file), secret) == found


def test_a_transport_that_is_not_installed_is_one_line(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CakeConfig(
        runahead_rank=0,
        runahead_peers=PEERS,
        runahead_secret=str(secret),
        runahead_transport="mooncake",
    )
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install 'sglang-cake\[mooncake\]'$"):
        group_setting(config)


def test_no_settings_are_no_group() -> None:
    assert setting(None, None, None) is None


@pytest.mark.parametrize(
    ("peers", "rank", "says"),
    [
        (None, 0, "all three of"),
        (PEERS, None, "all three of"),
        (PEERS, 3, "there are 3 peers, so ranks 0 to 2"),
        ("10.0.0.1:7000", 0, "neither HOST:PORT,... nor a file"),
        ("10.0.0.1:7000,", 0, "names 1 members"),
        ("a:1,a:1", 0, "names a member twice"),
        ("a:1,b", 0, "'b' is no HOST:PORT"),
        ("a:1,b:0", 0, "'b:0' is no HOST:PORT"),
        ("a:1,b:65536", 0, "'b:65536' is no HOST:PORT"),
        ("a:1,:7", 0, "':7' is no HOST:PORT"),
        ("no-such-file", 0, "neither HOST:PORT,... nor a file"),
        (",".join(f"a:{port}" for port in range(1, 300)), 0, "names 299 members"),
    ],
)
def test_mistakes(peers: str | None, rank: int | None, says: str, secret: Path) -> None:
    with pytest.raises(ConfigError) as error:
        setting(peers, secret, rank)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_secret_is_long_and_nobody_elses(secret: Path, tmp_path: Path) -> None:
    secret.write_text("too short")
    with pytest.raises(ConfigError, match="less than 16 bytes"):
        setting(PEERS, secret)
    secret.write_text("0123456789abcdef")
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        setting(PEERS, secret)
    with pytest.raises(ConfigError, match=r"cannot be read.*openssl rand"):
        setting(PEERS, tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        setting(PEERS, tmp_path)
