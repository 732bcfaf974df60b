"""Every error of the package."""


class CakeError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(CakeError):
    """A user's mistake. The message is one line and says what to do; exit status 2."""


class PatchError(CakeError):
    """A CPU repair does not fit the installed SGLang. The message is one line; exit status 2."""


class OverlapError(CakeError):
    """KV for an overlapped last step did not arrive in time: it is computed. `reason` labels the
    metrics."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunaheadError(CakeError):
    """The members of a KV-Runahead group cannot go on with a prompt: its owner computes what is
    missing. `reason` labels the metrics."""

    reason = "error"


class StoreError(CakeError):
    """A store could not do what it was asked: a reader computes the block. `reason` labels the
    metrics."""

    reason = "error"


class BlockMissing(StoreError):
    """The store does not have the block."""

    reason = "missing"


class BlockCorrupt(StoreError):
    """The stored bytes failed a check; the store sets them aside, or removes them."""

    reason = "corrupt"


class StoreUnavailable(StoreError):
    """The store did not answer."""

    reason = "unavailable"


class StoreFull(StoreError):
    """The store has no room for the block, now."""

    reason = "full"


MAX_TEXT_CHARS = 300  # of others' text in a message


def one_line(text: object) -> str:
    """Untrusted text for a message: short, and without control characters."""
    words = " ".join(str(text)[: 4 * MAX_TEXT_CHARS].split())
    return "".join(letter for letter in words if letter.isprintable())[:MAX_TEXT_CHARS]
