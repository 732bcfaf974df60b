"""Trouble at a chosen layer of a KV-Runahead forward; a plugin of SGLang, for tests alone.

In the folder that CAKE_TEST_LAYERS names, `order` says `WHAT LAYER`. The next shared forward that
comes to that layer takes the order away, writes its process id to `reached`, and does it: `stop`
and `kill` its own process, `raise` as if memory ran out, or `hold` until there is a file `go`.
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
        if gate._passage is not None:
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
