"""Nothing here is slow, and nothing needs SGLang."""

from collections.abc import Iterator

import pytest

from sglang_cake.runahead import tcp


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Who dies here closes its connections; who is silent waits for a core."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(tcp, "SILENCE_S", 60.0)
        yield
