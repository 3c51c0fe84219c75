"""``gated_mlp_activation``: PyTorch's own activations, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "gelu": F.gelu,
}


def gated_mlp_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``[...,I]``; see ``specdec_triton.ops.gated_mlp_activation``."""
    gate, up = gate_up.float().chunk(2, -1)
    return (_ACTIVATIONS[activation](gate) * up).to(gate_up.dtype).contiguous()
