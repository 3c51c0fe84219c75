"""``sample_head``: the logits, and ``sample`` on them."""

from __future__ import annotations

import torch

from specdec_triton.reference.head_stats import head_logits
from specdec_triton.reference.sample import sample


def sample_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    node: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 ``[B]`` and the log-sum-exp fp32 ``[B]``; see ``specdec_triton.ops.sample_head``."""
    logits = head_logits(hidden, weight, bias, scale, softcap)
    one, off = torch.ones_like(temperature), torch.zeros_like(temperature)
    return sample(logits, temperature, off.int(), one, off, None, seed, position, False, node)
