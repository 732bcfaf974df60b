"""A real server on a GPU: SGLang's own choice of attention, and FlashInfer; all three arms, also
with pages and fp8 KV."""

import random
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_cake.demo.models import build_llama
from sglang_cake.demo.sglang_server import Reply, SglangServer, flush_cache, generate

TOKENS = 6000
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    return build_llama(folder, hidden=512, layers=8, heads=8, kv_heads=2, dtype="bfloat16")


def _prompt() -> list[int]:
    source = random.Random(1)
    return [source.randrange(256) for _ in range(TOKENS)]


def _ask(
    model: Path, folder: Path, mode: str, extra: tuple[str, ...], backend: str | None
) -> list[Reply]:
    """The stored prompt twice, each time with an empty tree. Args: backend: of attention; None:
    SGLang's own choice."""
    flags = (
        *("--enable-cake", "--cake-store", f"file://{folder}/store?bandwidth=200MB/s"),
        *("--cake-mode", mode, "--chunked-prefill-size", "512", "--max-total-tokens", "32768"),
        *("--mem-fraction-static", "0.3", *extra),
    )
    with SglangServer(
        model,
        flags,
        env=STRICT,
        log=folder / f"{mode}.log",
        gpu=True,
        start_timeout_s=1800,  # the first server compiles kernels
        attention_backend=backend,
    ) as server:
        replies = []
        for _ in range(2):
            flush_cache(server.base_url)
            replies.append(generate(server.base_url, _prompt(), max_new_tokens=8))
        flush_cache(server.base_url)
        assert "leak detected" not in server.logs().lower()
    return replies


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", [None, "flashinfer"])
@pytest.mark.parametrize("extra", [(), ("--page-size", "64"), ("--kv-cache-dtype", "fp8_e4m3")])
def test_gpu_server_all_modes_give_equal_first_tokens(
    model: Path, tmp_path: Path, extra: tuple[str, ...], backend: str | None
) -> None:
    cold, computed = _ask(model, tmp_path, "compute", extra, backend)
    assert cold.output_ids == computed.output_ids
    assert computed.cake["loaded_tokens"] == 0
    for mode in ("load", "both"):
        for reply in _ask(model, tmp_path, mode, extra, backend):
            assert reply.cake["loaded_tokens"] > 0
            # bfloat16 at other chunk borders may tip a close call late; the first must not differ.
            assert reply.output_ids[:2] == cold.output_ids[:2]
