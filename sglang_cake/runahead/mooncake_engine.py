"""Mooncake's transfer engine for `one_sided_transport.py`: it writes parts from host memory to host
memory.

Any process that reaches the engine's port can write into the sections (docs/security.md).
"""

import ctypes
import mmap
import os
from typing import Any

import xxhash

from sglang_cake.core.errors import ConfigError
from sglang_cake.runahead.one_sided_transport import BUFFER_BYTES

PROTOCOL_ENV = "MOONCAKE_PROTOCOL"  # as SGLang calls it


def check_installed() -> None:
    """Raises: ConfigError, one line."""
    try:
        import mooncake.engine  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--cake-runahead-transport mooncake needs mooncake-transfer-engine: "
            "pip install 'sglang-cake[mooncake]'"
        ) from None
    except ImportError as error:
        raise ConfigError(
            f"--cake-runahead-transport mooncake: Mooncake cannot be loaded ({error}); on Debian "
            "or Ubuntu: apt-get install libibverbs1 libnuma1"
        ) from None


class MooncakeEngine:
    """Implements `WriteEngine`: Mooncake's engine and its memory. It ends with the process.

    Raises: OSError if it cannot start, or does not take memory.
    """

    def __init__(self, host: str) -> None:
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        protocol = os.environ.get(PROTOCOL_ENV, "tcp")
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise OSError(f"Mooncake's engine does not start with protocol {protocol}")
        shown = f"[{host}]" if ":" in host else host
        self.session = f"{shown}:{self.engine.get_rpc_port()}"

    def allocate(self) -> tuple[int, memoryview]:
        """See `WriteEngine.allocate`. Pages cost memory only once they are used."""
        memory = mmap.mmap(-1, BUFFER_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.engine.register_memory(address, len(memory)) != 0:
            raise OSError("Mooncake's engine does not take memory")
        return address, memoryview(memory)

    def free(self, address: int) -> None:
        self.engine.unregister_memory(address)

    def fill(self, section: memoryview, data: memoryview) -> None:
        section[:] = data

    def write(self, session: str, source: int, destination: int, size_bytes: int) -> None:
        """See `WriteEngine.write`. Releases the GIL."""
        if self.engine.transfer_sync_write(session, source, destination, size_bytes) != 0:
            raise OSError(f"Mooncake's engine cannot write to {session}")

    def checksum(self, data: memoryview) -> int:
        return int(xxhash.xxh3_64_intdigest(data))
