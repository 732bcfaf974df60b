"""A slow device: each layer of each forward takes CAKE_TEST_LAYER_S longer for K, and again for V.
A plugin of SGLang, used only by tests."""

import os
import time
from typing import Any


def register() -> None:
    slow_s = float(os.environ.get("CAKE_TEST_LAYER_S", "0"))
    if not slow_s:
        return
    from sglang_cake.integration.overlap.layer_gate import LayerGate

    reach = LayerGate.wait_until

    def wait_until(gate: Any, layer: int) -> None:
        time.sleep(slow_s)
        reach(gate, layer)

    LayerGate.wait_until = wait_until  # type: ignore[method-assign]
