"""``row_mean``: the mean of each row, added in fp32."""

from __future__ import annotations

import torch


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """``[R]`` in x's dtype; see ``specdec_triton.ops.row_mean``."""
    return x.mean(-1, dtype=torch.float32).to(x.dtype)
