"""The engine of `one_sided_transport.py` from GPU to GPU in one machine: parts of layers are copied
by CUDA IPC.

Each member lends its peers memory on its own GPU. They open it, and copy into it over NVLink or
PCIe. Such a copy does not wait for the peer, so a peer that hangs delays no other member. The
connections of `zeromq.py` show that it is gone.
"""

import threading

import msgspec
import torch

from sglang_cake.core import untrusted
from sglang_cake.integration.memory.kv_pool import copying_thread
from sglang_cake.runahead.one_sided_transport import BUFFER_BYTES

# The fields of `UntypedStorage._share_cuda_`: device, memory, offsets, and an event.
Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]
_HANDLE = msgspec.json.Decoder(Handle)


class IpcEngine:
    """Implements `WriteEngine` between GPUs. It ends with the process.

    Args:
        device: the GPU of this process.
        peers: number of other members. Each takes two buffers of memory on the device.
        stream: the stream of the copies.

    Raises: OSError if the memory cannot be shared.
    """

    def __init__(self, device: torch.device, peers: int, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._peers = peers
        self._memory = torch.empty(2 * peers * BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._stream = stream
        self._lent = 0
        self._lock = threading.Lock()
        self._theirs: dict[str, torch.Tensor] = {}  # by session, the oldest first
        try:
            self.session = self._export(self._memory)
        except RuntimeError as error:
            raise OSError(f"CUDA does not share memory: {error}") from None

    def allocate(self) -> tuple[int, torch.Tensor]:
        address = self._lent * BUFFER_BYTES
        self._lent += 1
        return address, self._memory[address : address + BUFFER_BYTES]

    def free(self, address: int) -> None:
        """The memory is not reused."""

    def fill(self, section: torch.Tensor, data: torch.Tensor) -> None:
        self._copy(section, data)

    def write(self, session: str, source: int, destination: int, size_bytes: int) -> None:
        theirs = self._of(session)[destination : destination + size_bytes]
        self._copy(theirs, self._memory[source : source + size_bytes])

    def checksum(self, data: torch.Tensor) -> int:
        return 0

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and wait until the copy is complete."""
        with copying_thread(self._device), torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()

    def _of(self, session: str) -> torch.Tensor:
        """The memory of a peer, opened if needed. Raises: ValueError, RuntimeError."""
        with self._lock:
            if session not in self._theirs:
                if len(self._theirs) == self._peers:  # the oldest is of a restarted peer
                    self._theirs.pop(next(iter(self._theirs)))
                self._theirs[session] = self._open(session)
            return self._theirs[session]

    def _export(self, memory: torch.Tensor) -> str:
        return spelled(memory.untyped_storage()._share_cuda_())

    def _open(self, session: str) -> torch.Tensor:
        _, *handle = read(session)
        with copying_thread(self._device):
            # Opened on our device: device numbers may differ between processes.
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle)
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def spelled(handle: Handle) -> str:
    """A handle as text."""
    return msgspec.json.encode(handle).decode()


def read(text: str) -> Handle:
    """The inverse of `spelled`. Raises: ValueError."""
    try:
        handle: Handle = untrusted.decode(_HANDLE, text)
        return handle
    except ValueError:
        raise ValueError("what a peer sent is no handle of CUDA memory") from None
