"""The launching process hands cake's settings to its children through the environment.

A process may build several engines, one after the other. So the variables written for one engine
are removed before the next is configured, and never count as the user's.
"""

import os

from sglang_cake.core.config import (
    ENABLED_ENV,
    ENVIRONMENT_PREFIX,
    CakeConfig,
    to_environment,
)

# Variables that are handed over now -> (the value written, the user's value or None).
_written: dict[str, tuple[str, str | None]] = {}


def hand_over(config: CakeConfig) -> None:
    """Write the variables that the children read. Replaces an earlier call in this process."""
    withdraw()
    for variable, value in (to_environment(config) | {ENABLED_ENV: "1"}).items():
        _written[variable] = (value, os.environ.get(variable))
        os.environ[variable] = value


def withdraw() -> None:
    """Undo `hand_over`, so that a server without cake inherits nothing."""
    for variable, (value, before) in _written.items():
        if os.environ.get(variable) == value:  # else the user has changed it in the meantime
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
    _written.clear()
    os.environ.pop(ENABLED_ENV, None)


def environment_of_user() -> dict[str, str]:
    """The user's own variables of cake."""
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
    """Whether this process is the child of a launcher that enabled cake."""
    return os.environ.get(ENABLED_ENV) == "1"
