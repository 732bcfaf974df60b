"""The hooks that a part of cake registers, without SGLang's registry."""

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

Hooks = dict[str, Callable[..., Any]]


def hooks_of(install: Callable[[], None]) -> Hooks:
    """What `install` registers, behind the boundary, by the name of SGLang's method."""
    found: Hooks = {}

    def register(target: str, hook: Callable[..., Any], kind: object) -> None:
        found[target.rpartition(".")[2]] = hook

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookRegistry, "register", register)
        patch.setattr(HookRegistry, "apply_hooks", lambda: None)
        install()
    return found
