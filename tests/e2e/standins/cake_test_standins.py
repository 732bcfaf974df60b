"""What SGLang 0.5.23 lacks on a CPU, and only these tests need; a plugin of SGLang.

LoRA asks for pinned memory, which needs an accelerator: ordinary memory does as well here. MLA
under `torch_native` is sent to a prefill path which that backend does not have: the absorbed path,
which attends to the latent KV of the pool, works.
"""

from typing import Any

import torch


def register() -> None:
    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]

    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _unpinned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
