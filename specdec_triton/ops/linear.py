"""The ops that make a pass's rows independent of one another, bit for bit: products and means."""

from __future__ import annotations

import torch

from specdec_triton._checks import check_floating, check_tensor, require
from specdec_triton._library import register, resolve_backend

_skinny_linear = register(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, str backend) -> Tensor",
    fake=lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
)
_row_mean = register(
    "row_mean(Tensor x, str backend) -> Tensor",
    fake=lambda x: x.new_empty((x.shape[0],)),
)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``, in Triton with bits that depend on a row, the weight and the bias alone.

    Made for few rows, as decoding and verifying have them: then it takes the time to read the weight. Any number works.

    Args:
        x: ``[M,K]``, of any row stride.
        weight: ``[N,K]``, of x's dtype, as it lies in the module: of stride 1 in its last dimension (``nn.Linear``) or in its
            first (transformers' ``Conv1D``, passed as ``weight.t()``).
        bias: ``[N]``, of x's dtype.

    Returns:
        ``[M,N]`` in x's dtype, added up in fp32 and rounded once.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.

    The ``torch`` backend is the vendor's product, whose bits may depend on M.

    Example:
        >>> skinny_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([0.5, 0.0])).tolist()
        [[11.5, 2.0]]
    """
    check_tensor("x", x, (None, None))
    check_floating("x", x)
    width = x.shape[1]
    require(width >= 1, "x", "of shape [M,K] with K >= 1", list(x.shape))
    check_tensor("weight", weight, (None, width), x)
    require(weight.shape[0] >= 1, "weight", "of shape [N,K] with N >= 1", list(weight.shape))
    require(weight.dtype == x.dtype, "weight", f"of x's dtype {x.dtype}", weight.dtype)
    dense = any(size == 1 or stride == 1 for size, stride in zip(weight.shape, weight.stride(), strict=True))
    require(dense, "weight", "of stride 1 in one of its dimensions", list(weight.stride()))
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), x)
        require(bias.dtype == x.dtype, "bias", f"of x's dtype {x.dtype}", bias.dtype)
        check_floating("bias", bias)
    return _skinny_linear(x, weight, bias, resolve_backend(backend, "skinny_linear", x))


def row_mean(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """The mean of each row, in Triton with bits that depend on the row alone.

    Args:
        x: ``[R,D]``, of any row stride.

    Returns:
        ``[R]`` in x's dtype, added up in fp32 and rounded once.

    Raises:
        ValueError: not a floating-point tensor ``[R,D]`` with D >= 1 and stride 1 in its last dimension.

    Example:
        >>> row_mean(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).tolist()
        [1.5, 4.0]
    """
    check_tensor("x", x, (None, None))
    check_floating("x", x)
    require(x.shape[1] >= 1, "x", "of shape [R,D] with D >= 1", list(x.shape))
    return _row_mean(x, resolve_backend(backend, "row_mean", x))
