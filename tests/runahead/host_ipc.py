"""The engine of transports between GPUs, on memory of the host: files that processes share."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from sglang_cake.core.buffers import PartBytes
from sglang_cake.integration.runahead.runahead_ipc import IpcEngine


class HostIpc(IpcEngine):
    """What is CUDA's alone is left out: handles, streams, and that parts are on a device."""

    def __init__(self, peers: int) -> None:
        super().__init__(torch.device("cpu"), peers, stream=None)  # type: ignore[arg-type]

    def fill(self, section: torch.Tensor, data: PartBytes) -> None:
        super().fill(section, torch.from_numpy(np.asarray(data).copy()))

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def _export(self, memory: torch.Tensor) -> str:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "memory"
        path.touch()
        os.truncate(path, memory.numel())
        self._memory = self._open(str(path))
        return str(path)

    def _open(self, session: str) -> torch.Tensor:
        try:
            size = Path(session).stat().st_size
        except OSError as error:
            raise RuntimeError("as CUDA says it") from error
        return torch.from_file(session, shared=True, size=size, dtype=torch.uint8)
