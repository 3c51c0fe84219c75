"""``accept_reject``: how much of a drafted chain the target keeps, and the one token that it adds.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): accept x with probability min(1, p(x) / q(x)); at the
first rejection draw from normalise(max(p - q, 0)); after K acceptances draw from p. The output follows p exactly;
kernels/README.md has the proof. ``coupled`` instead replays the token that the request's noise selects at each absolute
position, and accepts a draft while it is that token.
"""

from __future__ import annotations

import torch

from specdec_triton.reference.logits import NEG_INF, bad_rows, log_probs
from specdec_triton.reference.noise import Stream, gumbel, uniform

PAD = -1
METHODS = ("greedy", "rejection", "coupled")


def accept_reject(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_lse: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    has_filters: bool | None,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens ``[B,K+1]``, num_accepted ``[B]``, status ``[B]``; see ``specdec_triton.ops.accept_reject``."""
    batch, k = draft_tokens.shape
    vocab = target_logits.shape[-1]
    device = draft_tokens.device
    step = torch.arange(k + 1, device=device)
    lens = torch.full((batch,), k, device=device) if draft_lens is None else draft_lens.long()
    status = (bad_rows(target_logits) & (step <= lens[:, None])).any(-1)

    # An id outside the vocabulary ends the draft: it and what follows are never read, accepted or counted.
    usable = (draft_tokens >= 0) & (draft_tokens < vocab) & (step[:k] < lens[:, None])
    usable = usable.long().cumprod(-1).bool()
    lens = usable.sum(-1)
    drafts = draft_tokens.where(usable, 0)

    def per_position(x: torch.Tensor) -> torch.Tensor:  # [B] -> [B*(K+1)]
        return x.repeat_interleave(k + 1)

    best = target_logits.argmax(-1)  # the lowest id of tied ones
    accepted = usable & (drafts == best[:, :k])
    greedy = temperature <= 0
    if method == "greedy" or (device.type == "cpu" and bool(greedy.all())):
        return _emit(drafts, best, accepted, status)

    t_rows, k_rows, p_rows, m_rows = map(per_position, (temperature, top_k, top_p, min_p))
    log_p, _ = log_probs(target_logits.flatten(0, 1), t_rows, k_rows, p_rows, m_rows, has_filters)
    log_p = log_p.view(batch, k + 1, vocab)

    if method == "coupled":
        # One row at a time: the noise for all rows at once would be a [B,K+1,V] tensor.
        chosen = best.clone()
        for t in range(k + 1):
            noise = gumbel(seed, position + t, torch.zeros_like(position), Stream.COUPLED, vocab)
            chosen[:, t] = torch.where(greedy, best[:, t], (log_p[:, t] + noise).argmax(-1))
        return _emit(drafts, chosen, usable & (drafts == chosen[:, :k]), status)

    log_q = _draft_log_probs(draft_logits, draft_lse, temperature, top_k, top_p, min_p, has_filters)
    log_p_draft = log_p[:, :k].gather(-1, drafts[..., None])[..., 0]
    log_q_draft = 0.0 if log_q is None else log_q.gather(-1, drafts[..., None])[..., 0]
    u = uniform(seed[:, None], position[:, None], step[:k], Stream.ACCEPT)
    # u q < p: false for q = NaN, and for p = 0 whatever q is. q = 0 cannot have been drawn: reject.
    ratio_passes = (u.log() + log_q_draft < log_p_draft) & (torch.as_tensor(log_q_draft) > NEG_INF)
    accepted = torch.where(greedy[:, None], accepted, usable & ratio_passes)

    # The last token comes from one row per request: the residual of the first rejected draft, or p itself.
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    row = torch.arange(batch, device=device)
    rejected = num_accepted < lens
    log_last = log_p[row, num_accepted]
    if k > 0:
        at = num_accepted.clamp(max=k - 1)
        if log_q is None:
            q = torch.zeros_like(log_last).scatter_(-1, drafts[row, at][:, None], 1.0)
        else:
            q = log_q[row, at].exp().nan_to_num(0.0)
        residual = (log_last.exp() - q).clamp(min=0)
        # p = q up to rounding leaves no residual; a rejection there has probability zero, and p is the right answer.
        use_residual = rejected & (residual.sum(-1) > 0)
        log_last = torch.where(use_residual[:, None], residual.log(), log_last)
    noise = torch.where(
        rejected[:, None],
        gumbel(seed, position, num_accepted, Stream.RECOVERED, vocab),
        gumbel(seed, position, num_accepted, Stream.BONUS, vocab),
    )
    last = best.clone()
    last[row, num_accepted] = torch.where(greedy, best[row, num_accepted], (log_last + noise).argmax(-1))
    return _emit(drafts, last, accepted, status)


def _draft_log_probs(
    draft_logits: torch.Tensor | None,
    draft_lse: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    has_filters: bool | None,
) -> torch.Tensor | None:
    """log q ``[B,K,V]``; a given ``draft_lse`` must be what :func:`log_probs` returns, and so changes nothing here."""
    if draft_logits is None or draft_logits.shape[1] == 0:
        return None
    batch, k, vocab = draft_logits.shape
    t_rows, k_rows, p_rows, m_rows = (x.repeat_interleave(k) for x in (temperature, top_k, top_p, min_p))
    log_q, lse = log_probs(draft_logits.flatten(0, 1), t_rows, k_rows, p_rows, m_rows, has_filters)
    if draft_lse is not None:
        log_q = log_q + (lse - draft_lse.flatten())[:, None]
    return log_q.view(batch, k, vocab)


def _emit(
    drafts: torch.Tensor, candidates: torch.Tensor, accepted: torch.Tensor, status: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted drafts, then the candidate of the first row that was not accepted, then padding."""
    k = drafts.shape[1]
    num_accepted = accepted.long().cumprod(-1).sum(-1).masked_fill(status, 0)
    step = torch.arange(k + 1, device=drafts.device)
    padded = torch.cat([drafts, drafts.new_full((drafts.shape[0], 1), PAD)], -1)
    tokens = torch.where(step < num_accepted[:, None], padded, candidates)
    tokens = tokens.masked_fill(step > num_accepted[:, None], PAD)
    tokens[:, 0].masked_fill_(status, 0)
    return tokens, num_accepted.int(), status.int()
