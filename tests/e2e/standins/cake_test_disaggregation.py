"""What prefill and decode servers need on a CPU: SGLang records CUDA events for what they send,
and copies the numbers of pages into pinned memory. A plugin of SGLang, used only by tests, with
CAKE_TEST_DISAGGREGATION set.

With CAKE_TEST_TRANSFERS, the name of a file: when the file is there, the next transfer removes it
and fails as one of Mooncake's engine does, with nothing sent.
"""

import os
from pathlib import Path
from typing import Any

import torch


class NoEvent:
    """On a CPU, what was launched is complete."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def register() -> None:
    if torch.cuda.is_available() or "CAKE_TEST_DISAGGREGATION" not in os.environ:
        return
    torch.cuda.Event = NoEvent  # type: ignore[assignment,misc]
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:  # Mooncake's libraries are not installed
        return
    MooncakeKVSender.supports_host_tensor_indices = False
    if "CAKE_TEST_TRANSFERS" in os.environ:
        _fail_on_order(Path(os.environ["CAKE_TEST_TRANSFERS"]))


def _fail_on_order(order: Path) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    transfer = MooncakeKVManager._transfer_data

    def transfer_or_fail(self: Any, session: str, blocks: Any) -> int:
        try:
            order.unlink()
        except FileNotFoundError:
            return int(transfer(self, session, blocks))
        return -1

    MooncakeKVManager._transfer_data = transfer_or_fail
