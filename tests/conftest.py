"""Settings for all tests."""

from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# `pytest --hypothesis-profile=hours --timeout=0 tests/store/test_fuzz_*.py
# tests/store/http/test_http_hostile.py` looks for hours.
settings.register_profile("hours", max_examples=100_000, print_blob=True)
