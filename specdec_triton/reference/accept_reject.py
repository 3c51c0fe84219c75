"""``accept_reject``: how much of a drafted chain the target keeps, and the one token that it adds.

p is the target's distribution at a position, q the drafter's (one-hot where the drafter is certain), u a uniform number.

* ``rejection`` (Leviathan et al. 2023, Chen et al. 2023): keep x while u q(x) < p(x); at the first rejection draw from
  normalise(max(p - q, 0)), after K acceptances from p.
* ``block`` (Sun et al. 2024, "Block verification accelerates speculative decoding"): the same distribution, and on average
  never fewer accepted tokens, because the prefix is judged as a whole.
* ``coupled``: replay the token that the request's noise selects at each absolute position; keep a draft while it is that.
* ``typical`` (Cai et al. 2024, "Medusa"): keep x while p(x) > min(epsilon, delta exp(-entropy)). Lossy.

kernels/README.md has the proofs.
"""

from __future__ import annotations

import torch

from specdec_triton.reference.logits import NEG_INF, bad_rows, best_of, scaled_logits
from specdec_triton.reference.noise import Stream, race, uniform

PAD = -1
METHODS = ("greedy", "rejection", "block", "coupled", "typical")


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
    typical_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    has_filters: bool | None,
    method: str,
    epsilon: float,
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens ``[B,K+1]``, num_accepted ``[B]``, status ``[B]``; see ``specdec_triton.ops.accept_reject``."""
    if method == "greedy":
        temperature = torch.zeros_like(temperature)
    batch, k = draft_tokens.shape
    vocab = target_logits.shape[-1]
    device = draft_tokens.device
    step = torch.arange(k + 1, device=device)
    lens = torch.full((batch,), k, device=device) if draft_lens is None else draft_lens.long()
    largest, best = best_of(target_logits)
    status = (bad_rows(largest, temperature) & (step <= lens[:, None])).any(-1)

    # An id outside the vocabulary ends the draft: it and what follows are never read, accepted or counted.
    usable = (draft_tokens >= 0) & (draft_tokens < vocab) & (step[:k] < lens[:, None])
    usable = usable.long().cumprod(-1).bool()
    lens = usable.sum(-1)
    drafts = draft_tokens.where(usable, 0)

    accepted = prefix(usable & (drafts == best[:, :k]))
    greedy = temperature <= 0
    if method == "greedy" or (device.type == "cpu" and bool(greedy.all())):
        return emit(drafts, best, accepted, status)

    params = (temperature, top_k, top_p, min_p, typical_p, has_filters)
    if method == "coupled":
        # One row at a time: the noise for all rows at once would be a [B,K+1,V] tensor. No row counts after the first draft
        # that is not its position's token, so on the CPU the others are left out.
        chosen, node = best.clone(), torch.zeros_like(position)
        for t in range(k + 1):
            scaled = _scaled_rows(target_logits[:, t : t + 1], *params)
            drawn = race(scaled[:, 0], seed, position + t, node, Stream.COUPLED)
            chosen[:, t] = torch.where(greedy, chosen[:, t], drawn)
            accepted = prefix(usable & (drafts == chosen[:, :k]))
            if device.type == "cpu" and not bool((accepted > t).any()):
                break
        return emit(drafts, chosen, accepted, status)

    raced = _scaled_rows(target_logits, *params)
    log_p = raced.log_softmax(-1)  # not minus the log-sum-exp, which loses digits where logits are large
    log_q = None
    if draft_logits is not None and k > 0 and method != "typical":
        scaled = _scaled_rows(draft_logits, *params)
        log_q = scaled.log_softmax(-1) if draft_lse is None else scaled - draft_lse[..., None]
    u = uniform(seed[:, None], position[:, None], step[:k], Stream.ACCEPT)
    weight = torch.ones_like(temperature)  # of p in the residual
    if method == "rejection" or (method == "block" and log_q is None):  # the same where q is one-hot: kernels/README.md
        num_accepted = _rejection(drafts, log_p, log_q, usable, u)
    elif method == "block":
        assert log_q is not None
        num_accepted, weight = _block(drafts, log_p, log_q, usable, u)
    else:
        num_accepted = _typical(drafts, log_p, usable, epsilon, delta)
    num_accepted = torch.where(greedy, accepted, num_accepted)

    # The last token comes from one row per request: the residual of the first rejected draft, or p itself.
    row = torch.arange(batch, device=device)
    rejected = num_accepted < lens
    last = raced[row, num_accepted]
    if k > 0 and method != "typical":
        residual = _recovering(last, log_p, weight, log_q, drafts, num_accepted)
        # p = q up to rounding leaves no residual; a rejection there has probability zero, and p is the right answer.
        use_residual = rejected & (residual > NEG_INF).any(-1)
        last = torch.where(use_residual[:, None], residual, last)
    stream = torch.where(rejected, int(Stream.RECOVERED), int(Stream.BONUS))
    drawn = race(last, seed, position, num_accepted, stream)
    best[row, num_accepted] = torch.where(greedy, best[row, num_accepted], drawn)
    return emit(drafts, best, num_accepted, status)


def _scaled_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None,
    has_filters: bool | None,
) -> torch.Tensor:
    """``scaled_logits`` of ``[B,R,V]``."""
    rows = logits.shape[1]
    t_rows, k_rows, p_rows, m_rows = (x.repeat_interleave(rows) for x in (temperature, top_k, top_p, min_p))
    y_rows = None if typical_p is None else typical_p.repeat_interleave(rows)
    return scaled_logits(logits.flatten(0, 1), t_rows, k_rows, p_rows, m_rows, y_rows, has_filters).view(logits.shape)


def _rejection(
    drafts: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor | None, usable: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Accepted drafts ``[B]``: the first of them, while u q < p."""
    log_p_draft, log_q_draft = _of_drafts(log_p, drafts), _of_drafts(log_q, drafts)
    # False for q = NaN, and for p = 0 whatever q is. q = 0 cannot have been drawn: reject.
    return prefix(usable & (u.log() + log_q_draft < log_p_draft) & (log_q_draft > NEG_INF))


def _block(
    drafts: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, usable: torch.Tensor, u: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts ``[B]``, and the weight w ``[B]`` of p in the residual max(w p - q, 0) of the next one.

    w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)). The longest prefix i with u_i < h_i stays, where h_i is w_i for the whole
    draft of N tokens, and S_i / (S_i + 1 - w_i) before, S_i being the mass of the residual after i drafts.
    """
    k = drafts.shape[1]
    log_p_draft, log_q_draft = _of_drafts(log_p, drafts), _of_drafts(log_q, drafts)
    drawn = usable & (log_q_draft > NEG_INF) & (log_p_draft > NEG_INF)  # q = 0 cannot have been drawn: reject
    # The recursion, solved: w_i = exp(c_i - max(c_0 .. c_i)), c the running sum of log p / q.
    sums = (log_p_draft - log_q_draft).where(drawn, NEG_INF).cumsum(-1)
    weight = (sums - sums.cummax(-1).values.clamp(min=0.0)).exp()
    h = weight.clone()
    lens = usable.sum(-1)
    for i in range(1, k):
        w = weight[:, i - 1]
        mass = _residual(log_p[:, i], w, log_q[:, i]).sum(-1)
        h[:, i - 1] = torch.where((i == lens) | (w >= 1), w, mass / (mass + (1.0 - w)))
    passes = usable & (u < h)
    accepted = (passes * torch.arange(1, k + 1, device=drafts.device)).amax(-1)
    weight = torch.cat([torch.ones_like(u[:, :1]), weight], -1)
    return accepted, weight.gather(-1, accepted[:, None])[:, 0]


def _typical(
    drafts: torch.Tensor, log_p: torch.Tensor, usable: torch.Tensor, epsilon: float, delta: float
) -> torch.Tensor:
    """Accepted drafts ``[B]``: the first of them, while p > min(epsilon, delta exp(-entropy of p))."""
    rows = log_p[:, : drafts.shape[1]]
    entropy = -(rows.exp() * rows.masked_fill(rows == NEG_INF, 0.0)).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    return prefix(usable & (_of_drafts(log_p, drafts).exp() > threshold))


def _of_drafts(log_probs: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """Log-probability ``[B,K]`` of each draft; 0 where the drafter is certain."""
    if log_probs is None:
        return torch.zeros(drafts.shape, device=drafts.device)
    return log_probs[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0]


def _residual(log_p: torch.Tensor, weight: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """max(weight p - q, 0) ``[B,V]`` of log p and log q ``[B,V]``."""
    p = log_p.exp() * weight[:, None]
    return (p - log_q.exp().nan_to_num(0.0)).clamp(min=0)


def _recovering(
    last: torch.Tensor,
    log_p: torch.Tensor,
    weight: torch.Tensor,
    log_q: torch.Tensor | None,
    drafts: torch.Tensor,
    num_accepted: torch.Tensor,
) -> torch.Tensor:
    """Logits ``[B,V]`` of the token in place of the first rejected draft: of the residual, which for a one-hot q is p without
    the draft. ``last [B,V]`` are the logits of p there."""
    row, at = torch.arange(len(drafts), device=drafts.device), num_accepted.clamp(max=drafts.shape[1] - 1)
    if log_q is None:
        return last.scatter(-1, drafts[row, at][:, None], NEG_INF)
    return _residual(log_p[row, num_accepted], weight, log_q[row, at]).log()


def prefix(accepted: torch.Tensor) -> torch.Tensor:
    """How many of ``[B,K]`` come before the first False."""
    return accepted.long().cumprod(-1).sum(-1)


def emit(
    drafts: torch.Tensor, candidates: torch.Tensor, num_accepted: torch.Tensor, status: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted drafts, then the candidate of the first row that was not accepted, then padding."""
    num_accepted = num_accepted.masked_fill(status, 0)
    step = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.cat([drafts, drafts.new_full((drafts.shape[0], 1), PAD)], -1)
    tokens = torch.where(step < num_accepted[:, None], padded, candidates)
    tokens = tokens.masked_fill(step > num_accepted[:, None], PAD)
    tokens[:, 0].masked_fill_(status, 0)
    return tokens, num_accepted.int(), status.int()
