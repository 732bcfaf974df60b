"""Waits for what has no event, by asking again and again."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_cake.core.errors import StoreFull, StoreUnavailable

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


async def async_answer(call: Callable[[], Awaitable[Any]]) -> Any:
    """The first true answer of a call that a store may refuse until then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreFull, StoreUnavailable):
                if answer := await call():
                    return answer
            await asyncio.sleep(0.01)


async def until_deleted(store: Any, key: Any) -> None:
    """Return when `store` has deleted a block in the background."""

    async def gone() -> bool:
        return await store.contains([key]) == [False]

    await async_answer(gone)
