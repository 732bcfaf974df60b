"""Parts that SGLang 0.5.23 lacks on a CPU. A plugin of SGLang, used only by tests.

LoRA needs pinned memory, which needs an accelerator; ordinary memory replaces it. For MLA with
`torch_native`, SGLang chooses a prefill path that the backend does not have. It is replaced by the
absorbed path, which attends to the latent KV of the pool. Attention data parallelism pads batches,
and asks the backend for the length of a padded request, which `torch_native` does not say. An actor
of Ray chooses a GPU.
"""

from typing import Any

import torch


def register() -> None:
    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
    torch.cuda.set_device = lambda device: None

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _unpinned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
