"""A run of CI is never green because something was not installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOUNDARY = Path(__file__).parent
TESTS = {
    "test_missing.py": """
        import pytest
        def test_one(): pytest.skip("nginx is not installed: apt-get install nginx-light")
        @pytest.mark.skipif(True, reason="fio is not installed")
        def test_two(): pass
        def test_three(): pytest.importorskip("no_such_module")
    """,
    "test_missing_file.py": """
        import pytest
        pytest.skip("Mooncake cannot be loaded: no libibverbs", allow_module_level=True)
    """,
    "test_allowed.py": """
        import pytest
        @pytest.mark.skip(reason="no CUDA GPU")
        def test_one(): pass
        @pytest.mark.xfail(reason="not installed")
        def test_two(): assert False
    """,
}


FAILED = "2 failed, 1 skipped, 1 xfailed, 2 errors"


@pytest.mark.parametrize(
    ("value", "workers", "status", "said"),
    [("1", "0", 1, FAILED), ("1", "2", 1, FAILED), ("", "0", 0, "5 skipped, 1 xfailed")],
)
def test_no_skips_setting_fails_tests_that_would_be_skipped(tmp_path, value, workers, status, said):
    shutil.copy(BOUNDARY / "conftest.py", tmp_path)
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text.replace("\n        ", "\n"))
    options = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-n", workers)
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", *options), str(tmp_path)],
        env=os.environ | {"CAKE_NO_SKIPS": value},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == status


def test_ci_run_forbids_skips_and_installs_the_packages():
    ci = BOUNDARY.parent / ".ci"
    assert "export CAKE_NO_SKIPS=1" in (ci / "run").read_text()
    packages = (ci / "packages").read_text().split()
    assert {"fio", "libibverbs1", "libnuma1", "mount", "nginx-light", "openssl"} <= set(packages)
