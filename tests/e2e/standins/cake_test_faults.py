"""Makes hooks of cake raise. A plugin of SGLang, used only by tests.

The file `order` in the folder CAKE_TEST_FAULTS holds the name of a hook, as in
`boundary.BOUNDARY.hooks`, and a number N. The Nth call of the hook from then on removes the file,
writes the file `reached`, and raises. With CAKE_TEST_PATIENT, no number of failures switches cake
off.
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
    apply = HookRegistry.apply_hooks
    set_handler = boundary.Boundary.set_handler

    def apply_hooks() -> None:
        _replace_all(Path(folder))
        apply()

    def replace_and_set(*args: Any) -> None:  # when this is called, everything is imported
        _replace_all(Path(folder))
        set_handler(*args)

    HookRegistry.apply_hooks = apply_hooks  # type: ignore[assignment]
    boundary.Boundary.set_handler = replace_and_set  # type: ignore[method-assign]


def _replace_all(folder: Path) -> None:
    from sglang_cake.integration.boundary import BOUNDARY

    for name, functions in BOUNDARY.hooks.items():
        for guarded in functions:
            if id(guarded) not in _replaced:
                _replaced.add(id(guarded))
                _replace(guarded, name, folder)


def _replace(guarded: Any, name: str, folder: Path) -> None:
    own = guarded.__wrapped__
    calls = 0

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

    _cell(guarded, own).cell_contents = faulty


def _cell(guarded: Callable[..., Any], own: Callable[..., Any]) -> Any:
    return next(cell for cell in guarded.__closure__ if cell.cell_contents is own)  # type: ignore
