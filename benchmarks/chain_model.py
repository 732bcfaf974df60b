"""A model of the chain in time: when each worker computes, sends and waits, layer by layer.

Worker j computes layer l in two parts. The first part is the projections of its own tokens; then
its own K and V of that layer exist. The second part is the rest (attention, output projection,
MLP), which also needs K and V of all earlier tokens. K and V are sent as soon as they exist:
received ones at once, own ones after the projections. A link carries one of them at a time, in the
order in which they are ready. So (paper 4.1, Figures 3 b and 5; layer l of worker j):

    projected[j, l] = done[j, l - 1] + projections
    done[j, l]      = max(projected[j, l], received[j, l]) + rest
    received[j + 1, l] = when link j has carried received[j, l] (S_j tokens) and projected[j, l]

TTFT is `done[last, last layer]` plus a fixed time. Two baselines have the same terms: tensor and
sequence parallelism with an even split and a blocking all-gather (TSP, the paper's baseline), and
zigzag sequence parallelism with kernels that skip masked pairs, today's baseline. All take many
partitions at once, in NumPy.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_cake.core.keys import Span
from sglang_cake.runahead.partition import Partition, StepSeconds, balanced

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Worker:
    """The time of one worker for a forward over `c` tokens on top of `s`.

    `fixed_s + max(floor_s, token_s * c + pair_s * pairs)`, spread evenly over the layers. Pairs are
    `c * (s + c)`, since the kernel computes masked pairs too; with `causal`, `c * (s + c / 2)`.
    """

    layers: int
    token_s: float
    pair_s: float
    floor_s: float = 0.0  # time to launch a forward's kernels, however few the tokens
    fixed_s: float = 0.0
    causal: bool = False
    projections: float = 0.25  # share of `token_s` before K and V exist: 3 h^2 of 12 h^2 in Llama

    def pairs(self, start: Floats, tokens: Floats) -> Floats:
        """(query, key) pairs that the kernel computes."""
        return tokens * (start + (tokens / 2 if self.causal else tokens))

    def step_s(self, start: float, stop: float) -> float:
        """Seconds of one forward over `[start, stop)`: the cost function of `partition`."""
        tokens = stop - start
        pairs = float(self.pairs(np.float64(start), np.float64(tokens)))  # type: ignore[arg-type]
        return self.fixed_s + max(self.floor_s, self.token_s * tokens + self.pair_s * pairs)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A link between neighbours.

    `blocking` follows the paper's pseudo-code (Table 5): a layer is sent in one piece, received and
    own parts together, and the sender waits until it is sent. Otherwise, as in our chain, each part
    is sent as soon as it exists, and the sender does not wait.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    blocking: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """A partition of the front. The loader's part begins at `partition.bounds[-1]`."""

    partition: Partition
    finish_s: float  # when the slowest worker and the loader have ended


@dataclass(frozen=True, slots=True)
class ChainTimes:
    """Times in seconds; arrays are `[workers, layers, candidates]`."""

    started: Floats  # a layer's projections
    projected: Floats
    resumed: Floats  # all K and V for attention have arrived
    done: Floats
    received: Floats  # 0 for the first worker
    sent: Floats  # sending of a layer began; the last worker sends nothing: 0
    ttft_s: Floats  # [candidates]


def run_chain(
    partitions: Sequence[Partition] | npt.NDArray[np.int64],
    worker: Worker,
    link: ChainLink,
    kv_token_bytes: float,
    *,
    slowdown: Floats | None = None,
) -> ChainTimes:
    """Times of a chain for partitions of one prompt among equally many workers.

    Args:
        partitions: or their bounds, int64 `[candidates, workers + 1]`.
        kv_token_bytes: K and V of one token over all layers.
        slowdown: `[workers - 1, layers]`, how many times longer a link takes for that layer.
    """
    if isinstance(partitions, np.ndarray):
        bounds = partitions.T.astype(np.float64)
    else:
        bounds = np.array([p.bounds for p in partitions], dtype=np.float64).T
    workers, layers = len(bounds) - 1, worker.layers
    shape = (workers, layers, bounds.shape[1])
    started, projected, resumed, done, received, sent = (np.zeros(shape) for _ in range(6))
    for j in range(workers):
        start, tokens = bounds[j], bounds[j + 1] - bounds[j]
        first_s, rest_s = _layer_parts(worker, start, tokens)
        free = np.zeros(bounds.shape[1])
        before = np.zeros(bounds.shape[1])
        for layer in range(layers):
            started[j, layer] = before
            projected[j, layer] = before + first_s
            resumed[j, layer] = np.maximum(projected[j, layer], received[j, layer])
            done[j, layer] = before = resumed[j, layer] + rest_s
            if j + 1 == workers:
                continue
            slow = 1.0 if slowdown is None else float(slowdown[j, layer])
            per_token_s = slow * kv_token_bytes / layers / link.bytes_per_s
            parts = [
                (received[j, layer], (start - bounds[0]) * per_token_s),
                (projected[j, layer], tokens * per_token_s),
            ]
            sent[j, layer], free = _carry(parts, free, link)
            received[j + 1, layer] = free + link.latency_s
            if link.blocking:
                resumed[j, layer] = free
                done[j, layer] = before = free + rest_s
    return ChainTimes(
        started, projected, resumed, done, received, sent, done[-1, -1] + worker.fixed_s
    )


def chain_ttft(
    partition: Partition,
    worker: Worker,
    link: ChainLink,
    kv_token_bytes: float,
    *,
    slowdown: Floats | None = None,
) -> float:
    """TTFT of one partition."""
    times = run_chain([partition], worker, link, kv_token_bytes, slowdown=slowdown)
    return float(times.ttft_s[0])


def sequence_parallel_ttft(
    tokens: int,
    workers: int,
    worker: Worker,
    link: ChainLink,
    kv_token_bytes: float,
    *,
    zigzag: bool = False,
    slowdown: Floats | None = None,
) -> float:
    """TTFT of an even split with a blocking all-gather of K and V in every layer.

    Args:
        zigzag: each worker has an early and a late part of the prompt, and kernels skip masked
            pairs, so that all compute half of the square; otherwise TSP: the whole square.
        slowdown: `[workers, layers]`; all workers wait for the slowest link of a ring.
    """
    own = tokens / workers
    pairs = own * tokens * (0.5 if zigzag else 1.0)
    compute_s = max(worker.floor_s, worker.token_s * own + worker.pair_s * pairs)
    gather_s = (workers - 1) * (own * kv_token_bytes / worker.layers / link.bytes_per_s)
    gather_s += (workers - 1) * link.latency_s
    slow = np.ones(worker.layers) if slowdown is None else slowdown.max(axis=0)
    return float(worker.fixed_s + compute_s + (gather_s * slow).sum())


def with_loader(
    span: Span,
    workers: int,
    step_s: StepSeconds,
    load_token_s: float,
    *,
    page_tokens: int = 1,
    block_tokens: int = 1,
) -> Shared:
    """The chain computes `[span.start, x)` while the loader loads `[x, span.stop)`.

    docs/theory.md, `C(x)/p = l (n - x)`: the better one of the two x between whose finishes the
    chain overtakes the loader.

    Args:
        span: all of it is stored.
        step_s: as of `partition`; links between workers take no time.
        load_token_s: seconds per token of the loader, at least 0.
        block_tokens: the loader loads whole blocks, counted from the start.
    """

    def bound(blocks: int) -> int:
        return min(span.start + blocks * block_tokens, span.stop)

    def chain(blocks: int) -> tuple[Partition, float]:
        front = balanced(Span(span.start, bound(blocks)), workers, step_s, page_tokens=page_tokens)
        return front, max(step_s(*each) for each in front.spans)

    def load_s(blocks: int) -> float:
        return load_token_s * (span.stop - bound(blocks))

    def is_slower(blocks: int) -> bool:
        return chain(blocks)[1] >= load_s(blocks)

    def until(blocks: int) -> Shared:
        front, chain_s = chain(blocks)
        return Shared(front, max(chain_s, load_s(blocks)))

    every = range(1, -(-span.tokens // block_tokens) + 1)
    first = every[bisect_left(every, True, key=is_slower)]
    return min((until(n) for n in (first - 1, first) if n), key=lambda shared: shared.finish_s)


def lower_bound(workers: int) -> float:
    """TTFT(p) / TTFT(1) if attention were the only cost: equation 2.

    It assumes an even split with a balanced load, and no split has both: the best possible is 2 to
    3 % more (docs/theory.md#kv-runahead).
    """
    return (1 / workers + 1 / workers**2) / 2


def traffic_tokens(partition: Partition) -> int:
    """Tokens whose K and V cross a link, summed over all links: equation 6 for any partition."""
    return sum(bound - partition.bounds[0] for bound in partition.bounds[1:-1])


def all_gather_tokens(tokens: int, workers: int) -> int:
    """The same for TSP and zigzag: equation 5."""
    return (workers - 1) * tokens


def _layer_parts(worker: Worker, start: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    """Seconds of a layer's projections, and of its rest."""
    linear = worker.token_s * tokens
    whole = np.maximum(worker.floor_s, linear + worker.pair_s * worker.pairs(start, tokens))
    # Where launching dominates, the projections have their share of the launches.
    computed = np.maximum(linear + worker.pair_s * worker.pairs(start, tokens), 1e-30)
    first = whole * worker.projections * linear / computed
    return first / worker.layers, (whole - first) / worker.layers


def _carry(
    parts: list[tuple[Floats, Floats]], free: Floats, link: ChainLink
) -> tuple[Floats, Floats]:
    """When a link that is free from `free` on begins and ends to carry two parts (ready, takes).

    The part that is ready first is carried first.
    """
    (ready_a, takes_a), (ready_b, takes_b) = parts
    ready_a = np.where(takes_a > 0, ready_a, ready_b)  # the first worker received nothing
    if link.blocking:
        began = np.maximum(free, np.maximum(ready_a, ready_b))
        return began, began + takes_a + takes_b
    a_first = ready_a <= ready_b
    earlier, later = np.minimum(ready_a, ready_b), np.maximum(ready_a, ready_b)
    began = np.maximum(free, earlier)
    middle = began + np.where(a_first, takes_a, takes_b)
    return began, np.maximum(middle, later) + np.where(a_first, takes_b, takes_a)
