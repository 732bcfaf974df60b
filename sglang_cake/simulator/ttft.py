"""What the stored blocks of a prompt save of its time to first token."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_cake.loading.cost_model import PrefillCost
from sglang_cake.stores.eviction.benefit import Benefit


@dataclass(frozen=True, slots=True)
class Shape:
    """A model on a machine with a link to its store."""

    name: str
    prefill: PrefillCost
    load_s_per_token: float

    def benefit(self, block_tokens: int) -> Benefit:
        """The same for the `cake` policy."""
        return Benefit(
            block_tokens,
            self.prefill.token_s,
            self.prefill.pair_s,
            self.load_s_per_token * block_tokens,
        )


class SavedTime:
    """Time to first token, and what is saved of it, for prompts of one block size.

    The prompt is computed from the front, block by block, while its stored blocks land from the
    back; what has landed is skipped, and what lands before it could be computed is waited for.
    Not in it: the wait for other requests, the fixed part of a step, half a step lost at the meet.
    """

    def __init__(self, shape: Shape, block_tokens: int) -> None:
        self._shape, self._block_tokens = shape, block_tokens
        self._load_s = shape.load_s_per_token * block_tokens
        self._compute_s: list[float] = []

    def saved_s(self, stored: Sequence[bool], tokens: int) -> float:
        """Args: stored: which of the prompt's blocks are; tokens: of the prompt."""
        compute_s = self._costs(len(stored), tokens)
        left = sum(stored)
        now_s = 0.0
        for there, cost_s in zip(stored, compute_s, strict=True):
            if there:
                lands_s = left * self._load_s
                left -= 1
                if lands_s <= now_s + cost_s:
                    now_s = max(now_s, lands_s)
                    continue
            now_s += cost_s
        return sum(compute_s) - now_s

    def block_s(self, blocks: int, tokens: int) -> list[float]:
        """What computing each of them costs."""
        return self._costs(blocks, tokens)

    def _costs(self, blocks: int, tokens: int) -> list[float]:
        size = self._block_tokens
        while len(self._compute_s) < blocks:
            position = len(self._compute_s)
            self._compute_s.append(self._span_s(position * size, (position + 1) * size))
        costs = self._compute_s[:blocks]
        if costs:
            costs[-1] = self._span_s((blocks - 1) * size, min(tokens, blocks * size))
        return costs

    def _span_s(self, start: int, stop: int) -> float:
        step_s = self._shape.prefill.step_s(start, stop)
        return step_s - self._shape.prefill.fixed_s if stop > start else 0.0


def _dense(
    name: str,
    *,
    parameters: float,
    hidden: int,
    layers: int,
    flops: float,
    kv_bytes: int,
    link: int,
) -> Shape:
    """A dense transformer: 2 FLOPs per parameter and token, 4 x hidden per layer and pair.

    Args: flops: that prefill reaches, a second; kv_bytes: per token; link: bytes a second.
    """
    prefill = PrefillCost(0.0, 2 * parameters / flops, 4 * hidden * layers / flops)
    return Shape(name, prefill, kv_bytes / link)


# Half of the peak of an A100 (312 TFLOP/s) in prefill; KV in 16 bits, 8 heads of 128.
SHAPES = {
    shape.name: shape
    for shape in (
        _dense(
            "8b",  # Llama-3.1-8B on one A100, a 32 Gbit/s link: the Cake paper's middle setting
            parameters=8e9,
            hidden=4096,
            layers=32,
            flops=156e12,
            kv_bytes=2 * 32 * 8 * 128 * 2,
            link=4 * 10**9,
        ),
        _dense(
            "70b",  # Llama-3.1-70B on eight A100, a 10 Gbit/s link
            parameters=70e9,
            hidden=8192,
            layers=80,
            flops=8 * 140e12,
            kv_bytes=2 * 80 * 8 * 128 * 2,
            link=1_250_000_000,
        ),
    )
}
