"""What the meet and the planner do for a model without end states, as one number.

End states came later, and servers of plain models must not notice: every plan, every attached span
and every state of a block is the same as before. Prompts are played with numbers of a fixed seed
against costs of all kinds, and what happens is hashed.
"""

import hashlib
import random
from collections.abc import Iterator

import pytest

from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import LoadProgress, Mode, next_step

PROMPTS = 200
MODES: tuple[Mode, ...] = ("auto", "both", "load")
# `load` is that of the code before it had end states. So was `both`, until predictions counted
# landed blocks between holes as computed that are computed sooner than jumped over. `auto` changed
# with that, with steps that do the same, and with a limit of waiting (`patience_s`).
DIGESTS: dict[Mode, str] = {
    "auto": "940c8b413153bfd485d53bf18825393d",
    "both": "d419ad13064834b084f57f041f710673",
    "load": "af059654e54b7984c5de676a3cb1476c",
}


def play(mode: Mode, seed: int) -> Iterator[str]:
    """A prompt from its lookup to its last token: what is decided, and what becomes of the blocks.

    `random()` alone is the same in every version of Python.
    """
    draw = random.Random(seed)

    def below(count: int) -> int:
        return int(draw.random() * count)

    page = (1, 16, 64)[below(3)]
    block = page * (1 + below(4))
    prompt = 2 + below(40 * block)
    meet = Meet(
        block_tokens=block,
        page_tokens=page,
        limit_tokens=prompt - 1 - below(min(4, prompt - 1)),
        prompt_tokens=prompt,
        front=below(prompt // 4 + 1) // page * page,
    )
    share = (1.0, 0.9, 0.5)[below(3)]
    meet.found([draw.random() < share for _ in range(meet.block_count)])
    # A block loads in a hundredth to a hundred times of what computing it takes.
    block_s = block * 0.001 * 10 ** (4 * draw.random() - 2)
    error = draw.random() / 2
    costs = PromptCosts(
        PrefillCost(0.02 * draw.random(), 0.001, 1e-7 * draw.random(), error=error),
        LoadCost(0.01 * draw.random(), block_s, error=error),
    )
    chunk = block * (1 + below(8))
    since_s, begun, load_from = 0.0, False, None
    while meet.front < prompt:
        while (span := meet.island()) is not None:
            meet.attach(span)
            yield f"attach {span.start} {span.stop}"
        if meet.front == prompt:
            break
        progress = LoadProgress(since_s, begun, load_from)
        plan = next_step(meet.view(), mode=mode, chunk_tokens=chunk, costs=costs, progress=progress)
        yield f"plan {plan.stop} {plan.wait} {plan.load_from}"
        step_s = block_s if plan.wait else (plan.stop - meet.front) * 0.001
        load_from = plan.load_from
        if load_from is None:
            meet.give_up()
        if not plan.wait:
            meet.claim(plan.stop)
            yield f"fence {meet.first_loadable}"
        wanted = [
            b
            for b in range(meet.first_loadable, meet.block_count)
            if meet.state(b) is BlockState.WANTED
        ]
        coming = wanted[::-1][: 1 + int(step_s / block_s)]  # from the back
        since_s = 0.0 if coming else since_s + step_s
        for each in coming:
            if draw.random() < 0.05:
                meet.lost(each)
            else:
                begun |= meet.landed(each)
        if draw.random() < 0.02:
            meet.advance(meet.front // 2 // page * page)  # the tree has evicted the rest
        yield f"{meet.front} {meet.first_loadable} {meet.view().states.hex()}"


@pytest.mark.parametrize("mode", MODES)
def test_plain_plans_of_a_fixed_seed_have_the_digest_of_before(mode: Mode) -> None:
    """A changed digest means that models without end states are served otherwise than before.

    If a change was for models with end states, it is a defect. If it was for all models, say in
    CHANGELOG.md what they do otherwise and what was measured, and write the new digest here.
    """
    found = hashlib.sha256()
    for seed in range(PROMPTS):
        for line in play(mode, seed):
            found.update(f"{line}\n".encode())
    assert found.hexdigest()[:32] == DIGESTS[mode]
