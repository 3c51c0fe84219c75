"""``rms_norm``: computed in fp32, with one rounding for each tensor that an unfused module would write."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add_one: bool,
    residual: torch.Tensor | None,
    residual_after: bool,
) -> list[torch.Tensor]:
    """The normed rows, and with a residual before the norm their sum; see ``specdec_triton.ops.rms_norm``."""
    scale = weight.float() + 1.0 if add_one else weight.float()

    def norm(h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(h.float(), scale.shape, scale, eps).to(x.dtype).contiguous()

    if residual is None:
        return [norm(x)]
    if residual_after:
        return [(residual + norm(x)).contiguous()]
    total = (x + residual).contiguous()
    return [norm(total), total]
