"""How the launching process tells its children what cake was asked to do: the environment.

Several engines may be built in one process, one after the other, so that what is written for one
is taken back before the next is looked at: what the user set in the environment stays, what cake
wrote there does not count as the user's.
"""

import os

from sglang_cake.config import (
    CONFIG_ENV,
    ENABLED_ENV,
    ENVIRONMENT_PREFIX,
    CakeConfig,
    to_environment,
)

# Variable -> (what we wrote, what stood there before), while a hand-over is in force. None: unset.
_written: dict[str, tuple[str | None, str | None]] = {}


def hand_over(config: CakeConfig) -> None:
    """Write what the children read. Replaces an earlier hand-over of this process."""
    withdraw()
    # All settings are in `config` by now: a child must not read the user's file once more.
    ours: dict[str, str | None] = {CONFIG_ENV: None}
    ours |= to_environment(config)
    ours[ENABLED_ENV] = "1"
    for variable, value in ours.items():
        _written[variable] = (value, os.environ.get(variable))
        _put(variable, value)


def withdraw() -> None:
    """Take back what was handed over, so that a server without cake inherits nothing."""
    for variable, (value, before) in _written.items():
        if os.environ.get(variable) == value:  # else the user has changed it since
            _put(variable, before)
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
    return environ


def is_handed_over() -> bool:
    """Whether cake is on in this process: it is the child of a launcher that enabled it."""
    return os.environ.get(ENABLED_ENV) == "1"


def _put(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
