"""``apply_logit_rules``: what a request's rules make of its logits, each row with the text before it, drafts included."""

from __future__ import annotations

import torch

from specdec_triton.logit_rules import IN_PROMPT
from specdec_triton.reference.logits import NEG_INF


def apply_logit_rules(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    lens: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    presence_penalty: torch.Tensor | None,
    frequency_penalty: torch.Tensor | None,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    min_lens: torch.Tensor | None,
    stop_ids: torch.Tensor | None,
    ngram: torch.Tensor | None,
    texts: torch.Tensor | None,
    max_ngram: int,
    first: int,
) -> torch.Tensor:
    """fp32 ``[B,T,V]``; see ``specdec_triton.ops.apply_logit_rules``."""
    rows, vocab = logits.shape[1:]
    x = logits.to(torch.float32, copy=True)
    if bias is not None:
        x += bias[:, None]
    if counts is not None:
        assert repetition_penalty is not None
        assert presence_penalty is not None
        assert frequency_penalty is not None
        penalties = repetition_penalty, presence_penalty, frequency_penalty
        if x.device.type == "cpu":  # nearly all tokens have never occurred
            ids = torch.cat([(counts > 0).any(0).nonzero()[:, 0], draft_tokens.flatten()]).unique()
            ids = ids[(ids >= 0) & (ids < vocab)]
            if len(ids) == 0:
                ids = ids.new_zeros(1)
            drafts = torch.where(torch.isin(draft_tokens, ids), torch.searchsorted(ids, draft_tokens.contiguous()), -1)
            x[:, :, ids] = _penalize(x[:, :, ids], drafts, *penalties, counts[:, ids])
        else:
            x = _penalize(x, draft_tokens, *penalties, counts)
    if min_lens is not None and stop_ids is not None:
        too_short = lens[:, None] + first + torch.arange(rows, device=x.device) < min_lens[:, None]
        banned = too_short[:, :, None] & (stop_ids >= 0)[:, None, :]
        _ban(x, stop_ids[:, None, :].expand(banned.shape), banned)
    if mask is not None:
        token = torch.arange(vocab, device=x.device)
        x = x.masked_fill((mask[..., token // 32] >> (token % 32)) & 1 == 0, NEG_INF)
    if ngram is not None and texts is not None:
        tokens, again = _repeated(draft_tokens, lens, ngram, texts, max_ngram, first)
        _ban(x, tokens, again)
    return x


def _penalize(
    x: torch.Tensor,
    draft_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """``x [B,T,V]`` with the penalties of the tokens in text and drafts."""
    rows, vocab = x.shape[1:]
    drafted = (draft_tokens >= 0) & (draft_tokens < vocab)
    first = draft_tokens.shape[1] - (rows - 1)
    seen = counts[:, None].repeat(1, rows, 1)
    for j in range(draft_tokens.shape[1]):  # draft j is history to the rows after it
        token = draft_tokens[:, j].where(drafted[:, j], 0)
        after = max(j + 1 - first, 0)
        one = drafted[:, j, None, None].int().expand(-1, rows - after, 1)
        seen[:, after:].scatter_add_(2, token[:, None, None].expand_as(one), one)
    factor = repetition[:, None, None]
    x = torch.where(seen > 0, torch.where(x < 0, x * factor, x / factor), x)
    written = seen & (IN_PROMPT - 1)
    x = x - frequency[:, None, None] * written.float()
    return x - torch.where(written > 0, presence[:, None, None], 0.0)


def _repeated(
    draft_tokens: torch.Tensor, lens: torch.Tensor, ngram: torch.Tensor, texts: torch.Tensor, max_ngram: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row and each place of its text, int64 and bool ``[B,T,L+K]``: the token there, and whether it would complete an
    n-gram that ends there."""
    batch, k = draft_tokens.shape
    device = texts.device
    width = texts.shape[1] + k
    place = torch.arange(width, device=device)
    history = torch.cat([texts, texts.new_full((batch, k), -1)], 1)
    into = (lens.long()[:, None] + torch.arange(k, device=device)).clamp(max=width - 1)
    history = history.scatter(1, into, draft_tokens)
    length = lens.long()[:, None] + torch.arange(first, k + 1, device=device)  # of each row's text
    size = ngram.long()[:, None, None]
    same = (size > 0) & (place < length[:, :, None]) & (place >= size - 1)
    for back in range(1, max_ngram):  # the token so far before the place, and before the text's end
        before = history.gather(1, (place - back).clamp(min=0).expand(batch, width))
        tail = history.gather(1, (length - back).clamp(min=0))
        same &= (back >= size) | (before[:, None] == tail[:, :, None])
    return history[:, None].expand(same.shape), same


def _ban(x: torch.Tensor, tokens: torch.Tensor, banned: torch.Tensor) -> None:
    """-inf for the tokens ``[B,T,N]`` that are banned, in place in ``x [B,T,V]``."""
    inside = banned & (tokens >= 0) & (tokens < x.shape[-1])
    if x.device.type == "cpu":
        request, row, n = inside.nonzero(as_tuple=True)
        x[request, row, tokens[request, row, n]] = NEG_INF
    else:
        bans = torch.zeros_like(x, dtype=torch.int32).scatter_add_(2, tokens.where(inside, 0), inside.int())
        x.masked_fill_(bans > 0, NEG_INF)
