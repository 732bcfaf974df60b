"""The gate of layers on a GPU: copies run on side streams, and events order them with the forward.

    forward    |proj 0| attn 0 |proj 1|    wait     | attn 1 |proj 2| ...
                          \\ event: K and V of layer 0 are written
    out stream             |gather, to pinned memory|                     then it is sent
                                            / event: KV of layer 1 from elsewhere is in the pool
    in stream              | from pinned memory, scatter |

The host launches layers before the device computes them, at most one layer ahead, so that a failure
ends the forward within a layer or two. Before the host waits for KV from elsewhere it waits for the
device, so that only time in which the device is idle counts as waited.
"""

from typing import Any

import torch

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import RunaheadError
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.integration.overlap.layer_gate import LayerGate, Passage, PoolRows


class LayersSkipped(RunaheadError):
    """Attention did not pass the gate at each layer, so a layer was read that may lack KV."""

    reason = "broken"


class CudaRows(PoolRows):
    """`kv_passing.Rows` over a pool on a GPU. It also records where the forward is, on the
    stream that the forward's thread launches on.

    Args:
        on_device: parts come and go in memory of the GPU; otherwise in pinned memory.
    """

    def __init__(self, kv: DeviceKV, *, on_device: bool = False) -> None:
        super().__init__(kv)
        self._on_device = on_device
        self._device = kv.device
        # Of high priority, as those of `CopyStreams`: none of them is one of SGLang's.
        self._in = torch.cuda.Stream(self._device, priority=-1)
        self._out = torch.cuda.Stream(self._device, priority=-1)
        self._written: dict[int, torch.cuda.Event] = {}  # by layer, in this forward
        self._in_pool: dict[
            int, torch.cuda.Event
        ] = {}  # by layer: KV from elsewhere is in the pool
        self._passed: torch.cuda.Event | None = None  # at the layer that the forward reached last

    # ---- copies ----

    def buffer(self, size_bytes: int) -> PartBytes:
        if self._on_device:
            return self._empty(size_bytes)
        with torch.cuda.device(self._device):
            pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]

    def begin(self) -> None:
        self._in.wait_stream(self._current())

    def read(self, layer: int, slots: torch.Tensor, out: PartBytes) -> None:
        with torch.cuda.stream(self._out), torch.inference_mode():
            self._out.wait_event(self._written[layer])
            part = out if self._on_device else self._empty(len(out))
            self._gather(layer, slots, part)
            if not self._on_device:
                torch.frombuffer(out, dtype=torch.uint8).copy_(part, non_blocking=True)
            copy = self._event(self._out)
        copy.synchronize()

    def write(self, layer: int, slots: torch.Tensor, data: PartBytes, skip: int) -> Copy:
        with torch.cuda.stream(self._in), torch.inference_mode():
            part = data if self._on_device else self._empty(len(data))
            if not self._on_device:
                part.copy_(torch.frombuffer(data, dtype=torch.uint8), non_blocking=True)
            self._scatter(layer, slots, part, skip)
            written = self._event(self._in)
            self._in_pool[layer] = written
        return Copy(written, written, (part,))

    # ---- where the forward is ----

    def wrote(self, layer: int) -> None:
        """The writes of K and V of the own tokens of `layer` were launched: reads follow them."""
        self._written[layer] = self._event(self._current())

    def follow(self, layer: int) -> None:
        """Later launches follow the writes into `layer` from elsewhere."""
        written = self._in_pool.get(layer)
        if written is not None:
            self._current().wait_event(written)

    def pass_gate(self) -> None:
        """The forward has reached a layer: wait until the device has reached the one before."""
        before = self._passed
        self._passed = self._event(self._current())
        if before is not None:
            before.synchronize()

    def catch_up(self) -> None:
        """Wait until the device has reached the same layer."""
        if self._passed is not None:
            self._passed.synchronize()

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it yields the processor
        event.record(stream)
        return event


class CudaGate(LayerGate):
    """Attention passes it before it reads KV of a layer, once or more often, and with FlashInfer
    before it has written its own KV of that layer. That is written when it reaches the next layer.
    """

    def __init__(self, pool: Any, rows: CudaRows) -> None:
        self._rows = rows
        self._layer = -1  # that attention has reached
        super().__init__(pool)

    def _reach(self, passage: Passage, layer: int) -> None:
        if layer <= self._layer:
            return
        if layer > self._layer + 1:
            raise LayersSkipped(f"attention comes to layer {layer} after layer {self._layer}")
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
        passage = self.passage
        self.passage = None
        if passage is None or error[0] is not None:
            return
        if self._layer != self._rows.layers - 1:  # a layer was read that may not have come
            raise LayersSkipped(f"attention ended with layer {self._layer}")
        self._wrote(passage, self._layer)

    def _wrote(self, passage: Passage, layer: int) -> None:
        self._rows.wrote(layer)
        passage.wrote(layer)
