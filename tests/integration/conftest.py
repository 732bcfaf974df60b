"""What one test makes fail is no matter of the next."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def calm_boundary() -> Iterator[None]:
    """The boundary of a process that has no tree and never failed."""
    pytest.importorskip("sglang")
    from sglang_cake.integration.boundary import BOUNDARY, Boundary

    yield
    BOUNDARY.__dict__.update({**Boundary().__dict__, "hooks": BOUNDARY.hooks})
