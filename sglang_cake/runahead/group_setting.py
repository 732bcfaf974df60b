"""The settings of a group, which only make sense together, checked before a start.

The peers alone are enough where the rest follows from them: the rank, if only one of them can be on
this machine; the secret, if all of them are, or if its file lies at the default path.
"""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sglang_cake.config import CakeConfig
from sglang_cake.core.errors import ConfigError
from sglang_cake.core.secret_file import make_secret_file, own_secret_path, read_key
from sglang_cake.runahead.messages import MAX_MEMBERS
from sglang_cake.runahead.mooncake_engine import check_installed

TCP: Final = "tcp"
MOONCAKE: Final = "mooncake"
CUDA_IPC: Final = "cuda-ipc"
_MAX_PEERS_BYTES = 65_536
_SET_ONE = "set --cake-runahead-secret FILE"
_MAKE_ONE = "make one by: (umask 077; openssl rand -hex 32 > FILE), and copy it to every member"


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """This member's rank, the addresses of all members, and their secret."""

    rank: int
    peers: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)  # 32 bytes
    transport: str = TCP


def group_setting(config: CakeConfig) -> GroupSetting | None:
    """The group that the settings describe; None if they describe none.

    Raises: ConfigError, one line.
    """
    rank, peers, secret = config.runahead_rank, config.runahead_peers, config.runahead_secret
    if peers is None:
        if (rank, secret, config.runahead_transport) != (None, None, TCP):
            raise ConfigError(
                "KV-Runahead needs --cake-runahead-peers HOST:PORT,... of all members, this one "
                "among them"
            )
        return None
    known = _peers(peers)
    if rank is None:
        rank = _own_rank(known)
    elif rank >= len(known):
        raise ConfigError(
            f"--cake-runahead-rank {rank}: there are {len(known)} peers, so ranks 0 to "
            f"{len(known) - 1}"
        )
    if config.runahead_transport == MOONCAKE:
        check_installed()
    elif config.runahead_transport == CUDA_IPC and not _are_here(known):
        raise ConfigError(
            "--cake-runahead-transport cuda-ipc is for members on one machine, and "
            "--cake-runahead-peers names others: set tcp or mooncake"
        )
    if secret is not None:
        path = Path(secret)
    else:
        path = own_secret_path("runahead-secret", hint=_SET_ONE)
        if _are_here(known):  # the first member that starts makes the file; the others read it
            make_secret_file(path, name="secret file", hint=_SET_ONE)
    key = read_key(path, name="secret file", hint=_MAKE_ONE)
    return GroupSetting(rank, known, key, config.runahead_transport)


def _own_rank(peers: tuple[tuple[str, int], ...]) -> int:
    """The rank of the only member that can be on this machine."""
    here = [rank for rank, (host, _) in enumerate(peers) if _is_here(host)]
    if len(here) == 1:
        return here[0]
    found = "none" if not here else " and ".join(map(str, here))
    raise ConfigError(
        f"of the members that --cake-runahead-peers names, {found} can be on this machine: say "
        f"which one this is by --cake-runahead-rank, 0 to {len(peers) - 1}"
    )


def _are_here(peers: tuple[tuple[str, int], ...]) -> bool:
    return all(_is_here(host) for host in {host for host, _ in peers})


def _is_here(host: str) -> bool:
    """Whether this machine has that address, i.e. a socket can be bound to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:  # another machine's, or unknown
        return False
    return True


def _peers(text: str) -> tuple[tuple[str, int], ...]:
    """`HOST:PORT,...`, or a file of them, one a line."""
    if "," not in text:  # a group has two members at least
        try:
            text = Path(text).read_text(encoding="utf-8")[:_MAX_PEERS_BYTES]
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
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError:
        raise ConfigError(f"--cake-runahead-peers: {host!r} cannot be the name of a host") from None
    return host, int(port)
