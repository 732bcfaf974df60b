"""Makes functions behind the boundary raise."""

from collections.abc import Callable
from typing import Any


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
