"""`CakePrefillAdder` over a tree without nodes, with the tokens and slots that a test names."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang_cake.integration.memory.cake_radix_cache import CakeRadixCache
from sglang_cake.integration.scheduler.coordinator import Coordinator
from sglang_cake.integration.scheduler.prefill_adder import CakePrefillAdder


class BareTree(CakeRadixCache):
    """The tree of a coordinator; nothing is ever inserted.

    Attributes:
        saved_end: where the next step of a request must stop.
        state_chunk_tokens: a step that is cut ends at a multiple of so many tokens.
    """

    saved_end: int | None = None
    state_chunk_tokens: int = 1

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def supports_mamba(self) -> bool:
        return False

    def step_stop(self, req: Any) -> int | None:
        return self.saved_end

    def cut_stop(self, req: Any, cut: int) -> int:
        return cut - cut % self.state_chunk_tokens


def prefill_adder(
    scheduler: Any,
    tree: CakeRadixCache,
    *,
    chunk_tokens: int | None,
    slots: int = 100_000,
    batch_is_full: bool = False,
    running: Sequence[Any] = (),
) -> Any:
    """The adder of one step.

    Args:
        chunk_tokens: None: SGLang does not chunk.
        scheduler: what `CakePrefillAdder` uses of SGLang's scheduler.
        running: requests that decode.
    """
    budget = SimpleNamespace(remaining_total=slots, total_offset=0)
    allocator = SimpleNamespace(create_prefill_budget=lambda *args, **kwargs: budget)
    batch = SimpleNamespace(reqs=[*running], batch_is_full=batch_is_full)
    return CakePrefillAdder(
        scheduler,
        page_size=1,
        tree_cache=tree,
        token_to_kv_pool_allocator=allocator,
        running_batch=batch,
        new_token_ratio=1.0,
        rem_input_tokens=1_000_000,
        rem_chunk_tokens=chunk_tokens,
    )
