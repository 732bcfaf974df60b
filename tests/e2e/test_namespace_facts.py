"""Every fact that changes what KV bytes mean makes another namespace; no server is needed."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_cake.layout import BlockLayout

LAYOUT = BlockLayout(4, (("k", (2, 32)), ("v", (2, 32))), "float32", 64)


def _digest(layout: BlockLayout = LAYOUT, **changed: Any) -> bytes:
    from sglang_cake.adapter.identity import namespace_of

    facts: dict[str, Any] = {
        "model_path": "/models/m",
        "dtype": "torch.float32",
        "config": {"rope_theta": 10000.0},
        "page_size": 1,
        "tp_rank": 0,
        "tp_size": 1,
        "quantization": None,
        "weights": "w",
        "weight_version": "default",
        "codec": "raw",
        **changed,
    }
    config = SimpleNamespace(to_dict=lambda: facts["config"])
    ctx = SimpleNamespace(
        server_args=SimpleNamespace(quantization=facts["quantization"]),
        model_config=SimpleNamespace(
            model_path=facts["model_path"], dtype=facts["dtype"], hf_text_config=config
        ),
        params=SimpleNamespace(page_size=facts["page_size"], pp_rank=0, pp_size=1),
        tp_rank=facts["tp_rank"],
        tp_size=facts["tp_size"],
    )
    return namespace_of(
        ctx,
        layout,
        weights=facts["weights"],
        weight_version=facts["weight_version"],
        codec=facts["codec"],
    ).digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "torch.bfloat16"},
        {"config": {"rope_theta": 20000.0}},
        {"page_size": 16},
        {"tp_rank": 1},
        {"tp_size": 2},
        {"quantization": "fp8"},
        {"weights": "w2"},
        {"weight_version": "step-2"},
        {"codec": "int8"},
        {"layout": replace(LAYOUT, dtype="bfloat16")},
        {"layout": replace(LAYOUT, block_tokens=128)},
        {"layout": replace(LAYOUT, layers=5)},
        {"layout": replace(LAYOUT, parts=(("kv", (1, 96)),))},
    ],
    ids=str,
)
def test_a_changed_fact_is_another_namespace(changed: dict[str, Any]) -> None:
    assert _digest() == _digest()
    assert _digest(**changed) != _digest()


def test_one_changed_weight_is_another_digest(adapters: dict[str, Path], tmp_path: Path) -> None:
    from sglang_cake.adapter.identity import weights_digest

    copy = tmp_path / "copy"
    shutil.copytree(adapters["a"], copy)
    before = weights_digest(str(copy))
    assert before == weights_digest(str(adapters["a"]))
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    file = other / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert weights_digest(str(other)) != before
