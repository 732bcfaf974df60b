"""What prefill and decode servers need on a CPU: SGLang records CUDA events for what they send,
and copies the numbers of pages into pinned memory. A plugin of SGLang, used only by tests, with
CAKE_TEST_DISAGGREGATION set.
"""

import os

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
