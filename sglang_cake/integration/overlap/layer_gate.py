"""Copies rows of one layer into and out of SGLang's KV pool, and lets a forward wait at each layer.

KV-Runahead and overlapped last steps use it to bring KV of a layer into the pool before attention
reads it, and to take KV out as soon as it is written.

On a GPU, copies run on side streams, and events order them with the forward:

    forward    |proj 0| attn 0 |proj 1|    wait     | attn 1 |proj 2| ...
                          \\ event: K and V of layer 0 are written
    out stream             |gather, to pinned memory|                     then it is sent
                                            / event: KV of layer 1 from elsewhere is in the pool
    in stream              | from pinned memory, scatter |

The host launches layers before the device computes them, at most one layer ahead, so that a failure
ends the forward within a layer or two. Before the host waits for KV from elsewhere it waits for the
device, so that only time in which the device is idle counts as waited.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from sglang_cake.core.buffers import PartBytes
from sglang_cake.core.errors import CakeError, ConfigError, RunaheadError
from sglang_cake.integration.boundary import BOUNDARY
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV, copying_thread

if TYPE_CHECKING:
    from sglang_cake.runahead.kv_passing import KvPassing

_HOOK = "LayerGate.wait_until"
BOUNDARY.hooks[_HOOK] = []


class PoolRows:
    """`kv_passing.Rows` over a pool in CPU memory. Every copy is complete when the call returns.

    Slots are int64 tensors.

    Args: kv: of a pool with equal layers, a row for each slot. Raises: ConfigError for others.
    """

    def __init__(self, kv: DeviceKV) -> None:
        if not kv.layout.is_plain:
            raise ConfigError("KV-Runahead needs equal layers: remove --cake-runahead-peers")
        (group,) = kv.layout.groups
        self._planes = len(group.parts)
        self._rows = kv.rows
        self._plane_bytes = group.part_bytes
        self.layers = group.layers
        self.token_bytes = sum(self._plane_bytes)

    def buffer(self, size_bytes: int) -> PartBytes:
        return memoryview(bytearray(size_bytes))

    def begin(self) -> None:
        pass

    def read(self, layer: int, slots: torch.Tensor, out: PartBytes) -> None:
        with torch.inference_mode():
            self._gather(layer, slots, torch.frombuffer(out, dtype=torch.uint8))

    def write(self, layer: int, slots: torch.Tensor, data: PartBytes, skip: int) -> Any:
        with torch.inference_mode():
            self._scatter(layer, slots, torch.frombuffer(data, dtype=torch.uint8), skip)
        return Copy()

    def _gather(self, layer: int, slots: torch.Tensor, part: torch.Tensor) -> None:
        for rows, plane in self._planes_of(layer, part):
            torch.index_select(rows, 0, slots, out=plane)

    def _scatter(self, layer: int, slots: torch.Tensor, part: torch.Tensor, skip: int) -> None:
        for rows, plane in self._planes_of(layer, part):
            rows.index_copy_(0, slots, plane[skip : skip + len(slots)])

    def _planes_of(
        self, layer: int, part: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's planes in the pool, and in a part (uint8 `[bytes]`), in the same words."""
        tokens = part.numel() // self.token_bytes
        first = layer * self._planes
        offset = 0
        for rows, token_bytes in zip(
            self._rows[first : first + self._planes], self._plane_bytes, strict=True
        ):
            size = tokens * token_bytes
            yield rows, part[offset : offset + size].view(rows.dtype).view(tokens, -1)
            offset += size


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
        self._in_pool: dict[int, torch.cuda.Event] = {}  # by layer: KV from elsewhere is there
        self._passed: torch.cuda.Event | None = None  # at the layer that the forward reached last

    # ---- copies ----

    def buffer(self, size_bytes: int) -> PartBytes:
        if self._on_device:
            return self._empty(size_bytes)
        with copying_thread(self._device):
            pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]

    def begin(self) -> None:
        self._in.wait_stream(self._current())

    def read(self, layer: int, slots: torch.Tensor, out: PartBytes) -> None:
        with copying_thread(self._device), torch.cuda.stream(self._out):
            self._out.wait_event(self._written[layer])
            part = out if self._on_device else self._empty(len(out))
            self._gather(layer, slots, part)
            if not self._on_device:
                torch.frombuffer(out, dtype=torch.uint8).copy_(part, non_blocking=True)
            self._event(self._out).synchronize()

    def write(self, layer: int, slots: torch.Tensor, data: PartBytes, skip: int) -> Any:
        with copying_thread(self._device), torch.cuda.stream(self._in):
            part = data if self._on_device else self._empty(len(data))
            if not self._on_device:
                part.copy_(torch.frombuffer(data, dtype=torch.uint8), non_blocking=True)
            self._scatter(layer, slots, part, skip)
            written = self._in_pool[layer] = self._event(self._in)
        return _PartCopy(self._device, written, part)

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


class _PartCopy(NamedTuple):
    """A part on its way into the pool. `part` must live until that copy is complete."""

    device: torch.device
    event: torch.cuda.Event
    part: torch.Tensor

    def wait(self) -> None:
        """Block the calling thread until the copy is complete."""
        with copying_thread(self.device):
            self.event.synchronize()


class Passage(Protocol):
    """KV that a forward needs from elsewhere, layer by layer (`KvPassing`, `StreamedBlocks`). The
    forward's own tokens are those that it computes. An exception of `reach` ends the forward.
    """

    def reach(self, layer: int) -> None:
        """The forward has written K and V of its own tokens of `layer`. Return when the KV of all
        tokens before them is in the pool."""
        ...


class LayerGate:
    """A layer-transfer counter for SGLang's pool. Attention calls it when it has written K and V of
    its own tokens of a layer, and before it reads any, once or more often, as the `torch_native`
    backend does. One forward runs at a time.

    `with gate(passage):` runs a forward with that passage.

    Args: layers: of the pool. A forward that does not come to all of them, in order, fails.

    Attributes:
        passage: the passage of the forward that runs; None: it has none.
    """

    def __init__(self, pool: Any, layers: int) -> None:
        self.consumer_index = -1  # SGLang's counters have it; it is not used here
        self.passage: Passage | None = None
        self._layers = layers
        self._layer = -1  # that attention has reached
        pool.register_layer_transfer_counter(self)

    def wait_until(self, layer: int) -> None:
        """Called by the pool. Raises: OverlapError or RunaheadError, which leave the forward. Other
        exceptions of the passage become a RunaheadError, so that they are known as cake's there."""
        passage = self.passage
        if passage is None or layer <= self._layer:
            return
        if layer > self._layer + 1:
            raise LayersSkipped(f"attention comes to layer {layer} after layer {self._layer}")
        self._layer = layer
        try:
            self._reach(passage, layer)
        except CakeError:
            raise
        except Exception as error:
            BOUNDARY.failed(_HOOK, error, rid="")
            raise RunaheadError(f"layer {layer}: {error!r}") from error

    def _reach(self, passage: Passage, layer: int) -> None:
        passage.reach(layer)

    @contextmanager
    def __call__(self, passage: Passage) -> Iterator[None]:
        self.passage = passage
        self._layer = -1
        try:
            yield
        finally:
            self.passage = None
        if self._layer != self._layers - 1:
            raise LayersSkipped(f"attention ended with layer {self._layer}")


class CudaGate(LayerGate):
    """Attention passes it with FlashInfer before it has written its own KV of that layer. That is
    written when it reaches the next layer.

    Its passages are those of KV-Runahead: overlapped last steps run on a CPU alone.
    """

    def __init__(self, pool: Any, rows: CudaRows) -> None:
        self._rows = rows
        super().__init__(pool, rows.layers)

    def _reach(self, passage: Passage, layer: int) -> None:
        self._rows.pass_gate()
        passing = cast("KvPassing", passage)
        if layer > 0:
            self._wrote(passing, layer - 1)
        passing.check()
        if not passing.has(layer):
            self._rows.catch_up()
        passing.wait(layer)
        self._rows.follow(layer)

    @contextmanager
    def __call__(self, passage: Passage) -> Iterator[None]:
        with super().__call__(passage):
            yield
        self._wrote(cast("KvPassing", passage), self._rows.layers - 1)

    def _wrote(self, passing: "KvPassing", layer: int) -> None:
        self._rows.wrote(layer)
        passing.wrote(layer)


def gated(kv: DeviceKV, pool: Any, *, on_device: bool) -> tuple[PoolRows, LayerGate]:
    """The rows of a pool by layer, and its layer gate. Called once for a pool.

    Args: on_device: KV is received and sent in GPU memory. No effect on a CPU.
    """
    if kv.device.type == "cpu":
        plain = PoolRows(kv)
        return plain, LayerGate(pool, plain.layers)
    rows = CudaRows(kv, on_device=on_device)
    return rows, CudaGate(pool, rows)
