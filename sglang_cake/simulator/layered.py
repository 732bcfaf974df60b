"""When a step is over whose layers wait each for its own KV (docs/theory.md)."""

from collections.abc import Callable

from sglang_cake.simulator.speed_trace import Speed


def layered_end_s(
    begin_s: float, work_s: float, layers: int, device: Speed, there_s: Callable[[float], float]
) -> float:
    """When a step that begins at `begin_s` is over: each layer begins when the one before is
    computed and its own part of what is on its way is there.

    Args:
        work_s: of all layers together, each the same, at the full speed of the device.
        there_s: `(share)` is when the first `share` of what is on its way is there; layer i of L
            needs the first (i + 1) / L.
    """
    at_s = begin_s
    for layer in range(layers):
        at_s = device.done_s(max(at_s, there_s((layer + 1) / layers)), work_s / layers)
    return at_s
