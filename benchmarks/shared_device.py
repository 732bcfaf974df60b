"""SGLang's own launcher, on a device of which one prompt has a share and others have the rest.

    BENCH_SHARE_FILE=share python -m benchmarks.shared_device --model-path ...

As Cake's papers share a GPU: of every step's 512 tokens the prompt gets its share, and prompts that
are made up for that take the rest. The share stands in the file and is read before every step, so
one server serves all shares; what SGLang and Cake take for `--chunked-prefill-size` is set to it.

What the others' tokens cost is really computed, by the layers of the model that is served: as a new
prompt each step, of which nothing is kept. While the prompt waits for its loads the others' steps
go on, one after the other, and the prompt's next step begins when theirs is over. Steps that only
decode, and an idle server, are left alone.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

SHARE_ENV = "BENCH_SHARE_FILE"
STEP_TOKENS = 512


def own_tokens(share: float) -> int:
    """Of a step, for the prompt; at least one."""
    return max(1, min(STEP_TOKENS, round(share * STEP_TOKENS)))


@torch.no_grad()
def compute(model: Any, tokens: int) -> torch.Tensor:
    """What a step does to the first tokens of a prompt, but for norms and the cache.

    Args: model: SGLang's Llama. Returns: hidden states, `[tokens, hidden]`.
    """
    ids, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    hidden: torch.Tensor = model.embed_tokens(ids)
    for layer in model.layers:
        attention = layer.self_attn
        parts = attention.forward_prepare_native(positions, hidden)
        heads = (part.view(tokens, -1, attention.head_dim).transpose(0, 1) for part in parts)
        seen = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        hidden = hidden + attention.o_proj(seen.transpose(0, 1).reshape(tokens, -1))[0]
        hidden = hidden + layer.mlp(hidden)
    return hidden


class Others:
    """Takes the rest of the steps. Scheduler thread."""

    def __init__(self, share_file: Path) -> None:
        self._file = share_file
        self.tokens = 0  # of others, in a step

    def install(self, scheduler_class: Any) -> None:
        """Replace three methods of the scheduler."""
        plain_next, plain_run = scheduler_class.get_next_batch_to_run, scheduler_class.run_batch
        plain_idle = scheduler_class.on_idle

        def get_next_batch_to_run(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.share(scheduler)
            return plain_next(scheduler, *args, **kwargs)

        def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_extend():
                self.step(scheduler)  # first: whoever is in a step has its result at the end
            return plain_run(scheduler, batch, *args, **kwargs)

        def on_idle(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler.waiting_queue or scheduler.chunked_req is not None:
                self.step(scheduler)
            plain_idle(scheduler, *args, **kwargs)

        scheduler_class.get_next_batch_to_run = get_next_batch_to_run
        scheduler_class.run_batch = run_batch
        scheduler_class.on_idle = on_idle

    def share(self, scheduler: Any) -> None:
        """Give the prompt what the file says of the next step."""
        own = own_tokens(float(self._file.read_text()))
        if own + self.tokens == STEP_TOKENS and scheduler.chunked_prefill_size == own:
            return
        self.tokens = STEP_TOKENS - own
        scheduler.chunked_prefill_size = own
        coordinator = getattr(scheduler.tree_cache, "coordinator", None)
        if coordinator is not None:
            coordinator.step_costs.chunk_tokens = own

    def step(self, scheduler: Any) -> None:
        """Compute the others' part of a step."""
        if self.tokens:
            self.compute(scheduler.tp_worker.model_runner.model.model)

    def compute(self, model: Any) -> None:
        """Compute so many tokens with SGLang's model."""
        compute(model, self.tokens)


# SGLang starts its processes with "spawn", which imports the main module again under this name.
if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.managers.scheduler import Scheduler

    Others(Path(os.environ[SHARE_ENV])).install(Scheduler)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
