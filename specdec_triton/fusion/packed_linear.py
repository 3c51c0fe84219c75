"""Linear layers for CPU decoding: half-precision weights packed once for FBGEMM, activations and products in fp32.

PyTorch multiplies bf16 natively only on CPUs with AVX-512 BF16 or AMX; elsewhere a pass of K+1 rows costs almost K+1
times a pass of one row, and speculation cannot pay. FBGEMM's kernels (Khudia et al. 2021) read fp16 weights at
memory speed for up to a handful of rows on any AVX2 machine. Weights are exact in fp16 or the layer is left alone, and
activations stay fp32 from layer to layer: the results are more accurate than half-precision arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_TOLERANCE = 2.0**-24  # of the largest weight: below the rounding of one fp32 addition


def can_pack(weight: torch.Tensor) -> bool:
    """Whether fp16 holds the weights: every one, up to 2^-24 of the largest."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16) or weight.dim() != 2:
        return False
    if not hasattr(torch.ops.quantized, "linear_prepack_fp16"):
        return False
    weight = weight.detach()
    largest = float(weight.abs().max())
    if not 0 < largest <= torch.finfo(torch.float16).max:
        return False
    return all(
        float((rows.float() - rows.half().float()).abs().max()) <= _TOLERANCE * largest for rows in weight.split(4096)
    )


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference, fp32 in and out; keeps the packed weights alone.

    Args:
        weight: ``[out,in]`` bf16 or fp16, with ``can_pack(weight)``.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float(), None if bias is None else bias.detach().float()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weights, for code that inspects a layer's dtype, device or shape."""
        return torch.ops.quantized.linear_unpack_fp16(self._packed)[0].to(self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"
