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


@pytest.mark.timeout(1800)
def test_gpu_server_last_step_begins_before_the_last_blocks_land(
    model: Path, tmp_path: Path
) -> None:
    """The answer is that of computing; `auto` loads, since the link is quick enough."""
    document = _prompt()
    flags = (
        *("--enable-cake", "--cake-store", f"file://{tmp_path}/store?bandwidth=400MB/s"),
        *("--chunked-prefill-size", "1024", "--max-total-tokens", "32768"),
        *("--mem-fraction-static", "0.3", "--attention-backend", "flashinfer"),
        *("--cuda-graph-backend-prefill", "disabled", "--dtype", "bfloat16"),
    )
    overlapped = 0
    with SglangServer(model, flags, env=STRICT, log=tmp_path / "auto.log", gpu=True) as server:
        for turn in range(12):
            source = random.Random(100 + turn)
            asked = document + [source.randrange(256) for _ in range(900)]
            flush_cache(server.base_url)
            reply = generate(server.base_url, asked, max_new_tokens=8)
            again = generate(server.base_url, asked, max_new_tokens=8)  # from the tree
            assert again.output_ids[:2] == reply.output_ids[:2]
            overlapped += int(reply.cake["overlapped_tokens"])
        flush_cache(server.base_url)
        assert "leak detected" not in server.logs().lower()
        assert "last step once more" not in server.logs()
    assert overlapped > 0
