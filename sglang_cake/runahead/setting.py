"""Who is in the group: three settings that only make sense together, checked before a start."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sglang_cake.config import CakeConfig
from sglang_cake.errors import ConfigError
from sglang_cake.runahead.messages import MAX_MEMBERS
from sglang_cake.runahead.mooncake import check_installed
from sglang_cake.secret_file import read_secret_file

MIN_SECRET_BYTES = 16
_MAX_FILE_BYTES = 65_536
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE), and copy it to every member"


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """This member's place, where all members are, and what they all know."""

    rank: int
    peers: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)
    transport: Literal["tcp", "mooncake"] = "tcp"


def group_setting(config: CakeConfig) -> GroupSetting | None:
    """The group that the settings describe; None if they describe none.

    Raises: ConfigError, one line.
    """
    given = (config.runahead_rank, config.runahead_peers, config.runahead_secret)
    if given == (None, None, None):
        return None
    rank, peers, secret = given
    if rank is None or peers is None or secret is None:
        raise ConfigError(
            "KV-Runahead needs all three of --cake-runahead-rank N, "
            "--cake-runahead-peers HOST:PORT,... and --cake-runahead-secret FILE"
        )
    known = _peers(peers)
    if rank >= len(known):
        raise ConfigError(
            f"--cake-runahead-rank {rank}: there are {len(known)} peers, so ranks 0 to "
            f"{len(known) - 1}"
        )
    if config.runahead_transport == "mooncake":
        check_installed()
    return GroupSetting(rank, known, _secret(Path(secret)), config.runahead_transport)


def _peers(text: str) -> tuple[tuple[str, int], ...]:
    """`HOST:PORT,...`, or a file of them, one a line."""
    if "," not in text:  # a group has two members at least
        try:
            text = Path(text).read_text(encoding="utf-8")[:_MAX_FILE_BYTES]
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"--cake-runahead-peers {text!r} is neither HOST:PORT,... nor a file of them"
            ) from None
    peers = tuple(
        _address(each.strip()) for each in text.replace("\n", ",").split(",") if each.strip()
    )
    if not 2 <= len(peers) <= MAX_MEMBERS:
        raise ConfigError(
            f"--cake-runahead-peers names {len(peers)} members, allowed: 2 to {MAX_MEMBERS}, this "
            "one among them"
        )
    if len(set(peers)) < len(peers):
        raise ConfigError("--cake-runahead-peers names a member twice")
    return peers


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not host
        or not port.isascii()
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ConfigError(f"--cake-runahead-peers: {text!r} is no HOST:PORT")
    return host, int(port)


def _secret(path: Path) -> bytes:
    secret = read_secret_file(
        path, name="secret file", most_bytes=_MAX_FILE_BYTES, hint=_MAKE_ONE
    ).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret file {path} holds less than 16 bytes; {_MAKE_ONE}")
    return secret
