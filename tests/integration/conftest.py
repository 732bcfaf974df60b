"""Failures of one test do not count in the next."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def calm_boundary() -> Iterator[None]:
    """The boundary is reset after each test: no tree, no failures."""
    pytest.importorskip("sglang")
    from sglang_cake.integration.boundary import BOUNDARY, Boundary

    yield
    BOUNDARY.__dict__.update({**Boundary().__dict__, "hooks": BOUNDARY.hooks})
