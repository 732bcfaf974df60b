"""Several tiers as the store of a scheduler in virtual time."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

from sglang_cake.stores.base import Store
from sglang_cake.stores.tiers import tier
from sglang_cake.stores.tiers.tiered_store import TieredStore
from sglang_cake.testing.scheduler_loop import SchedulerLoop

T = TypeVar("T")


@contextmanager
def virtual_tiers(
    loop: SchedulerLoop, stores: Sequence[Store], depths: Sequence[int]
) -> Iterator[None]:
    """A context in which `loop` has its blocks in `stores`. Args: depths: as of `Loader`."""
    with mock.patch.object(tier, "run_stoppable", _in_this_thread):
        tiers = TieredStore(stores, block_bytes=8, copy_bytes=64, clock=lambda: loop.io.now_s)
        loop.loader.use(tiers, depths)
        loop.writer.use(tiers)
        yield


async def _in_this_thread(pool: object, work: Callable[[threading.Event], T]) -> T:
    """Copies of a few bytes, which no clock waits for."""
    return work(threading.Event())
