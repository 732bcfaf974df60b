"""Costs kept for the next process: one small file per machine, namespace and store setting.

They are a hint: if the file is absent, foreign or damaged, the first requests measure again.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.json import Decoder

from sglang_cake.core import untrusted
from sglang_cake.core.keys import Digest
from sglang_cake.core.local_files import atomic_write
from sglang_cake.loading.cost_model import LoadCost, PrefillCost

VERSION = 4
MAX_FILES = 64  # the newest stay
_MAX_BYTES = 4096
_Number = Annotated[float, Meta(ge=0, lt=1e4)]  # a cost in seconds, or a share


class _Content(Struct):
    version: int
    prefill: dict[str, _Number]
    loads: list[dict[str, _Number] | None]


_CONTENT = Decoder(_Content)


class CostFile:
    """Remembers the costs of one machine, model and store setting.

    Args:
        folder: holds all such files; made at the first write, with mode 0700.
        model: digest of the facts about model and server that costs depend on. Weights are none.
        device: name of the GPU or the processor that computes.
    """

    def __init__(self, folder: Path, *, model: Digest, store: str, device: str) -> None:
        machine = f"{platform.node()}\0{os.cpu_count()}\0{device}\0{store}".encode()
        name = hashlib.sha256(bytes(model) + machine).hexdigest()[:32]
        self._folder = folder
        self._path = folder / f"{name}.json"

    def read(self) -> tuple[PrefillCost, list[LoadCost | None]] | None:
        """The costs that were written last; None: there are none, or they are not usable."""
        try:
            with open(self._path, "rb") as file:
                content = untrusted.decode(_CONTENT, file.read(_MAX_BYTES))
            if content.version != VERSION:
                return None
            prefill = convert(content.prefill, PrefillCost)
            loads = [
                None if load is None else convert(load | {"depth": 1}, LoadCost)
                for load in content.loads
            ]
        except (OSError, ValueError, ValidationError):
            return None
        return prefill, loads

    def write(self, prefill: PrefillCost, loads: Sequence[LoadCost | None]) -> bool:
        """Replace the file. Returns False if that is not possible (a read-only home, a full disk).

        Args: loads: by tier. `read` does not return their depth, which is a setting.
        """
        content = {
            "version": VERSION,
            "prefill": {
                field.name: value
                for field, value in zip(fields(prefill), prefill.numbers, strict=False)
            },
            "loads": [None if load is None else asdict(load) for load in loads],
        }
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._path, json.dumps(content).encode())
            self._forget_old()
        except OSError:
            return False
        return True

    def _forget_old(self) -> None:
        files = list(self._folder.iterdir())
        if len(files) > MAX_FILES:
            files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[MAX_FILES:]:
                with contextlib.suppress(OSError):
                    file.unlink()
