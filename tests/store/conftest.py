import pytest

# The contract ships with the package; its asserts should explain themselves as those of tests do.
pytest.register_assert_rewrite("sglang_cake.testing.store_contract")
