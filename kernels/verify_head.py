"""``verify_head``: the head's product and the decision on it, without logits in memory.

Two launches where q is one-hot: the logits' statistics (``head_stats.py``) and the decision (``accept_stats.py``).

With draft logits the residual of a rejected draft needs a whole row of p, known only after the decision. Computing that row again
would read the weight twice; its logits are far fewer bytes, so there they are written, for ``accept_reject`` to judge.
"""

from __future__ import annotations

import torch

from specdec_triton.kernels.accept_reject import accept_reject
from specdec_triton.kernels.accept_stats import accept_stats
from specdec_triton.kernels.head_stats import head_stats
from specdec_triton.kernels.skinny_linear import skinny_linear


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
    if draft_logits is not None:
        batch, rows, width = hidden.shape
        logits = skinny_linear(hidden.reshape(batch * rows, width), weight, bias, None).view(batch, rows, len(weight))
        if scale is not None:
            logits = logits * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        one, off = torch.ones_like(temperature), torch.zeros_like(temperature)
        params = (temperature, off.int(), one, off, None, seed, position, False)
        return accept_reject(draft_tokens, logits, draft_logits, draft_lse, draft_lens, *params, method, 0.0, 0.0)
    vocab, noise = weight.shape[0], (temperature, seed, position)
    stats = head_stats(hidden, weight, bias, scale, softcap, draft_tokens, draft_lens, *noise, 0, vocab, method)
    return accept_stats(*stats, draft_tokens, draft_lens, *noise, vocab, method)
