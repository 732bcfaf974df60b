"""Hooks into SGLang's scheduler, in processes of their own."""

import os
import sys
from pathlib import Path

import pytest
from warm import run_forked

pytest.importorskip("sglang")

SHUFFLE = """
import random, sys
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_cake.integration.scheduler import scheduler_hooks

scheduler_hooks.install()
HookRegistry.apply_hooks()
random.seed(42)  # as SGLang does on each rank
for _ in range(int(sys.argv[1])):
    random.random()
for _ in range(3):
    queue = [*range(9)]
    SchedulePolicy._sort_randomly(queue)
    print(queue)
"""


def test_random_policy_rank_whose_libraries_draw_numbers_shuffles_as_the_others(
    tmp_path: Path,
) -> None:
    program = tmp_path / "shuffle.py"
    program.write_text(SHUFFLE)

    def rank(drawn: int) -> list[str]:
        command = [sys.executable, str(program), str(drawn)]
        done = run_forked(command, dict(os.environ), tmp_path, timeout_s=180)
        assert done.returncode == 0, done.stdout
        return [line for line in done.stdout.splitlines() if line.startswith("[")]

    orders = rank(0)
    assert len({*orders}) == 3
    assert {*map(len, orders)} == {len(str([*range(9)]))}
    assert rank(1) == orders
