"""Hands settings from the launching process to its children, through the environment.

Several engines may be built in one process, one after the other. So variables that were written for
one are removed before the next is configured. Variables that the user set stay.
"""

import os

from sglang_cake.core.config import (
    ENABLED_ENV,
    ENVIRONMENT_PREFIX,
    CakeConfig,
    to_environment,
)

# Variable -> (what we wrote, what stood there before or None), while a hand-over is in force.
_written: dict[str, tuple[str, str | None]] = {}


def hand_over(config: CakeConfig) -> None:
    """Write what the children read. Replaces an earlier hand-over of this process."""
    withdraw()
    for variable, value in (to_environment(config) | {ENABLED_ENV: "1"}).items():
        _written[variable] = (value, os.environ.get(variable))
        os.environ[variable] = value


def withdraw() -> None:
    """Take back what was handed over, so that a server without cake inherits nothing."""
    for variable, (value, before) in _written.items():
        if os.environ.get(variable) == value:  # else the user has changed it since
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
    _written.clear()
    os.environ.pop(ENABLED_ENV, None)


def environment_of_user() -> dict[str, str]:
    """The environment without what `hand_over` wrote."""
    environ = {
        name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)
    }
    for variable, (value, before) in _written.items():
        if environ.get(variable) == value:
            environ.pop(variable, None)
            if before is not None:
                environ[variable] = before
    environ.pop(ENABLED_ENV, None)
    return environ


def is_handed_over() -> bool:
    """Whether cake is on in this process: it is the child of a launcher that enabled it."""
    return os.environ.get(ENABLED_ENV) == "1"
