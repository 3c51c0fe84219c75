"""The ops that make a pass's rows independent of one another, bit for bit: products and means."""

from __future__ import annotations

import torch

from specdec_triton._checks import check_activation, check_floating, check_tensor, require
from specdec_triton._library import register, resolve_backend

_skinny_linear = register(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str backend) -> Tensor",
    fake=lambda x, weight, bias, residual: x.new_empty((x.shape[0], weight.shape[0])),
)
_gated_linear = register(
    "gated_linear(Tensor x, Tensor weight, Tensor? bias, str activation, str backend) -> Tensor",
    fake=lambda x, weight, bias, activation: x.new_empty((x.shape[0], weight.shape[0] // 2)),
)
_row_mean = register(
    "row_mean(Tensor x, str backend) -> Tensor",
    fake=lambda x: x.new_empty((x.shape[0],)),
)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias + residual``, in Triton with bits that depend on a row, its residual, the weight and the bias alone.

    Made for few rows, as decoding and verifying have them: then it takes the time to read the weight. Any number works.

    Args:
        x: ``[M,K]``, of any row stride.
        weight: ``[N,K]``, of x's dtype, as it lies in the module: of stride 1 in its last dimension (``nn.Linear``) or in its
            first (transformers' ``Conv1D``, passed as ``weight.t()``).
        bias: ``[N]``, of x's dtype.
        residual: ``[M,N]``, of x's dtype and any row stride.

    Returns:
        ``[M,N]`` in x's dtype, added up in fp32 and rounded once, in Triton after the residual was added too.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.

    The ``torch`` backend is the vendor's product, whose bits may depend on M, and rounds it before it adds the residual.

    Example:
        >>> skinny_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([0.5, 0.0])).tolist()
        [[11.5, 2.0]]
    """
    _check_product(x, weight, bias)
    if residual is not None:
        check_tensor("residual", residual, (x.shape[0], weight.shape[0]), x)
        require(residual.dtype == x.dtype, "residual", f"of x's dtype {x.dtype}", residual.dtype)
        check_floating("residual", residual)
    return _skinny_linear(x, weight, bias, residual, resolve_backend(backend, "skinny_linear", x))


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> torch.Tensor:
    """``act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``: the first half of a gated MLP, in Triton in one launch.

    There, a row's bits depend on the row, the weight and the bias alone, and they are those of ``skinny_linear`` and then
    ``gated_mlp_activation`` (unless I is so small and K so long that ``skinny_linear`` cuts K into parts).

    Args:
        x: ``[M,K]``, of any row stride.
        weight: ``[2I,K]``, of x's dtype: the rows of the gate, then those of up; strides as ``skinny_linear`` takes them.
        bias: ``[2I]``, of x's dtype, in the same order.
        activation: ``silu``, ``gelu_tanh`` or ``gelu`` (by erf).

    Returns:
        ``[M,I]`` in x's dtype: both products added up in fp32 and rounded, then their activation and product in fp32, rounded once.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or an unknown activation.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv:2002.05202).

    Example:
        >>> gated_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[30.0, 0.0], [0.0, 4.0]])).tolist()  # silu(30) is 30
        [[240.0]]
    """
    _check_product(x, weight, bias)
    rows = weight.shape[0]
    require(rows % 2 == 0, "weight", "of an even number of rows: the gate's, then as many of up", rows)
    check_activation(activation)
    return _gated_linear(x, weight, bias, activation, resolve_backend(backend, "gated_linear", x))


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
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
