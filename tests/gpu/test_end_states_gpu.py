"""End states on a GPU, without SGLang: saved and loaded unharmed, beside forwards.

`tests/integration/test_gpu_check.py` runs the same on a device that is made up. Copies of DSA's and
MiniMax's blocks are in `test_cuda_copies.py`.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.gpu import end_states  # noqa: E402
from benchmarks.gpu.measuring import SMALL, Load  # noqa: E402


@pytest.mark.parametrize("kind", end_states.KINDS)
def test_end_states_on_cuda_are_moved_whole_beside_forwards(kind: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    load = Load(SMALL, torch.cuda.Stream(), device)
    for _ in range(3):
        assert end_states.moved(kind, load, device) == ""
