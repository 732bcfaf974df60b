import pytest

# The contract ships with the package; its asserts should explain themselves as those of tests do.
pytest.register_assert_rewrite("sglang_cake.testing.store_contract")

from filestore import waiting_for_the_index  # noqa: E402


@pytest.fixture(autouse=True)
def _index_is_waited_for():
    """However busy the disk is, the first put of a test finds the index open."""
    with waiting_for_the_index(60.0):
        yield
