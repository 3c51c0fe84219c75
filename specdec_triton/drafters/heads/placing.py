"""Layers of a head on the target's device: in its dtype, on a CPU packed like an optimized target's."""

from __future__ import annotations

import torch
from torch import nn

from specdec_triton.adapter import ModelAdapter
from specdec_triton.fusion.norms import FusedRMSNorm
from specdec_triton.fusion.packed_linear import best_packing


def copied(weight: torch.Tensor, bias: torch.Tensor | None, target: ModelAdapter) -> nn.Linear:
    """A linear layer of those numbers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(target.device, target.dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(target.device, target.dtype), requires_grad=False)
    return layer


def packed(module: nn.Module) -> bool:
    """Pack the module's linear layers, if it is on a CPU where that is faster; whether it was done. Activations are fp32 then."""
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if not linears or linears[0].weight.device.type != "cpu":
        return False
    packing = best_packing(linears)
    if packing is None or not all(packing.can_pack(linear.weight) for linear in linears):
        return False
    done = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                if child not in done:
                    done[child] = packing(child.weight, child.bias)
                    done[child].input_dtype = torch.float32
                setattr(parent, name, done[child])
            elif isinstance(child, FusedRMSNorm):
                child.float()
    return True
