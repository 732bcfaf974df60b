"""Settings for all tests."""

import ast
import asyncio
import gc
import os
import re
import threading

import pytest
from hypothesis import HealthCheck, settings

from sglang_cake.demo.sglang_server import temporary_files_in

# All that is imported and collected stays. Looking for garbage in it takes most of a second, again
# and again.
gc.disable()

_parse, _parsing = ast.parse, threading.RLock()
os.register_at_fork(
    before=_parsing.acquire, after_in_parent=_parsing.release, after_in_child=_parsing.release
)


def _parse_without_collection(*args, **kwargs):
    """`ast.parse`, during which nothing else parses.

    Before 3.11.8, Python fails with "AST constructor recursion depth mismatch" if a finalizer or
    another thread parses while a tree is built (CPython issue 106905); formatting a traceback
    parses. Only a collection of garbage lets them run there.
    """
    with _parsing:
        collects = gc.isenabled()
        gc.disable()
        try:
            return _parse(*args, **kwargs)
        finally:
            if collects:
                gc.enable()


ast.parse = _parse_without_collection

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

# `pytest --hypothesis-profile=hours --timeout=0 tests/stores/test_fuzz_*.py
# tests/stores/http/test_http_hostile.py` looks a hundred times as much: about an hour on two cores.
settings.register_profile("hours", max_examples=10_000, print_blob=True)

# .ci/run sets it where all of .ci/packages is installed: a test that finds something missing is a
# failure then, and no reason to skip it. Without a GPU, where nothing may be mounted, or where
# something is certain in one mode only, tests are skipped as ever.
NO_SKIPS = "CAKE_NO_SKIPS"
MISSING = re.compile(r"not installed|cannot be loaded|could not import")

# `make test` has several workers of pytest-xdist. A unit's tests run in one of them, in order, so
# that they share what they start: a unit is a file, but these files share servers, and tests/gpu a
# GPU.
SHARED = "tests/e2e/"
SHARING = {
    f"tests/e2e/test_{name}.py"
    for name in (
        "cached_tokens",
        "endpoints",
        "exactness",
        "life_and_death",
        "not_enabled",
        "sglang_kits",
        "store_swap",  # only to see that a server without an admin key refuses
    )
}
GPU = "tests/gpu/"
LONG = ("tests/stores/http/test_remote_faults.py", "tests/test_benchmarks.py")


def _unit(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file in SHARING:
        return SHARED
    return GPU if file.startswith(GPU) else file


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory):
    """Where servers and clients find the secrets that they make, not the developer's own; and where
    programs leave temporary files, for pytest to remove."""
    temporary = temporary_files_in(tmp_path_factory.mktemp("t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            patch.setenv(name, temporary[name])
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False  # by the number of tests; here the order is kept
    return ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """What takes long first, so that no worker is left alone with it at the end."""
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (
                _unit(item.nodeid) != SHARED,
                SHARED not in item.nodeid,
                not item.nodeid.startswith(LONG),
            )
        )


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain about what they find alive at the end


def pytest_runtest_setup():
    # SGLang's modules make uvloop the loop of their process when they are imported.
    asyncio.set_event_loop_policy(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _judged((yield))


def _judged(report):
    """A report of a test, or of a file of tests, that was skipped because something is missing."""
    if os.environ.get(NO_SKIPS) == "1" and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if MISSING.search(reason):
            report.outcome, report.longrepr = "failed", f"{NO_SKIPS}=1, and {reason}"
    return report
