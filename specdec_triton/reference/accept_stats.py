"""``accept_stats``: the decision of ``accept_reject`` with a one-hot q, from the statistics that ``head_stats`` leaves."""

from __future__ import annotations

import torch

from specdec_triton.reference.accept_reject import emit, prefix
from specdec_triton.reference.logits import NEG_INF
from specdec_triton.reference.noise import Stream, uniform


def accept_stats(
    stats: torch.Tensor,
    best: torch.Tensor,
    best_id: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab: int,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens ``[B,K+1]``, num_accepted ``[B]``, status ``[B]``; see ``specdec_triton.ops.accept_stats``."""
    k = draft_tokens.shape[1]
    step = torch.arange(k + 1, device=draft_tokens.device)
    lens = torch.full_like(position, k) if draft_lens is None else draft_lens
    peak, log_sum, winner, value = merged(stats, best, best_id)
    status = (~peak.isfinite() & (step <= lens[:, None])).any(-1)
    usable = (draft_tokens >= 0) & (draft_tokens < vocab) & (step[:k] < lens[:, None])
    usable = usable.long().cumprod(-1).bool()
    drafts = draft_tokens.where(usable, 0)
    keeps = drafts == winner[:, :k]
    if method in ("rejection", "block"):  # the same where q is one-hot
        draws = (temperature > 0)[:, None]
        log_p = (stats[..., 2].amax(-1) - peak - log_sum)[:, :k]
        u = uniform(seed[:, None], position[:, None], step[:k], Stream.ACCEPT)
        keeps = torch.where(draws, u.log() < log_p, keeps)
        # Rejected although no other token has any probability: p = 1 up to rounding.
        alone = usable & draws & (value[:, :k] == NEG_INF)
        winner[:, :k] = torch.where(alone, drafts, winner[:, :k])
    return emit(drafts, winner, prefix(usable & keeps), status)


def merged(
    stats: torch.Tensor, best: torch.Tensor, best_id: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row the maximum m, the log of the sum of exp(s - m), the winner and its value (the larger part): ``[B,T]``."""
    peak = stats[..., 0].amax(-1)
    finite = peak.where(peak.isfinite(), 0.0)
    total = (stats[..., 1] * (stats[..., 0] - finite[..., None]).exp()).sum(-1)
    value = best[..., 0].amax(-1)
    low = best[..., 1].masked_fill(best[..., 0] != value[..., None], NEG_INF)
    wins = low == low.amax(-1, keepdim=True)
    winner = best_id.long().masked_fill(~wins, torch.iinfo(torch.int64).max).amin(-1)
    return peak, total.log(), winner, value
