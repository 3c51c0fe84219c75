"""A transformers module's own forward with products and means whose bits do not depend on the number of rows.

with RowInvariant("triton"):
    logits = model(input_ids=ids).logits

Vendors' matrix products and PyTorch's reductions choose their order of additions by the number of rows. Inside the block,
whatever module calls them,

* ``F.linear`` with a dense two-dimensional weight, and ``torch.addmm`` as transformers' ``Conv1D`` calls it, are
  ``ops.skinny_linear``;
* a mean over the last dimension, as in RMS norms, is ``ops.row_mean``;
* a batched product whose inner dimension is 1 (rotary tables: frequencies times positions) is a product of broadcast elements.

Everything else passes through. ``F.layer_norm``, ``F.rms_norm`` and ``softmax`` stay PyTorch's, which treat each row by itself; so do
quantized and other layers that multiply without ``F.linear`` or with a weight of a special type. For those, nothing holds but what
``exactness.py`` finds when it probes the model. For inference: the ops have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from specdec_triton import ops

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


class RowInvariant(TorchFunctionMode):
    """See the module. backend: of the ops; with ``torch`` nothing is invariant."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self._backend = backend

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(self._backend, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _linear(backend: str | None, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if not _is_dense(weight) or input.dtype != weight.dtype or input.dim() < 1:
        return NotImplemented
    x = _as_rows(input)
    if x.shape[1] != weight.shape[1]:
        return NotImplemented  # PyTorch's own error
    return ops.skinny_linear(x, weight, bias, backend=backend).view(*input.shape[:-1], len(weight))


def _addmm(backend: str | None, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any) -> Any:
    if options or input.dim() != 1 or mat1.dim() != 2 or mat2.dim() != 2 or len(input) != mat2.shape[1]:
        return NotImplemented
    return _linear(backend, mat1, mat2.t(), input)


def _mean(
    backend: str | None,
    input: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    only = dim[0] if isinstance(dim, Sequence) and len(dim) == 1 else dim
    if options or input.numel() == 0 or input.dim() < 1 or only not in (-1, input.dim() - 1):
        return NotImplemented
    x = input if dtype is None else input.to(dtype)
    if x.dtype not in _FLOATING:
        return NotImplemented
    return ops.row_mean(_as_rows(x), backend=backend).view(*x.shape[:-1], *[1] * keepdim)


def _matmul(backend: str | None, input: torch.Tensor, other: torch.Tensor, **options: Any) -> Any:
    is_outer = input.dim() >= 2 and other.dim() >= 2 and input.shape[-1] == other.shape[-2] == 1
    if options or not is_outer or input.dtype != other.dtype:
        return NotImplemented
    return input * other


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: _addmm,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
}


def _is_dense(weight: torch.Tensor) -> bool:
    """Whether ``ops.skinny_linear`` takes such a weight."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.layout == torch.strided
    return plain and weight.dtype in _FLOATING and weight.dim() == 2 and weight.numel() > 0 and 1 in weight.stride()


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[...,D]`` -> ``[R,D]``, of stride 1 in the last dimension."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
