"""Hooks into SGLang's scheduler, in processes of their own."""

import subprocess
import sys

import pytest

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


def test_random_policy_rank_whose_libraries_draw_numbers_shuffles_as_the_others() -> None:
    def rank(drawn: int) -> str:
        command = [sys.executable, "-c", SHUFFLE, str(drawn)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    orders = rank(0).splitlines()
    assert len({*orders}) == 3
    assert {*map(len, orders)} == {len(str([*range(9)]))}
    assert rank(1).splitlines() == orders
