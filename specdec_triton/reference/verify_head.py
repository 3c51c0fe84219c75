"""``verify_head``: the logits, and ``accept_reject`` on them."""

from __future__ import annotations

import torch

from specdec_triton.reference.accept_reject import accept_reject
from specdec_triton.reference.head_stats import head_logits


def verify_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_lse: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens ``[B,K+1]``, num_accepted ``[B]``, status ``[B]``; see ``specdec_triton.ops.verify_head``."""
    logits = head_logits(hidden, weight, bias, scale, softcap)
    one, off = torch.ones_like(temperature), torch.zeros_like(temperature)
    filters = (off.int(), one, off, None)
    return accept_reject(
        draft_tokens, logits, draft_logits, draft_lse, draft_lens, temperature, *filters, seed, position, False, method, 0.0, 0.0
    )  # fmt: skip
