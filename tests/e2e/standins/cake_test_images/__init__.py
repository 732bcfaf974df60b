"""Images and videos for servers of models that see, without torchvision, which has no build for a
PyTorch of CPUs. A plugin of SGLang, used only by tests.

The processor of media is replaced, and nothing else: `seeded.py` makes features from a number. The
model's folder then needs a tokenizer alone.
"""

import os
from typing import Any


def register() -> None:
    if os.environ.get("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE") != __name__:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.utils.hf_transformers.processor.get_processor", _tokenizer, HookType.AROUND
    )


def _tokenizer(original: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.utils.hf_transformers import get_tokenizer

    return get_tokenizer(path)
