"""``accept_reject``: how much of a drafted chain the target keeps, and the one token that it adds.

Every target row is read once, with the vocabulary split across programs (``_rows.py``): its log-sum-exp, and its argmax or, for
``coupled``, the winner of the request's Gumbel race. Without ``draft_lse`` so are the draft rows, in the same launch. Then

* ``greedy``, ``coupled``: one program a request merges the winners and keeps the drafts that equal them.
* ``rejection``, ``typical``: every program of grid ``(B, splits)`` repeats the decision from the statistics and one gathered
  logit per draft, and races over its part of one row: the residual max(p - q, 0) of the first rejected draft, or p itself. One
  program a request then picks the winner.
* ``block``: grid ``(B * (K + 1), splits)``. The decision needs the residual's mass at every position, so every row races, and
  the picking program decides.

Two launches (greedy, coupled) or three, two more where a request filters. No probability is ever written. kernels/README.md
has the proofs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of, dense, on_device
from specdec_triton.kernels._filters import is_cut
from specdec_triton.kernels._primitives import (
    NEG_INF,
    PAD,
    STREAM_ACCEPT,
    STREAM_BONUS,
    STREAM_COUPLED,
    STREAM_RECOVERED,
    gumbel,
    inverse_of,
    scaled_logits,
    uniform,
)
from specdec_triton.kernels._rows import row_stats
from specdec_triton.kernels._splits import (
    SPLIT_V,
    load_row,
    merge_entropy,
    merge_sums,
    merge_winners,
    store_winner,
)

REJECTION: tl.constexpr = tl.constexpr(0)
BLOCKWISE: tl.constexpr = tl.constexpr(1)
TYPICAL: tl.constexpr = tl.constexpr(2)
_RACES = {"rejection": REJECTION, "block": BLOCKWISE, "typical": TYPICAL}
_RUNTIME = ["k", "rows", "splits", "vocab", "stride_drafts"]


@triton.jit
def _request(
    draft_tokens_ptr, draft_lens_ptr, b, k, rows, splits, vocab, stride_drafts,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """A request's draft length, its usable drafts (an id outside the vocabulary ends them), the drafts, and where the
    splits of its target rows lie, of which ``mask`` exist."""
    length = k
    if HAS_LENS:
        length = tl.load(draft_lens_ptr + b)
    step, part = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    drafts = tl.load(draft_tokens_ptr + b * stride_drafts + step, mask=step < k, other=PAD)
    usable = tl.min(tl.where((step < length) & (drafts >= 0) & (drafts < vocab), k, step), 0)
    at = (b * rows + step)[:, None] * splits + part[None, :]
    mask = (step <= length)[:, None] & (part < splits)[None, :]
    return length, usable, drafts, at, mask


@triton.jit
def _first_miss(keeps, step, k):
    """How many drafts come before the first that is not kept."""
    return tl.min(tl.where(keeps, k, step), 0)


@triton.jit
def _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, k, length, drafts, accepted, last, peak, BLOCK_T: tl.constexpr):
    """Accepted drafts, one more token, padding; status 1 if a row up to the draft's length is bad."""
    step = tl.arange(0, BLOCK_T)
    bad = ((peak == float("inf")) | (peak == NEG_INF)) & (step <= length)
    bad = tl.max(bad.to(tl.int32), 0)
    accepted = tl.where(bad > 0, 0, accepted)
    last = tl.where(bad > 0, 0, last)
    out = tl.where(step < accepted, drafts, tl.where(step == accepted, last, PAD))
    tl.store(tokens_ptr + b * (k + 1) + step, out, mask=step <= k)
    tl.store(num_accepted_ptr + b, accepted)
    tl.store(status_ptr + b, bad)


@triton.jit(do_not_specialize=_RUNTIME)
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
    rows,
    splits,
    vocab,
    stride_drafts,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_T)
    length, usable, drafts, at, mask = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, rows, splits, vocab, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    peak, _ = merge_sums(stats_ptr, at, mask)
    winner = merge_winners(best_ptr, best_id_ptr, at, mask)[1].to(tl.int64)
    accepted = _first_miss((step < usable) & (drafts == winner), step, k)
    last = tl.sum(tl.where(step == accepted, winner, 0), 0)
    _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, k, length, drafts, accepted, last, peak, BLOCK_T)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["k", "rows", "splits", "stride_drafts", "stride_lse", "race_rows"])
def _race_kernel(
    accepted_ptr,  # int32 [B]: accepted drafts (not BLOCKWISE)
    weight_ptr,  # fp32 [B,K+1]: the weight of p in a row's residual (BLOCKWISE)
    mass_ptr,  # fp32 [B,race rows,splits]: of the residual (BLOCKWISE)
    race_ptr,  # fp32 [B,race rows,splits,2,2]: best value of the residual, and of the target row itself; exact sums
    race_id_ptr,  # int32 [B,race rows,splits,2]
    target_logits_ptr,  # [B,K+1,V]
    draft_logits_ptr,  # [B,K,V]
    draft_lse_ptr,  # fp32 [B,K]
    draft_tokens_ptr,  # int64 [B,K]
    draft_lens_ptr,  # int32 [B]
    stats_ptr,  # of the target rows, then of the draft rows
    best_ptr,
    best_id_ptr,
    cut_ptr,  # fp32 [B,rows,2], of both
    temperature_ptr,  # fp32 [B]
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    epsilon,
    delta,
    k,
    rows,
    splits,
    vocab,
    stride_drafts,
    stride_target_batch,
    stride_target_row,
    stride_draft_batch,
    stride_draft_row,
    stride_lse,
    race_rows,
    METHOD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_CUT: tl.constexpr,
):
    race = tl.program_id(0).to(tl.int64)
    b, split = race // race_rows, tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    inverse = inverse_of(temperature)
    seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
    step = tl.arange(0, BLOCK_T)
    _, usable, drafts, at, mask = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, rows, splits, vocab, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    drafted = step < usable
    peak, log_sum = merge_sums(stats_ptr, at, mask)  # log p = (s - peak) - log_sum

    # The drafts' probabilities under the target and the drafter.
    target = target_logits_ptr + b * stride_target_batch
    offset = step.to(tl.int64) * stride_target_row + drafts
    log_p = scaled_logits(tl.load(target + offset, mask=drafted, other=NEG_INF), inverse)
    if HAS_CUT:
        log_p = tl.where(is_cut(log_p, cut_ptr, b * rows + step, drafted), NEG_INF, log_p)
    log_p = (log_p - peak) - log_sum
    log_q = tl.zeros([BLOCK_T], tl.float32)
    draft_peak, draft_log_sum = log_q, log_q
    if HAS_DRAFT:
        draft = draft_logits_ptr + b * stride_draft_batch
        offset = step.to(tl.int64) * stride_draft_row + drafts
        log_q = scaled_logits(tl.load(draft + offset, mask=drafted, other=NEG_INF), inverse)
        if HAS_CUT:
            log_q = tl.where(is_cut(log_q, cut_ptr, b * rows + k + 1 + step, drafted), NEG_INF, log_q)
        if HAS_LSE:
            draft_peak = tl.load(draft_lse_ptr + b * stride_lse + step, mask=drafted, other=0.0)
        else:
            draft_peak, draft_log_sum = merge_sums(stats_ptr, at + (k + 1) * splits, mask & drafted[:, None])
        log_q = (log_q - draft_peak) - draft_log_sum

    weight = tl.full([], 1.0, tl.float32)
    if METHOD == BLOCKWISE:
        # w_i = min(1, w_(i-1) p / q) from w_0 = 1 is exp(c_i - max(c_0 .. c_i)), c the running sum of log p / q.
        row = (race % race_rows).to(tl.int32)
        ratio = tl.where(drafted & (log_q > NEG_INF) & (log_p > NEG_INF), log_p - log_q, NEG_INF)
        sums = tl.cumsum(ratio, 0)
        weights = tl.exp(sums - tl.maximum(tl.associative_scan(sums, 0, _larger), 0.0))
        weight = tl.where(row == 0, weight, tl.sum(tl.where(step == row - 1, weights, 0.0), 0))
        if split == 0:
            tl.store(weight_ptr + b * (k + 1) + row, weight)
        if row > usable:
            return
    else:
        if temperature <= 0:
            keeps = drafts == merge_winners(best_ptr, best_id_ptr, at, mask)[1].to(tl.int64)
        elif METHOD == TYPICAL:
            threshold = tl.minimum(delta * tl.exp(-merge_entropy(stats_ptr, at, mask)), epsilon)
            keeps = tl.exp(log_p) > threshold
        else:
            # u q < p, in logarithms. q = 0 cannot have been drawn: reject.
            u = uniform(seed, position, step, STREAM_ACCEPT)
            keeps = (tl.log(u) + log_q < log_p) & (log_q > NEG_INF)
        row = _first_miss(drafted & keeps, step, k)
        if split == 0:
            tl.store(accepted_ptr + b, row)
    if temperature <= 0:
        return

    # The race over this program's part of the row. One draw serves both weights: only one of them will count.
    rejected = row < usable
    stream = tl.where(rejected, STREAM_RECOVERED, STREAM_BONUS)
    first = split * SPLIT
    token = first + tl.arange(0, SPLIT)
    s = load_row(target + row.to(tl.int64) * stride_target_row, first, vocab, inverse, SPLIT)
    if HAS_CUT:
        s = tl.where(is_cut(s, cut_ptr, b * rows + row, True), NEG_INF, s)
    s = tl.where(s == s, s, NEG_INF)
    noise = gumbel(seed, position, row, stream, first, SPLIT)
    at = (race * splits + split) * 2
    store_winner(race_ptr, race_id_ptr, at + 1, s, noise, token)
    if METHOD != TYPICAL:
        if rejected:
            if HAS_DRAFT:
                d = load_row(draft + row.to(tl.int64) * stride_draft_row, first, vocab, inverse, SPLIT)
                if HAS_CUT:
                    d = tl.where(is_cut(d, cut_ptr, b * rows + k + 1 + row, True), NEG_INF, d)
                d -= tl.sum(tl.where(step == row, draft_peak, 0.0), 0)
                q = tl.exp(d - tl.sum(tl.where(step == row, draft_log_sum, 0.0), 0))
                q = tl.where(q == q, q, 0.0)
                p = tl.exp(
                    (s - tl.sum(tl.where(step == row, peak, 0.0), 0)) - tl.sum(tl.where(step == row, log_sum, 0.0), 0)
                )
                residual = weight * p - q
                value = tl.where(residual > 0, tl.log(tl.maximum(residual, 1e-37)), NEG_INF)
                if METHOD == BLOCKWISE:
                    tl.store(mass_ptr + race * splits + split, tl.sum(tl.maximum(residual, 0.0), 0))
            else:  # p without the draft: no probability, so that nothing depends on the splits
                value = tl.where(token == tl.sum(tl.where(step == row, drafts, 0), 0), NEG_INF, s)
            store_winner(race_ptr, race_id_ptr, at, value, noise, token)


@triton.jit(do_not_specialize=[*_RUNTIME, "race_rows"])
def _pick_kernel(
    tokens_ptr,  # int64 [B,K+1]
    num_accepted_ptr,  # int32 [B]
    status_ptr,  # int32 [B]
    accepted_ptr,
    weight_ptr,
    mass_ptr,
    race_ptr,
    race_id_ptr,
    stats_ptr,
    best_ptr,
    best_id_ptr,
    draft_tokens_ptr,
    draft_lens_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    k,
    rows,
    splits,
    vocab,
    stride_drafts,
    race_rows,
    METHOD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    step, part = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    length, usable, drafts, at, mask = _request(
        draft_tokens_ptr, draft_lens_ptr, b, k, rows, splits, vocab, stride_drafts, BLOCK_T, BLOCK_S, HAS_LENS
    )
    peak, _ = merge_sums(stats_ptr, at, mask)
    winner = merge_winners(best_ptr, best_id_ptr, at, mask)[1].to(tl.int64)
    race = b * race_rows
    if METHOD == BLOCKWISE:
        # The longest prefix of i = step + 1 drafts with u < h: w for the whole draft, else S / (S + 1 - w).
        whole = step + 1 == usable
        weight = tl.load(weight_ptr + b * (k + 1) + step + 1, mask=step < usable, other=0.0)
        entries = (race + step + 1)[:, None] * splits + part[None, :]
        raced = tl.where(temperature > 0, usable, 0)
        mask = (step + 1 < raced)[:, None] & (part < splits)[None, :]
        mass = tl.sum(tl.load(mass_ptr + entries, mask=mask, other=0.0), 1)
        h = tl.where(whole | (weight >= 1), weight, mass / (mass + (1.0 - weight)))
        u = uniform(tl.load(seed_ptr + b), tl.load(position_ptr + b), step, STREAM_ACCEPT)
        accepted = tl.max(tl.where((step < usable) & (u < h), step + 1, 0), 0)
        if temperature <= 0:
            accepted = _first_miss((step < usable) & (drafts == winner), step, k)
        race += accepted
    else:
        accepted = tl.load(accepted_ptr + b)
    if temperature <= 0:
        last = tl.sum(tl.where(step == accepted, winner, 0), 0)
    else:
        entry = (race * splits + part) * 2 + 1  # p itself
        if METHOD != TYPICAL:
            if accepted < usable:
                # p = q up to rounding leaves no residual; a rejection there has probability zero, and p is right.
                largest = tl.max(tl.load(race_ptr + (entry - 1) * 2, mask=part < splits, other=NEG_INF), 0)
                entry -= tl.where(largest > NEG_INF, 1, 0)
        last = merge_winners(race_ptr, race_id_ptr, entry, part < splits)[1].to(tl.int64)
    _emit(tokens_ptr, num_accepted_ptr, status_ptr, b, k, length, drafts, accepted, last, peak, BLOCK_T)


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
    batch, k = draft_tokens.shape
    vocab = target_logits.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=target_logits.device)

    results = empty(batch, k + 1, dtype=torch.int64), empty(batch, dtype=torch.int32), empty(batch, dtype=torch.int32)
    if batch == 0:
        return results
    params = dense(temperature, top_k, top_p, min_p, typical_p, seed, position)
    temperature, _, _, _, _, seed, position = params
    draft_tokens, draft_lse, draft_lens = dense(draft_tokens, draft_lse, draft_lens)
    if k == 0 or method not in ("rejection", "block"):
        draft_logits = None
    if method == "block" and draft_logits is None:
        method = "rejection"  # the same decision where q is one-hot: kernels/README.md
    filters = method != "greedy" and has_filters is not False
    with on_device(target_logits):
        rows = row_stats(
            target_logits,
            draft_logits if draft_lse is None or filters else None,
            draft_lens,
            *params,
            has_filters=filters,
            stream=STREAM_COUPLED.value if method == "coupled" else -1,
            greedy=method == "greedy",
            entropy=method == "typical",
            drafts_for_filters=filters and draft_lse is not None,
        )
        all_rows, splits = rows.best_id.shape[1:]
        stats = (rows.stats, rows.best, rows.best_id)
        drafts = (draft_tokens, draft_lens)
        sizes = (k, all_rows, splits, vocab, draft_tokens.stride(0))
        flags = {
            "BLOCK_T": max(8, triton.next_power_of_2(k + 1)),
            "BLOCK_S": rows.block_s,
            "HAS_LENS": draft_lens is not None,
            **EXACT,
        }
        merge_warps = 8 if k > 7 else 1
        if method in ("greedy", "coupled"):
            _keep_winners_kernel[(batch,)](*results, *stats, *drafts, *sizes, num_warps=merge_warps, **flags)
            return results
        race_rows = k + 1 if method == "block" else 1
        race = (
            empty(batch, dtype=torch.int32),
            empty(batch, k + 1) if method == "block" else None,
            empty(batch, race_rows, splits) if method == "block" else None,
            empty(batch, race_rows, splits, 2, 2),
            empty(batch, race_rows, splits, 2, dtype=torch.int32),
        )
        _race_kernel[(batch * race_rows, splits)](
            *race,
            target_logits,
            draft_logits,
            draft_lse,
            *drafts,
            *stats,
            rows.cut,
            temperature,
            seed,
            position,
            epsilon,
            delta,
            *sizes,
            *target_logits.stride()[:2],
            *(draft_logits.stride()[:2] if draft_logits is not None else (0, 0)),
            draft_lse.stride(0) if draft_lse is not None else 0,
            race_rows,
            METHOD=_RACES[method].value,
            SPLIT=SPLIT_V,
            HAS_DRAFT=draft_logits is not None,
            HAS_LSE=draft_lse is not None,
            HAS_CUT=rows.cut is not None,
            num_warps=8,
            **(at_most_registers(128, chip_of(target_logits.device)) if k <= 7 else {}),
            **flags,
        )
        _pick_kernel[(batch,)](
            *results,
            *race,
            *stats,
            *drafts,
            temperature,
            seed,
            position,
            *sizes,
            race_rows,
            METHOD=_RACES[method].value,
            num_warps=merge_warps,
            **flags,
        )
    return results
