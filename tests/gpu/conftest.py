"""Everything here needs a CUDA GPU, and an SGLang that was installed for one."""

from pathlib import Path

import pytest

from sglang_cake.demo.sglang_server import has_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    gpu = has_gpu()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
