"""Nothing here is slow, and nothing needs SGLang."""

from collections.abc import Iterator

import pytest
from members import WAIT_S

from sglang_cake.runahead import transport, zeromq


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Who dies here closes its connections; who is silent, or takes nothing, waits for a core."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(zeromq, "SILENCE_S", WAIT_S)
        patch.setattr(transport, "SEND_TIMEOUT_S", WAIT_S)
        yield
