"""``skinny_linear``: PyTorch's own product. Its rounding may depend on the number of rows; the kernel's does not."""

from __future__ import annotations

import torch


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """``[M,N]``; see ``specdec_triton.ops.skinny_linear``. A residual is added to the rounded product, as modules do."""
    out = torch.nn.functional.linear(x, weight, bias)
    return (out if residual is None else out + residual).contiguous()
