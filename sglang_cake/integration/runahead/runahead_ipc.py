"""From GPU to GPU in one machine: `ring.py` hands on parts of layers that are copied by CUDA IPC.

Each member lends its peers memory on its own GPU; they open it, and copy into it over NVLink or
PCIe. Such a copy waits for nothing that the peer does, so that one which dies or hangs holds nobody
up: that it is gone shows on the connections beside it.
"""

import json
import logging
import threading
from typing import Any

import torch

from sglang_cake.runahead.ring import RING_BYTES

logger = logging.getLogger("sglang_cake")

# What `UntypedStorage._share_cuda_` gives: which device, memory, where in it, and an event.
_HANDLE = (int, bytes, int, int, bytes, int, bytes, bool)


class IpcEngine:
    """`ring.WriteEngine` between GPUs. Ends with the process.

    Args:
        device: this process's.
        peers: how many other members there are. Each costs two rings of memory on the device.
        stream: that copies run on.

    Raises: OSError if the memory cannot be shared.
    """

    def __init__(self, device: torch.device, peers: int, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._peers = peers
        self._memory = torch.empty(2 * peers * RING_BYTES, dtype=torch.uint8, device=device)
        self._stream = stream
        self._lent = 0
        self._lock = threading.Lock()
        self._theirs: dict[str, torch.Tensor] = {}  # by session, the oldest first
        try:
            self.session = self._export(self._memory)
        except RuntimeError as error:
            raise OSError(f"CUDA does not share memory: {error}") from None

    @property
    def sessions(self) -> list[str]:
        """The peers whose memory is open, the oldest first."""
        with self._lock:
            return list(self._theirs)

    def lend(self) -> tuple[int, torch.Tensor]:
        address = self._lent * RING_BYTES
        self._lent += 1
        return address, self._memory[address : address + RING_BYTES]

    def take_back(self, address: int) -> None:
        """It is not given to anybody else."""

    def fill(self, slot: torch.Tensor, payload: torch.Tensor) -> None:
        self._copy(slot, payload)

    def write(self, session: str, source: int, target: int, size_bytes: int) -> bool:
        try:
            theirs = self._of(session)
            self._copy(
                theirs[target : target + size_bytes], self._memory[source : source + size_bytes]
            )
        except (RuntimeError, ValueError) as error:
            logger.warning("cake runahead: a peer's GPU cannot be written to: %s", error)
            return False
        return True

    def checksum(self, payload: torch.Tensor) -> int:
        return 0

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Returns when it is done."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        done.synchronize()

    def _of(self, session: str) -> torch.Tensor:
        """The memory that a peer lends. Raises: ValueError, RuntimeError."""
        with self._lock:
            if session not in self._theirs:
                if len(self._theirs) == self._peers:  # of one that has started anew since
                    self._theirs.pop(next(iter(self._theirs)))
                self._theirs[session] = self._open(session)
            return self._theirs[session]

    def _export(self, memory: torch.Tensor) -> str:
        return spelled(memory.untyped_storage()._share_cuda_())

    def _open(self, session: str) -> torch.Tensor:
        _, *handle = read(session)
        with torch.cuda.device(self._device):
            # Opened on our device, whatever the peer calls its own: it may see others than we do.
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle)
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def spelled(handle: tuple[Any, ...]) -> str:
    """A handle as text."""
    return json.dumps(
        [each.hex() if isinstance(each, bytes) else each for each in handle], separators=(",", ":")
    )


def read(text: str) -> list[Any]:
    """The handle that was spelled. Raises: ValueError."""
    try:
        handle = [
            bytes.fromhex(part) if kind is bytes else part
            for part, kind in zip(json.loads(text), _HANDLE, strict=True)
        ]
    except (TypeError, ValueError):
        handle = []
    if [type(part) for part in handle] != list(_HANDLE):
        raise ValueError("what a peer sent is no handle of CUDA memory")
    return handle
