"""A slow device, used only by tests. A plugin of SGLang.

Each layer of each forward takes CAKE_TEST_LAYER_S longer for K, and again for V; each prefill step
takes CAKE_TEST_TOKEN_S longer for each token.
"""

import functools
import os
import time
from typing import Any


def register() -> None:
    layer_s = float(os.environ.get("CAKE_TEST_LAYER_S", "0"))
    token_s = float(os.environ.get("CAKE_TEST_TOKEN_S", "0"))
    if layer_s:
        from sglang_cake.integration.overlap.layer_gate import LayerGate

        reach = LayerGate.wait_until

        def wait_until(gate: Any, layer: int) -> None:
            time.sleep(layer_s)
            reach(gate, layer)

        LayerGate.wait_until = wait_until  # type: ignore[method-assign]
    if token_s:
        from sglang.srt.managers.tp_worker import TpModelWorker

        forward = TpModelWorker.forward_batch_generation

        @functools.wraps(forward)  # its signature is checked
        def forward_slowly(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch is not None and batch.forward_mode.name in ("EXTEND", "MIXED"):
                time.sleep(token_s * batch.extend_num_tokens)
            return forward(self, batch, *args, **kwargs)

        TpModelWorker.forward_batch_generation = forward_slowly
