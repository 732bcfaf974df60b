"""What `sglang-cake demo` does to the folder that it is given."""

import argparse
import json
from pathlib import Path

import pytest

from sglang_cake.cli import demo
from sglang_cake.core.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def test_demo_leaves_what_its_folder_held_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the store of a server."""
    kept = tmp_path / "out" / "store" / "block"
    kept.parent.mkdir(parents=True)
    kept.write_text("of a server")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(demo, "make_prompt", lambda *args, **options: ([1] * 4096, False))
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args = [
        "demo",
        "--model",
        str(model),
        "--store",
        "file:///dev/null/x",
        "--out",
        str(kept.parents[1]),
    ]
    with pytest.raises(ConfigError, match="/dev/null"):  # after all else was prepared
        demo.run(parser.parse_args(args))
    assert kept.read_text() == "of a server"
    assert [path.name for path in kept.parents[1].iterdir()] == ["store"]
