"""Who is in the group: every mistake is one line, before anything is started."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from private_files import write_private

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.runahead.group_setting import GroupSetting, group_setting

KEY = bytes(range(32))
PEERS = "10.0.0.1:7000,[::1]:7001,host.example:7002"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return write_private(tmp_path / "secret", KEY.hex() + "\n")


def setting(
    peers: str | None, secret: Path | None, rank: int | None = 1, transport: Any = "tcp"
) -> GroupSetting | None:
    return group_setting(
        CakeConfig(
            runahead_rank=rank,
            runahead_peers=peers,
            runahead_secret=None if secret is None else str(secret),
            runahead_transport=transport,
        )
    )


def test_group_setting_peers_from_flag_and_file_are_equal(tmp_path: Path, secret: Path) -> None:
    expected = (("10.0.0.1", 7000), ("::1", 7001), ("host.example", 7002))
    found = setting(PEERS, secret)
    assert found is not None
    assert (found.rank, found.peers, found.secret) == (1, expected, KEY)
    assert str(KEY) not in repr(found)
    file = tmp_path / "peers"
    file.write_text(PEERS.replace(",", "\n") + "\n")
    assert setting(str(file), secret) == found


def test_group_setting_missing_transport_package_names_the_install(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install 'sglang-cake\[mooncake\]'$"):
        setting(PEERS, secret, transport="mooncake")


def test_group_setting_cuda_ipc_across_machines_is_refused(secret: Path) -> None:
    found = setting("127.0.0.1:7000,localhost:7001", secret, transport="cuda-ipc")
    assert found is not None
    assert found.transport == "cuda-ipc"
    with pytest.raises(ConfigError, match=r"set tcp or mooncake$"):
        setting("127.0.0.1:7000,240.0.0.1:7000", secret, transport="cuda-ipc")


def test_group_setting_rank_is_the_only_local_address(secret: Path) -> None:
    found = setting("240.0.0.1:7000,127.0.0.1:7000,no.such.host.invalid:7000", secret, rank=None)
    assert found is not None
    assert found.rank == 1


def test_group_setting_local_members_share_one_generated_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    peers = "127.0.0.1:7000,127.0.0.1:7001,localhost:7002"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: setting(peers, None, rank=i % 3), range(32)))
    (path,) = (tmp_path / "sglang_cake").iterdir()  # no drafts are left
    assert path.name == "runahead-secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len({each.secret for each in found if each is not None}) == 1
    assert {each.secret for each in found if each is not None} == {bytes.fromhex(path.read_text())}


def test_group_setting_remote_members_need_an_existing_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    peers = "127.0.0.1:7000,240.0.0.1:7000"
    with pytest.raises(ConfigError, match=r"runahead-secret cannot be read.*copy it to every"):
        setting(peers, None, rank=None)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "sglang_cake" / "runahead-secret"
    path.parent.mkdir()
    path.touch(0o600)
    path.write_text(KEY.hex().upper())
    found = setting(peers, None, rank=None)
    assert found is not None
    assert (found.rank, found.secret) == (0, KEY)


def test_group_setting_without_peers_is_none() -> None:
    assert setting(None, None, None) is None


@pytest.mark.parametrize(
    ("peers", "rank", "says"),
    [
        (None, 0, "needs --cake-runahead-peers"),
        ("127.0.0.1:1,240.0.0.1:1,127.0.0.2:1", None, "0 and 2 can be on this machine"),
        ("240.0.0.1:1,240.0.0.2:1", None, "none can be on this machine"),
        (PEERS, 3, "there are 3 peers, so ranks 0 to 2"),
        ("10.0.0.1:7000", 0, "neither HOST:PORT,... nor a file"),
        ("10.0.0.1:7000,", 0, "names 1 members"),
        ("a:1,a:1", 0, "names a member twice"),
        ("a:1,b", 0, "'b' is no HOST:PORT"),
        ("a:1,b:0", 0, "'b:0' is no HOST:PORT"),
        ("a:1,b:65536", 0, "'b:65536' is no HOST:PORT"),
        ("a:1,:7", 0, "':7' is no HOST:PORT"),
        ("a:1,..:7", 0, "'..' cannot be the name of a host"),
        ("no-such-file", 0, "neither HOST:PORT,... nor a file"),
        (",".join(f"a:{port}" for port in range(1, 300)), 0, "names 299 members"),
    ],
)
def test_group_setting_mistake_is_one_line(
    peers: str | None, rank: int | None, says: str, secret: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        setting(peers, secret, rank)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "correct horse battery staple", "0123456789abcdef", "g" * 64, "0" * 63, "0" * 65]
)
def test_group_setting_invalid_secret_is_refused_with_advice(secret: Path, text: str) -> None:
    secret.write_text(text)
    with pytest.raises(ConfigError) as error:
        setting(PEERS, secret)
    assert f"{secret} does not hold 64 hex digits; make one by: " in str(error.value)
    assert "openssl rand -hex 32" in str(error.value)
    assert "copy it to every member" in str(error.value)
    assert text == "" or text not in str(error.value)


def test_group_setting_readable_by_others_or_unreadable_secret_is_refused(
    secret: Path, tmp_path: Path
) -> None:
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        setting(PEERS, secret)
    with pytest.raises(ConfigError, match=r"cannot be read.*openssl rand"):
        setting(PEERS, tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        setting(PEERS, tmp_path)
