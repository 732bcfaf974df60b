"""Waits for what has no event, by asking again and again."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0  # for what takes a fraction of a second: machines are busy


def until(condition: Callable[[], Any], what: str, deadline_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails after the deadline. Args: what: is waited for."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.005)
    return value


async def async_until(condition: Callable[[], Any]) -> None:
    """Return when `condition` is true, while the loop goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is polled for has no event
            await asyncio.sleep(0.001)


async def until_deleted(store: Any, key: Any) -> None:
    """Return when `store` has deleted a block in the background."""
    async with asyncio.timeout(PATIENCE_S):
        while await store.contains([key]) != [False]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
