"""The same on a GPU: copies on side streams, beside a forward that only streams and events order.

    forward    |proj 0| attn 0 |proj 1|    wait     | attn 1 |proj 2| ...
                          \\ event: K and V of layer 0 are written
    out stream             |gather, to pinned memory|                     then it is sent
                                            / event: what came of layer 1 is in the pool
    in stream              | from pinned memory, scatter |

The host launches layers before the device computes them. It runs no more than a layer ahead, so
that a hop that failed ends within a layer or two; and before it waits for KV of others it lets the
device come up, so that only time in which the device has nothing to do counts as waited.
"""

from typing import Any

import torch

from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.overlap.layer_gate import LayerGate, Passage, PoolRows
from sglang_cake.runahead.hop import Broken
from sglang_cake.runahead.transport import Payload


class CudaRows(PoolRows):
    """`runahead.rows.Rows` over a pool on a GPU; and what the forward's thread says of where it is,
    on the stream that it launches on.

    Args:
        on_device: parts come and go in memory of the GPU; in pinned memory otherwise.
    """

    def __init__(self, kv: DeviceKV, *, on_device: bool = False) -> None:
        super().__init__(kv)
        self._on_device = on_device
        self._device = kv.device
        self._in, self._out = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._written: dict[int, torch.cuda.Event] = {}  # by layer, in this forward
        self._landed: dict[int, torch.cuda.Event] = {}
        self._passed: torch.cuda.Event | None = None

    # ---- copies ----

    def buffer(self, size_bytes: int) -> Payload:
        if self._on_device:
            return self._empty(size_bytes)
        with torch.cuda.device(self._device):
            pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]

    def begin(self) -> None:
        self._in.wait_stream(self._current())

    def read(self, layer: int, slots: torch.Tensor, out: Payload) -> None:
        with torch.cuda.stream(self._out), torch.inference_mode():
            self._out.wait_event(self._written[layer])
            part = out if self._on_device else self._empty(len(out))
            self._gather(layer, slots, part)
            if not self._on_device:
                torch.frombuffer(out, dtype=torch.uint8).copy_(part, non_blocking=True)
            copy = self._event(self._out)
        copy.synchronize()

    def write(self, layer: int, slots: torch.Tensor, payload: Payload, skip: int) -> Copy:
        with torch.cuda.stream(self._in), torch.inference_mode():
            part = payload if self._on_device else self._empty(len(payload))
            if not self._on_device:
                part.copy_(torch.frombuffer(payload, dtype=torch.uint8), non_blocking=True)
            self._scatter(layer, slots, part, skip)
            self._landed[layer] = copy = self._event(self._in)
        return Copy(copy, (part,))

    # ---- where the forward is ----

    def wrote(self, layer: int) -> None:
        """K and V of the own tokens of `layer` were launched: reads come after them."""
        self._written[layer] = self._event(self._current())

    def follow(self, layer: int) -> None:
        """What is launched from now on comes after what was written into `layer`."""
        landed = self._landed.get(layer)
        if landed is not None:
            self._current().wait_event(landed)

    def pass_gate(self) -> None:
        """The forward comes to a layer: wait until the device has come to the one before."""
        before, self._passed = self._passed, self._event(self._current())
        if before is not None:
            before.synchronize()

    def catch_up(self) -> None:
        """Wait until the device has come here, too."""
        if self._passed is not None:
            self._passed.synchronize()

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits for it leaves the processor to others
        event.record(stream)
        return event


class CudaGate(LayerGate):
    """Attention passes it before it reads KV of a layer, once or more often, and maybe before it
    has written its own, as FlashInfer does: its own of a layer is there when it comes to the next.
    """

    def __init__(self, pool: Any, rows: CudaRows) -> None:
        self._rows = rows
        self._layer = -1  # that it has come to
        super().__init__(pool)

    def _reach(self, passage: Passage, layer: int) -> None:
        if layer <= self._layer:
            return
        if layer > self._layer + 1:
            raise Broken(f"attention comes to layer {layer} after layer {self._layer}")
        self._rows.pass_gate()
        if layer > 0:
            self._wrote(passage, layer - 1)
        self._layer = layer
        passage.check()
        if not passage.has(layer):
            self._rows.catch_up()
        passage.wait(layer)
        self._rows.follow(layer)

    def __enter__(self) -> None:
        super().__enter__()
        self._layer = -1

    def __exit__(self, *error: object) -> None:
        passage, self._passage = self._passage, None
        if passage is None or error[0] is not None:
            return
        if self._layer != self._rows.layers - 1:  # it has read what may not have come
            raise Broken(f"attention ended with layer {self._layer}")
        self._wrote(passage, self._layer)

    def _wrote(self, passage: Passage, layer: int) -> None:
        self._rows.wrote(layer)
        passage.wrote(layer)
