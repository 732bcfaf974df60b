import pytest

# The contract ships with the package; its asserts should explain themselves as those of tests do.
pytest.register_assert_rewrite("sglang_cake.testing.store_contract")


@pytest.fixture(autouse=True)
def _books_are_waited_for(monkeypatch):
    """However busy the disk is, the first put of a test finds the index open."""
    monkeypatch.setattr("sglang_cake.stores.file.index_supervisor.OPEN_WAIT_S", 60.0)
