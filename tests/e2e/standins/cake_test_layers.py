"""Failures at a chosen layer of a KV-Runahead forward. A plugin of SGLang, used only by tests.

The file `order` in the folder CAKE_TEST_LAYERS holds `WHAT LAYER`. The next shared forward that
reaches the layer removes the file, writes its process id to the file `reached`, and then does one
of these: `stop` or `kill` its own process, `raise` as if memory ran out, or `hold` until there is a
file `go`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

HOLD_S = 120.0


def register() -> None:
    folder = os.environ.get("CAKE_TEST_LAYERS")
    if folder is None:
        return
    from sglang_cake.integration.overlap.layer_gate import LayerGate

    reach = LayerGate.wait_until

    def wait_until(gate: Any, layer: int) -> None:
        if gate.passage is not None:
            _obey(Path(folder), layer)
        reach(gate, layer)

    LayerGate.wait_until = wait_until  # type: ignore[method-assign]


def _obey(folder: Path, layer: int) -> None:
    order = folder / "order"
    if not order.exists():
        return
    what, wanted = order.read_text().split()
    if layer != int(wanted):
        return
    order.unlink()
    draft = folder / "draft-reached"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / "reached")
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise MemoryError("no memory for this layer")
    else:
        end_s = time.monotonic() + HOLD_S
        while not (folder / "go").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
