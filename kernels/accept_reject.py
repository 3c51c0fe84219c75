"""``accept_reject``: how much of a drafted chain the target keeps, and the one token that it adds.

Every target row is read once, with the vocabulary split across programs (``_rows.py``): its log-sum-exp, and its argmax or, for
``coupled``, the winner of the request's Gumbel race. Then

* ``greedy``, ``coupled``: one program a request merges the winners and keeps the drafts that equal them. Two launches.
* ``rejection``: every program of grid ``(splits, B)`` repeats the decision from the statistics and one gathered logit per draft,
  and races over its part of one row: the residual max(p - q, 0) of the first rejected draft, or p itself. One program a request
  then picks the winner. Three launches; no probability is ever written.

One launch more where a row filters, and one where the drafts' log-sum-exp is not given. kernels/README.md has the proofs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import on_device
from specdec_triton.kernels._primitives import (
    NEG_INF,
    PAD,
    STREAM_ACCEPT,
    STREAM_BONUS,
    STREAM_COUPLED,
    STREAM_RECOVERED,
    gumbel,
    scaled_logits,
    uniform,
)
from specdec_triton.kernels._rows import BLOCK_V, SPLIT_V, row_cut, row_stats
from specdec_triton.kernels.sample import merge_sums, merge_winners


@triton.jit
def _draft_length(drafts, step, k, length, vocab):
    """Usable drafts of a request: an id outside the vocabulary ends the draft."""
    usable = (step < length) & (drafts >= 0) & (drafts < vocab)
    return tl.min(tl.where(usable, k, step), 0)


@triton.jit
def _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, step, k, drafts, accepted, last, bad):
    """Accepted drafts, one more token, padding."""
    accepted = tl.where(bad, 0, accepted)
    last = tl.where(bad, 0, last)
    out = tl.where(step < accepted, drafts, tl.where(step == accepted, last, PAD))
    tl.store(tokens_ptr + b * (k + 1) + step, out, mask=step <= k)
    tl.store(num_accepted_ptr + b, accepted)
    tl.store(status_ptr + b, bad.to(tl.int32))


@triton.jit
def _is_bad(peak, step, length):
    """Whether a row up to the draft's length held NaN, +inf or nothing but -inf."""
    bad = ((peak == float("inf")) | (peak == NEG_INF)) & (step <= length)
    return tl.max(bad.to(tl.int32), 0) > 0


@triton.jit
def _request(
    draft_tokens_ptr,
    draft_lens_ptr,
    b,
    k,
    splits,
    stride_drafts,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    """Draft length, steps, splits, where a row's split has its statistics, which of them there are, and the drafts."""
    length = k
    if HAS_LENS:
        length = tl.load(draft_lens_ptr + b)
    step, part = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    at = (b * (k + 1) + step)[:, None] * splits + part[None, :]
    mask = (step <= length)[:, None] & (part < splits)[None, :]
    drafts = tl.load(draft_tokens_ptr + b * stride_drafts + step, mask=step < k, other=PAD)
    return length, step, part, at, mask, drafts


@triton.jit(do_not_specialize=["k", "vocab", "splits", "stride_drafts"])
def _keep_winners_kernel(
    tokens_ptr,  # int64 [B,K+1]
    num_accepted_ptr,  # int32 [B]
    status_ptr,  # int32 [B]
    stats_ptr,
    best_ptr,
    best_id_ptr,
    draft_tokens_ptr,  # int64 [B,K]
    draft_lens_ptr,  # int32 [B]
    k,
    vocab,
    splits,
    stride_drafts,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length, step, _, at, mask, drafts = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, splits, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    _, peak = merge_sums(stats_ptr, at, mask)
    winner = merge_winners(best_ptr, best_id_ptr, at, mask).to(tl.int64)
    usable = _draft_length(drafts, step, k, length, vocab)
    accepted = tl.min(tl.where((step < usable) & (drafts == winner), k, step), 0)
    last = tl.sum(tl.where(step == accepted, winner, 0), 0)
    bad = _is_bad(peak, step, length)
    _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, step, k, drafts, accepted, last, bad)


@triton.jit(
    do_not_specialize=[
        "k", "vocab", "splits", "stride_drafts", "stride_lse",
    ]
)  # fmt: skip
def _race_kernel(
    decision_ptr,  # int32 [B,2]: accepted drafts, and whether the next one was rejected
    race_ptr,  # fp32 [B,splits,2]: best value of the residual, and of the target row itself
    race_id_ptr,  # int32 [B,splits,2]
    target_logits_ptr,  # [B,K+1,V]
    draft_logits_ptr,  # [B,K,V]
    draft_lse_ptr,  # fp32 [B,K]
    draft_tokens_ptr,  # int64 [B,K]
    draft_lens_ptr,  # int32 [B]
    stats_ptr,  # of the target rows
    best_ptr,
    best_id_ptr,
    cut_ptr,  # fp32 [B,K+1], of the target rows
    draft_cut_ptr,  # fp32 [B,K]
    temperature_ptr,  # fp32 [B]
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    k,
    vocab,
    splits,
    stride_drafts,
    stride_target_batch,
    stride_target_row,
    stride_draft_batch,
    stride_draft_row,
    stride_lse,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_CUT: tl.constexpr,
):
    split, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
    length, step, _, at, mask, drafts = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, splits, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    lse, _ = merge_sums(stats_ptr, at, mask)
    usable = _draft_length(drafts, step, k, length, vocab)
    drafted = step < usable

    # Accept while u q < p, in logarithms. q = 0 cannot have been drawn: reject.
    target = target_logits_ptr + b * stride_target_batch
    offset = step.to(tl.int64) * stride_target_row + drafts
    log_p = scaled_logits(tl.load(target + offset, mask=drafted, other=NEG_INF), temperature)
    if HAS_CUT:
        log_p = tl.where(log_p < tl.load(cut_ptr + b * (k + 1) + step, mask=drafted, other=0.0), NEG_INF, log_p)
    log_p -= lse
    log_q = tl.zeros([BLOCK_T], tl.float32)
    if HAS_DRAFT:
        draft = draft_logits_ptr + b * stride_draft_batch
        offset = step.to(tl.int64) * stride_draft_row + drafts
        log_q = scaled_logits(tl.load(draft + offset, mask=drafted, other=NEG_INF), temperature)
        if HAS_CUT:
            log_q = tl.where(log_q < tl.load(draft_cut_ptr + b * k + step, mask=drafted, other=0.0), NEG_INF, log_q)
        log_q -= tl.load(draft_lse_ptr + b * stride_lse + step, mask=drafted, other=0.0)
    u = uniform(seed, position, step, STREAM_ACCEPT)
    keeps = (tl.log(u) + log_q < log_p) & (log_q > NEG_INF)
    winner = merge_winners(best_ptr, best_id_ptr, at, mask).to(tl.int64)
    keeps = tl.where(temperature <= 0, drafts == winner, keeps)
    accepted = tl.min(tl.where(drafted & keeps, k, step), 0)
    rejected = accepted < usable
    if split == 0:
        tl.store(decision_ptr + b * 2, accepted)
        tl.store(decision_ptr + b * 2 + 1, rejected.to(tl.int32))
    if temperature <= 0:
        return

    # The race over this program's part of row `accepted`. One draw serves both weights: only one of them will count.
    row_lse = tl.sum(tl.where(step == accepted, lse, 0.0), 0)
    rejected_token = tl.sum(tl.where(step == accepted, drafts, 0), 0)
    stream = tl.where(rejected, STREAM_RECOVERED, STREAM_BONUS)
    target += accepted.to(tl.int64) * stride_target_row
    nothing = tl.full([], NEG_INF, tl.float32)
    cut, draft_cut = nothing, nothing
    if HAS_CUT:
        cut = tl.load(cut_ptr + b * (k + 1) + accepted)
    if HAS_DRAFT:
        draft = draft_logits_ptr + b * stride_draft_batch + accepted.to(tl.int64) * stride_draft_row
        draft_lse = tl.load(draft_lse_ptr + b * stride_lse + accepted, mask=rejected, other=0.0)
        if HAS_CUT:
            draft_cut = tl.load(draft_cut_ptr + b * k + accepted, mask=rejected, other=0.0)
    residual_best, residual_id = nothing, split * SPLIT
    best, best_id = nothing, split * SPLIT
    for i in range(SPLIT // BLOCK):
        first = split * SPLIT + i * BLOCK
        token = first + tl.arange(0, BLOCK)
        inside = token < vocab
        s = scaled_logits(tl.load(target + token, mask=inside, other=NEG_INF), temperature)
        s = tl.where(s < cut, NEG_INF, s)
        noise = gumbel(seed, position, accepted, stream, first, BLOCK)
        value = s - row_lse + noise
        block_best = tl.max(value, 0)
        block_id = tl.min(tl.where(value == block_best, token, vocab), 0)
        best_id = tl.where(block_best > best, block_id, best_id)
        best = tl.maximum(best, block_best)
        if rejected:
            if HAS_DRAFT:
                d = scaled_logits(tl.load(draft + token, mask=inside, other=NEG_INF), temperature)
                q = tl.where((d < draft_cut) | (d == NEG_INF), 0.0, tl.exp(d - draft_lse))
                q = tl.where(q == q, q, 0.0)
            else:
                q = tl.where(token == rejected_token, 1.0, 0.0)
            residual = tl.exp(s - row_lse) - q
            value = tl.where(residual > 0, tl.log(tl.maximum(residual, 1e-45)) + noise, NEG_INF)
            block_best = tl.max(value, 0)
            block_id = tl.min(tl.where(value == block_best, token, vocab), 0)
            residual_id = tl.where(block_best > residual_best, block_id, residual_id)
            residual_best = tl.maximum(residual_best, block_best)
    at = (b * splits + split) * 2
    tl.store(race_ptr + at, residual_best)
    tl.store(race_id_ptr + at, residual_id)
    tl.store(race_ptr + at + 1, best)
    tl.store(race_id_ptr + at + 1, best_id)


@triton.jit(do_not_specialize=["k", "splits", "stride_drafts"])
def _pick_kernel(
    tokens_ptr,  # int64 [B,K+1]
    num_accepted_ptr,  # int32 [B]
    status_ptr,  # int32 [B]
    decision_ptr,
    race_ptr,
    race_id_ptr,
    stats_ptr,
    best_ptr,
    best_id_ptr,
    draft_tokens_ptr,
    draft_lens_ptr,
    temperature_ptr,
    k,
    splits,
    stride_drafts,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length, step, part, at, mask, drafts = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, splits, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    _, peak = merge_sums(stats_ptr, at, mask)
    accepted, rejected = tl.load(decision_ptr + b * 2), tl.load(decision_ptr + b * 2 + 1) > 0
    if tl.load(temperature_ptr + b) <= 0:
        winner = merge_winners(best_ptr, best_id_ptr, at, mask)
        last = tl.sum(tl.where(step == accepted, winner, 0), 0)
    else:
        race = (b * splits + part) * 2
        # p = q up to rounding leaves no residual; a rejection there has probability zero, and p is the right answer.
        residual_best = tl.max(tl.load(race_ptr + race, mask=part < splits, other=NEG_INF), 0)
        race += tl.where(rejected & (residual_best > NEG_INF), 0, 1)
        last = merge_winners(race_ptr, race_id_ptr, race, part < splits)
    bad = _is_bad(peak, step, length)
    _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, step, k, drafts, accepted, last.to(tl.int64), bad)


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
    device = target_logits.device
    tokens = torch.empty(batch, k + 1, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=device)
    status = torch.empty(batch, dtype=torch.int32, device=device)
    if batch == 0:
        return tokens, num_accepted, status
    if draft_tokens.stride(1) != 1:
        draft_tokens = draft_tokens.contiguous()
    results = (tokens, num_accepted, status)
    filters = (temperature, top_k, top_p, min_p)
    block_t = triton.next_power_of_2(k + 1)
    with on_device(target_logits):
        cut = None
        if method != "greedy" and has_filters is not False:
            cut = row_cut(target_logits, *filters, draft_lens, 1)
        stream = STREAM_COUPLED.value if method == "coupled" else -1
        target = row_stats(target_logits, temperature, cut, draft_lens, 1, seed, position, 0, stream)
        splits = target[1].shape[-1]
        block_s = triton.next_power_of_2(splits)
        merge_warps = 4 if block_t * block_s > 512 else 1  # one warp would spill on the tile of a long draft
        if method != "rejection":
            _keep_winners_kernel[(batch,)](
                *results,
                *target,
                draft_tokens,
                draft_lens,
                k,
                vocab,
                splits,
                draft_tokens.stride(0),
                BLOCK_T=block_t,
                BLOCK_S=block_s,
                HAS_LENS=draft_lens is not None,
                num_warps=merge_warps,
            )
            return results
        has_draft = draft_logits is not None and k > 0
        draft_cut = None
        if has_draft:
            assert draft_logits is not None
            if cut is not None:
                draft_cut = row_cut(draft_logits, *filters, draft_lens, 0)
            if draft_lse is None:
                draft_lse = _draft_lse(draft_logits, temperature, draft_cut, draft_lens, seed, position)
        decision = torch.empty(batch, 2, dtype=torch.int32, device=device)
        race = torch.empty(batch, splits, 2, dtype=torch.float32, device=device)
        race_id = torch.empty(batch, splits, 2, dtype=torch.int32, device=device)
        block = min(BLOCK_V, max(triton.next_power_of_2(vocab), 16))
        _race_kernel[(splits, batch)](
            decision,
            race,
            race_id,
            target_logits,
            draft_logits,
            draft_lse,
            draft_tokens,
            draft_lens,
            *target,
            cut,
            draft_cut,
            temperature,
            seed,
            position,
            k,
            vocab,
            splits,
            draft_tokens.stride(0),
            *target_logits.stride()[:2],
            *(draft_logits.stride()[:2] if draft_logits is not None else (0, 0)),
            draft_lse.stride(0) if draft_lse is not None else 0,
            BLOCK_T=block_t,
            BLOCK_S=block_s,
            SPLIT=min(SPLIT_V, triton.cdiv(vocab, block) * block),
            BLOCK=block,
            HAS_LENS=draft_lens is not None,
            HAS_DRAFT=has_draft,
            HAS_CUT=cut is not None,
            num_warps=4,
        )
        _pick_kernel[(batch,)](
            *results,
            decision,
            race,
            race_id,
            *target,
            draft_tokens,
            draft_lens,
            temperature,
            k,
            splits,
            draft_tokens.stride(0),
            BLOCK_T=block_t,
            BLOCK_S=block_s,
            HAS_LENS=draft_lens is not None,
            num_warps=merge_warps,
        )
    return results


def _draft_lse(
    draft_logits: torch.Tensor,
    temperature: torch.Tensor,
    cut: torch.Tensor | None,
    lens: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """fp32 ``[B,K]``: a pass over the draft rows, for callers that did not keep what ``sample`` returned."""
    stats, _, _ = row_stats(draft_logits, temperature, cut, lens, 0, seed, position, 0, -1)
    return (stats[..., 0] + stats[..., 1].log()).logsumexp(-1)
