"""``gated_linear``: PyTorch's own product, then the activation of its rounded halves."""

from __future__ import annotations

import torch

from specdec_triton.reference.gated_mlp_activation import gated_mlp_activation


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``[M,I]``; see ``specdec_triton.ops.gated_linear``."""
    return gated_mlp_activation(torch.nn.functional.linear(x, weight, bias), activation)
