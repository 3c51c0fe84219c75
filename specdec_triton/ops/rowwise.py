"""The row-wise ops between the products of a decoder layer, each one launch: RMS norms with their sums, and gated activations."""

from __future__ import annotations

import math
from typing import Any

import torch

from specdec_triton._checks import check_activation, check_bool, check_floating, check_rows, check_tensor, require
from specdec_triton._library import register, resolve_backend


def _rms_norm_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add_one: bool,
    residual: torch.Tensor | None,
    residual_after: bool,
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 if residual is None or residual_after else 2)]


_rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps, bool add_one, Tensor? residual, bool residual_after, str backend) -> Tensor[]",
    fake=_rms_norm_fake,
)
_gated_mlp_activation = register(
    "gated_mlp_activation(Tensor gate_up, str activation, str backend) -> Tensor",
    fake=lambda gate_up, activation: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    add_one: bool = False,
    residual: torch.Tensor | None = None,
    residual_after: bool = False,
    backend: str | None = None,
) -> Any:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, with the sum that a decoder layer has before it or after it.

    In Triton one launch, in which a row's bits depend on the row alone.

    Args:
        x: ``[...,H]``, such as hidden states ``[N,H]`` or the heads ``[N,heads,D]`` of a packed product, of any strides but for the
            last.
        weight: ``[H]``, of any of the three dtypes.
        eps: at least 0.
        add_one: the factor is 1 + weight (Gemma).
        residual: of x's shape and dtype, added before the norm, or after it if ``residual_after`` (Gemma 2 and 3).

    Returns:
        Without a residual the norm, of x's shape and dtype, contiguous, computed in fp32 and rounded once. With one, the pair
        (norm of the sum, sum): the sum is rounded to x's dtype, and that is what the norm sees. With ``residual_after`` the sum
        of residual and norm, the norm rounded before: what a module writes that does one after the other.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, an eps below 0, ``residual_after`` without a residual.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization (arXiv:1910.07467).

    Example:
        >>> rms_norm(torch.tensor([[3.0, 3.0, -3.0]]), torch.tensor([1.0, 2.0, 1.0]), eps=0.0).tolist()
        [[1.0, 2.0, -1.0]]
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 3.0]])
        >>> [y.tolist() for y in rms_norm(x, torch.tensor([1.0, 0.5]), eps=0.0, residual=residual)]
        [[[1.0, 0.5]], [[4.0, 4.0]]]
    """
    check_rows("x", x)
    check_tensor("weight", weight, (x.shape[-1],), x)
    check_floating("weight", weight)
    is_number = isinstance(eps, int | float) and not isinstance(eps, bool)
    require(is_number and 0 <= eps < math.inf, "eps", "a finite number of at least 0", repr(eps))
    check_bool("add_one", add_one)
    check_bool("residual_after", residual_after)
    if residual is not None:
        check_tensor("residual", residual, tuple(x.shape), x)
        require(residual.dtype == x.dtype, "residual", f"of x's dtype {x.dtype}", residual.dtype)
        check_floating("residual", residual)
    require(residual is not None or not residual_after, "residual", "given with residual_after", None)
    backend = resolve_backend(backend, "rms_norm", x)
    out = _rms_norm(x, weight, float(eps), add_one, residual, residual_after, backend)
    return out[0] if len(out) == 1 else (out[0], out[1])


def gated_mlp_activation(
    gate_up: torch.Tensor, *, activation: str = "silu", backend: str | None = None
) -> torch.Tensor:
    """``act(gate) * up`` of a gated MLP's packed product.

    Args:
        gate_up: ``[...,2I]``: the gate's I outputs, then those of up; rows of any stride.
        activation: ``silu``, ``gelu_tanh`` or ``gelu`` (by erf).

    Returns:
        ``[...,I]`` in gate_up's dtype, contiguous, computed in fp32 and rounded once.

    Raises:
        ValueError: an odd or empty last dimension, a dtype or strides that do not fit, an unknown activation.

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv:2002.05202).

    Example:
        >>> gated_mlp_activation(torch.tensor([[30.0, 0.0, 2.0, 5.0]])).tolist()  # silu(30) is 30
        [[60.0, 0.0]]
    """
    check_rows("gate_up", gate_up)
    require(gate_up.shape[-1] % 2 == 0, "gate_up", "of shape [...,2I]", list(gate_up.shape))
    check_activation(activation)
    backend = resolve_backend(backend, "gated_mlp_activation", gate_up)
    return _gated_mlp_activation(gate_up, activation, backend)
