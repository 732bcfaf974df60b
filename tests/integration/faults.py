"""Makes functions behind the boundary raise, and copies to the device."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from sglang_cake.integration.memory.copier import Copier, SlotCopy
from sglang_cake.integration.memory.kv_pool import Copy, DeviceKV
from sglang_cake.loading.loader import HostBlock


class Fault(Exception):
    """Raised on purpose."""


def replace(guarded: Callable[..., Any], make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace the function of ours that `guarded` calls by `make(own)`."""
    own: Any = guarded.__wrapped__  # type: ignore[attr-defined]
    for cell in guarded.__closure__ or ():  # type: ignore[attr-defined]
        if cell.cell_contents is own:
            cell.cell_contents = make(own)
            return
    raise AssertionError(f"{guarded} does not call what it wraps")


class FaultyCopier(Copier):
    """Copies of chosen blocks, and of end blocks, go wrong.

    Attributes:
        errors: contents of a block -> what the launch of its next copy raises.
        error_under_way: what a copy that was launched raises.
        held: contents of the blocks that the copier gets to when nobody waits for them any more.
        launched: contents of the blocks that were copied.
    """

    def __init__(self, kv: DeviceKV) -> None:
        super().__init__(kv, patience_s=0.0)
        self.errors: dict[bytes, Exception] = {}
        self.error_under_way: Exception | None = None
        self.held: set[bytes] = set()
        self.launched: list[bytes] = []
        self._late: list[Callable[[], None]] = []

    def load(self, copy: SlotCopy, staged: HostBlock) -> None:
        data, later, kv = bytes(staged.buffer.view), super().load, copy.kv

        def launch(*args: Any) -> Copy:
            if error := self.errors.pop(data, None):
                raise error
            self.launched.append(data)
            return kv.load(*args)

        made: Any = SimpleNamespace(load=launch)
        copy.kv = made
        if data in self.held:
            self._late.append(lambda: later(copy, staged))
        else:
            later(copy, staged)

    def check(self) -> None:
        error = self.error_under_way
        self.error_under_way = None
        if error is not None:
            raise error
        super().check()

    def wait_launched(self, launches: "Sequence[Future[Copy]]") -> list[Copy | None]:
        copies = super().wait_launched(launches)
        while self._late:
            self._late.pop()()
        return copies
