"""Hooks of cake that raise; a plugin of SGLang, for tests alone.

In the folder that CAKE_TEST_FAULTS names, `order` names a hook as `boundary.BOUNDARY.hooks` does,
and a number N: the Nth call of it from then on takes the order away, writes `reached`, and raises.
With CAKE_TEST_PATIENT, no number of failures switches cake off.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_replaced: set[int] = set()


class Fault(Exception):
    """Raised on purpose."""


def register() -> None:
    folder = os.environ.get("CAKE_TEST_FAULTS")
    if folder is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_cake.integration import boundary

    if "CAKE_TEST_PATIENT" in os.environ:
        boundary.MOST_FAILURES = 10**6
    apply, watch = HookRegistry.apply_hooks, boundary.Boundary.watch

    def apply_hooks() -> None:
        _replace_all(Path(folder))
        apply()

    def watched(*args: Any) -> None:  # by now everything is imported
        _replace_all(Path(folder))
        watch(*args)

    HookRegistry.apply_hooks = apply_hooks  # type: ignore[assignment]
    boundary.Boundary.watch = watched  # type: ignore[method-assign]


def _replace_all(folder: Path) -> None:
    from sglang_cake.integration.boundary import BOUNDARY

    for name, places in BOUNDARY.hooks.items():
        for behind in places:
            if id(behind) not in _replaced:
                _replaced.add(id(behind))
                _replace(behind, name, folder)


def _replace(behind: Any, name: str, folder: Path) -> None:
    own, calls = behind.__wrapped__, 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if (folder / "order").exists():
            wanted, number = (folder / "order").read_text().split()
            calls = calls + 1 if wanted == name else 0
            if calls == int(number):
                calls = 0
                (folder / "order").unlink()
                (folder / "reached").touch()
                raise Fault(name)
        return own(*args, **kwargs)

    _cell(behind, own).cell_contents = faulty


def _cell(behind: Callable[..., Any], own: Callable[..., Any]) -> Any:
    return next(cell for cell in behind.__closure__ if cell.cell_contents is own)  # type: ignore
