"""The compiled part of `sglang-kernel`, as far as a plain Llama needs it, in PyTorch.

For a machine whose PyTorch is not the one that `sglang-kernel` was compiled for: copied into the
package `sgl_kernel` without its libraries, this file is what the package loads in their place
(README.md beside it). Slower than the kernels, and for no other kind of model.
"""

import enum
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import library

_OPS = library.Library("sgl_kernel", "FRAGMENT")


def rmsnorm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool
) -> None:
    """`out` becomes `x`, normalized over its last dimension, times `weight`."""
    del enable_pdl
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * scale * weight.float())


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool
) -> None:
    """`residual` becomes the sum of both, and `x` the sum, normalized."""
    residual.add_(x)
    rmsnorm(x, residual, weight, eps, enable_pdl)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: the memory of a CUDA graph lives longer than it must."""
    return tensor.view_as(tensor)


def _define(schema: str, function: Callable[..., object]) -> None:
    _OPS.define(schema)
    _OPS.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


_define("rmsnorm(Tensor! out, Tensor x, Tensor weight, float eps, bool pdl) -> ()", rmsnorm)
_define(
    "fused_add_rmsnorm(Tensor! x, Tensor! residual, Tensor weight, float eps, bool pdl) -> ()",
    fused_add_rmsnorm,
)
_define("weak_ref_tensor(Tensor(a) tensor) -> Tensor(a)", weak_ref_tensor)

# A fused MLP of small batches, for which SGLang 0.5.23 compiles a kernel with `nvidia-cutlass-dsl`
# (not on such a machine either). With this in its place, models compute the MLP in parts.
_dual_gemm = ModuleType("sglang.kernels.ops.gemm.cutedsl_dual_gemm")
vars(_dual_gemm).update(
    MAX_DUAL_GEMM_DECODE_TOKENS=0,
    DualGemmQuantMode=enum.Enum("DualGemmQuantMode", ["UNQUANT"]),
    can_use_dual_gemm=lambda *args: False,
)
sys.modules[_dual_gemm.__name__] = _dual_gemm
