"""One prompt on a virtual clock: a server with nothing else to do."""

from collections.abc import Callable

from sglang_cake.loading.planner import Mode, Step, next_step
from sglang_cake.simulator.machine import Knowledge, Machine
from sglang_cake.simulator.race_records import Lap, Prompt, Race
from sglang_cake.simulator.simulated_server import serve

__all__ = ["Knowledge", "Lap", "Machine", "Race", "run_race"]


def run_race(
    machine: Machine,
    prompt_tokens: int,
    *,
    chunk_tokens: int,
    block_tokens: int = 128,
    mode: Mode = "auto",
    stored_blocks: int | None = None,
    knowledge: Knowledge | None = None,
    rule: Callable[..., Step] = next_step,
) -> Race:
    """Restore a prompt of which the first `stored_blocks` full blocks (None: all) are stored."""
    server = serve(
        machine,
        [Prompt(prompt_tokens, stored_blocks=stored_blocks)],
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        mode=mode,
        knowledge=knowledge,
        rule=rule,
    )
    return server.races[0]
