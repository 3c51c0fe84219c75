"""What ``sample`` and ``accept_reject`` need of a row of logits: its maximum, log-sum-exp and winner, filtered or not.

Every row is read once, the vocabulary split across programs, raw and in place. Where a request filters, two small kernels, a
program for each row, find the exact cut without a sort and without reading the row again:

1. ``_row_stats_kernel``, grid ``(splits, R, B)``: maximum, sums and winner (argmax, or Gumbel race) of SPLIT_V tokens, and the
   maxima of their groups of 32.
2. ``_candidates_kernel``, grid ``(R, B)``: a bound that no token below can pass, found among the group maxima alone (if k groups
   hold a token >= c, so do k tokens), and the groups that reach it. Of 151,936 tokens, top-k 50 leaves 50 groups.
3. ``_cut_kernel``, grid ``(R, B)``: the smallest value that top-k, top-p and min-p keep, by bisection over the candidates; ends
   are moved to values that occur, so that it takes about as many steps as the candidates have bits. Then the statistics of the
   kept tokens replace the row's.

A flat row under a large top-p leaves many candidates: exact still, and slower. R rows are the target's, then the drafter's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of
from specdec_triton.kernels._primitives import (
    NEG_INF,
    STREAM_COUPLED,
    gumbel,
    gumbel_of,
    inverse_of,
    scaled_logits,
)

SPLIT_V = 4096  # tokens of a split
_GROUP = 32  # tokens that share a maximum
_PEAKS = 4096  # group maxima of a block
_BLOCK_G = 64  # candidate groups of a block
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))
_HIGHEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def load_row(row_ptr, first, vocab, inverse, BLOCK: tl.constexpr):
    """Scaled logits of the tokens ``first .. first + BLOCK - 1``; -inf past the vocabulary."""
    token = first + tl.arange(0, BLOCK)
    return scaled_logits(tl.load(row_ptr + token, mask=token < vocab, other=NEG_INF), inverse)


@triton.jit
def pick_best(value, token):
    """The largest value and its id, the lowest of equal ones."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, _HIGHEST), 0)


@triton.jit
def merge_sums(stats_ptr, at, mask):
    """Log-sum-exp over the last axis of the splits at ``at``, and the maximum (+inf: the row held NaN or +inf)."""
    highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
    total = tl.load(stats_ptr + at * 3 + 1, mask=mask, other=0.0)
    axis: tl.constexpr = len(highest.shape) - 1
    peak = tl.max(highest, axis)
    finite = tl.where((peak == NEG_INF) | (peak == float("inf")), 0.0, peak)
    return finite + tl.log(tl.sum(total * tl.exp(highest - tl.expand_dims(finite, axis)), axis)), peak


@triton.jit
def merge_entropy(stats_ptr, at, mask):
    """Entropy in nats over the last axis: log Z - sum of e (s - m) / Z, where Z is the sum of e = exp(s - m)."""
    highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
    total = tl.load(stats_ptr + at * 3 + 1, mask=mask, other=0.0)
    moment = tl.load(stats_ptr + at * 3 + 2, mask=mask, other=0.0)
    axis: tl.constexpr = len(highest.shape) - 1
    shift = tl.where(highest == NEG_INF, 0.0, highest - tl.expand_dims(tl.max(highest, axis), axis))
    weight = tl.where(highest == NEG_INF, 0.0, tl.exp(shift))
    z = tl.sum(total * weight, axis)
    return tl.log(z) - tl.sum((moment + total * shift) * weight, axis) / z


@triton.jit
def merge_winners(best_ptr, best_id_ptr, at, mask):
    """The id of the largest value over the last axis, the lowest of equal ones."""
    value = tl.load(best_ptr + at, mask=mask, other=NEG_INF)
    token = tl.load(best_id_ptr + at, mask=mask, other=_HIGHEST)
    axis: tl.constexpr = len(value.shape) - 1
    best = tl.max(value, axis)
    return tl.min(tl.where(value == tl.expand_dims(best, axis), token, _HIGHEST), axis)


@triton.jit
def _filters(temperature, top_k, top_p, min_p, vocab):
    """Whether a request filters at all."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0))


@triton.jit
def _store_part(stats_ptr, best_ptr, best_id_ptr, at, s, value, token, bad, ENTROPY: tl.constexpr):
    """Statistics of one tile of scaled logits as the split ``at`` of its row."""
    highest = tl.max(s, 0)
    finite = tl.where(highest == NEG_INF, 0.0, highest)
    e = tl.exp(s - finite)
    tl.store(stats_ptr + at * 3, tl.where(bad, float("inf"), highest))
    tl.store(stats_ptr + at * 3 + 1, tl.sum(e, 0))
    if ENTROPY:
        tl.store(stats_ptr + at * 3 + 2, tl.sum(tl.where(s == NEG_INF, 0.0, e * (s - finite)), 0))
    best, best_id = pick_best(value, token)
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, best_id)


@triton.jit(do_not_specialize=["rows", "node"])
def _row_stats_kernel(
    stats_ptr,  # fp32 [B,R,splits,3]: maximum m (+inf: NaN or +inf found), sum of e = exp(s - m), sum of e (s - m)
    best_ptr,  # fp32 [B,R,splits]: the winner's value
    best_id_ptr,  # int32 [B,R,splits]
    peaks_ptr,  # fp32 [B,R,splits * SPLIT / GROUP]: maxima of groups
    logits_ptr,  # [B,rows,V]
    draft_logits_ptr,  # [B,R - rows,V]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    min_p_ptr,  # fp32 [B]
    lens_ptr,  # int32 [B]: drafts; target rows past them, and draft rows from them on, are skipped
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    vocab,
    rows,
    node,
    stride_batch,
    stride_row,
    stride_draft_batch,
    stride_draft_row,
    STREAM: tl.constexpr,  # of the race's noise; -1: argmax
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GREEDY: tl.constexpr,  # every request, whatever its temperature
    ENTROPY: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    DRAFTS_FOR_FILTERS: tl.constexpr,  # draft rows matter only where the request filters
):
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    temperature = 0.0 if GREEDY else tl.load(temperature_ptr + b)
    inverse = inverse_of(temperature)
    if HAS_LENS:
        length = tl.load(lens_ptr + b)
        if ((row < rows) & (row > length)) | (row >= rows + length):
            return
    if HAS_FILTERS:
        filters = _filters(
            temperature, tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b), vocab
        )  # fmt: skip
        if DRAFTS_FOR_FILTERS:
            if (row >= rows) & (filters == 0):
                return
    first = split * SPLIT
    if HAS_DRAFT:
        if row < rows:
            s = load_row(logits_ptr + b * stride_batch + row.to(tl.int64) * stride_row, first, vocab, inverse, SPLIT)
        else:
            draft = draft_logits_ptr + b * stride_draft_batch + (row - rows).to(tl.int64) * stride_draft_row
            s = load_row(draft, first, vocab, inverse, SPLIT)
    else:
        s = load_row(logits_ptr + b * stride_batch + row.to(tl.int64) * stride_row, first, vocab, inverse, SPLIT)
    bad = tl.max(((s != s) | (s == float("inf"))).to(tl.int32), 0) > 0
    s = tl.where(s == s, s, NEG_INF)

    value = s
    if STREAM >= 0:
        if temperature > 0:
            position = tl.load(position_ptr + b)
            if STREAM == STREAM_COUPLED:
                position += row
            value = s + gumbel(tl.load(seed_ptr + b), position, node, STREAM, first, SPLIT)
    at = (b * tl.num_programs(1) + row) * tl.num_programs(0) + split
    _store_part(stats_ptr, best_ptr, best_id_ptr, at, s, value, first + tl.arange(0, SPLIT), bad, ENTROPY)
    if HAS_FILTERS:
        if filters:
            GROUPS: tl.constexpr = SPLIT // GROUP
            tl.store(peaks_ptr + at * GROUPS + tl.arange(0, GROUPS), tl.max(tl.reshape(s, [GROUPS, GROUP]), 1))


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high):
    """The middle of two ordered keys, above low."""
    return low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit
def _weigh_peaks(peaks, key, highest, groups, BY_MASS, BLOCK: tl.constexpr):
    """Of the group maxima >= key: how many (BY_MASS: their mass), the least of them, and the largest of the others.

    The groups past the vocabulary are there too, as -inf: they weigh nothing once key is above it.
    """
    weight, above, below = 0.0, _HIGHEST, _LOWEST
    for start in range(0, groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        inside = group < groups
        peak = tl.load(peaks + group, mask=inside, other=NEG_INF)
        order = _ordered(peak)
        reaches = inside & (order >= key)
        each = tl.where(BY_MASS, tl.exp(peak - highest), 1.0)
        weight += tl.sum(tl.where(reaches, each, 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(reaches, order, _HIGHEST), 0))
        below = tl.maximum(below, tl.max(tl.where(inside & (order < key), order, _LOWEST), 0))
    return weight, above, below


@triton.jit(do_not_specialize=["rows", "splits", "vocab"])
def _candidates_kernel(
    candidates_ptr,  # int32 [B,R,splits * SPLIT / GROUP]: groups that may hold a kept token
    bound_ptr,  # int32 [B,R,2]: how many groups, and the bound as an ordered key
    stats_ptr,  # in place, as are the winners: the sums go to split 0
    best_ptr,
    peaks_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lens_ptr,
    vocab,
    rows,
    splits,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    row, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    if _filters(temperature, top_k, top_p, min_p, vocab) == 0:
        return
    if HAS_LENS:
        length = tl.load(lens_ptr + b)
        if ((row < rows) & (row > length)) | (row >= rows + length):
            return
    at = b * tl.num_programs(0) + row
    part = tl.arange(0, BLOCK_S)
    entry = at * splits + part
    lse, highest = merge_sums(stats_ptr, entry, part < splits)
    tl.store(bound_ptr + at * 2, 0)
    if (highest == NEG_INF) | (highest == float("inf")):
        return
    # From here on the row is its split 0, which the cut kernel will fill.
    total = tl.exp(lse - highest)
    tl.store(stats_ptr + entry * 3, tl.where(part == 0, highest, NEG_INF), mask=part < splits)
    tl.store(stats_ptr + entry * 3 + 1, tl.where(part == 0, total, 0.0), mask=part < splits)
    tl.store(stats_ptr + entry * 3 + 2, 0.0, mask=part < splits)
    tl.store(best_ptr + entry, NEG_INF, mask=part < splits)
    row_groups = splits * (SPLIT // GROUP)
    peaks = peaks_ptr + at * row_groups

    # The largest key that groups of enough weight reach: k of them, or (a little over) top-p of the mass.
    by_mass = (top_k <= 0) | (top_k >= vocab)
    enough = tl.where(by_mass, top_p * total * 1.0001, top_k.to(tl.float32))
    searching = (top_p < 1) | (by_mass == 0)
    low = _ordered(tl.where(searching, NEG_INF, highest + tl.log(min_p)))
    key, high = low, _ordered(highest)
    while searching:
        weight, above, below = _weigh_peaks(peaks, key, highest, row_groups, by_mass, BLOCK)
        low = tl.where(weight >= enough, above, low)
        high = tl.where(weight >= enough, high, below)
        key = _between(low, high)
        searching = low < high

    count = 0
    for start in range(0, row_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        peak = tl.load(peaks + group, mask=group < row_groups, other=NEG_INF)
        reaches = (group < (vocab + GROUP - 1) // GROUP) & (_ordered(peak) >= low)
        place = count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + at * row_groups + place, group, mask=reaches)
        count += tl.sum(reaches.to(tl.int32), 0)
    tl.store(bound_ptr + at * 2, count)
    tl.store(bound_ptr + at * 2 + 1, low)


@triton.jit
def _load_groups(
    logits, draft_logits, is_draft, candidates, start, count, vocab, inverse,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Scaled logits ``[BLOCK_G,GROUP]`` of the candidate groups from ``start`` on, the groups, and which tokens exist."""
    place = start + tl.arange(0, BLOCK_G)
    group = tl.load(candidates + place, mask=place < count, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = (place < count)[:, None] & (token < vocab)
    if HAS_DRAFT:
        if is_draft:
            s = scaled_logits(tl.load(draft_logits + token, mask=valid, other=NEG_INF), inverse)
        else:
            s = scaled_logits(tl.load(logits + token, mask=valid, other=NEG_INF), inverse)
    else:
        s = scaled_logits(tl.load(logits + token, mask=valid, other=NEG_INF), inverse)
    return s, group, valid


@triton.jit
def _weigh_tokens(
    logits, draft_logits, is_draft, candidates, count, vocab, inverse, key, highest,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Of the candidates >= key: how many, their mass, the least of them; and the largest of the others."""
    number, mass, above, below = 0.0, 0.0, _HIGHEST, _LOWEST
    for start in range(0, count, BLOCK_G):
        s, _, valid = _load_groups(
            logits, draft_logits, is_draft, candidates, start, count, vocab, inverse, GROUP, BLOCK_G, HAS_DRAFT
        )
        order = _ordered(s)
        reaches = valid & (order >= key)
        number += tl.sum(reaches.to(tl.float32))
        mass += tl.sum(tl.where(reaches, tl.exp(s - highest), 0.0))
        above = tl.minimum(above, tl.min(tl.where(reaches, order, _HIGHEST)))
        below = tl.maximum(below, tl.max(tl.where(valid & (order < key), order, _LOWEST)))
    return number, mass, above, below


@triton.jit(do_not_specialize=["rows", "splits", "node"])
def _cut_kernel(
    cut_ptr,  # fp32 [B,R]: scaled logits below it are removed; -inf where the request does not filter
    stats_ptr,  # in place, as are the winners: those of the kept tokens in split 0
    best_ptr,
    best_id_ptr,
    candidates_ptr,
    bound_ptr,
    logits_ptr,  # [B,rows,V]
    draft_logits_ptr,  # [B,R - rows,V]
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lens_ptr,
    seed_ptr,
    position_ptr,
    vocab,
    rows,
    splits,
    node,
    stride_batch,
    stride_row,
    stride_draft_batch,
    stride_draft_row,
    STREAM: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    row, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = b * tl.num_programs(0) + row
    tl.store(cut_ptr + at, NEG_INF)
    temperature = tl.load(temperature_ptr + b)
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    if _filters(temperature, top_k, top_p, min_p, vocab) == 0:
        return
    if HAS_LENS:
        length = tl.load(lens_ptr + b)
        if ((row < rows) & (row > length)) | (row >= rows + length):
            return
    count, low = tl.load(bound_ptr + at * 2), tl.load(bound_ptr + at * 2 + 1)
    if count == 0:  # a row with NaN, +inf or nothing but -inf
        return
    inverse = inverse_of(temperature)
    candidates = candidates_ptr + at * splits * (SPLIT // GROUP)
    logits = logits_ptr + b * stride_batch + row.to(tl.int64) * stride_row
    is_draft = row >= rows
    draft_logits = draft_logits_ptr
    if HAS_DRAFT:
        draft_logits += b * stride_draft_batch + (row - rows).to(tl.int64) * stride_draft_row
    entry = at * splits
    highest, total = tl.load(stats_ptr + entry * 3), tl.load(stats_ptr + entry * 3 + 1)

    # The largest key that enough of the candidates reach: top_k of them; then, of what that leaves, top_p of the mass.
    mass = total
    for filter in range(2):
        by_mass = filter == 1
        enough = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
        searching = tl.where(by_mass, top_p < 1, (top_k > 0) & (top_k < vocab))
        key, high = low, _ordered(highest)
        while searching:
            number, reached, above, below = _weigh_tokens(
                logits, draft_logits, is_draft, candidates, count, vocab, inverse, key, highest,
                GROUP, BLOCK_G, HAS_DRAFT,
            )  # fmt: skip
            reaches = tl.where(by_mass, reached, number) >= enough
            low = tl.where(reaches, above, low)
            mass = tl.where(reaches, reached, mass)
            high = tl.where(reaches, high, below)
            key = _between(low, high)
            searching = low < high
    cut = _unordered(low)
    cut = tl.maximum(cut, highest + tl.log(min_p))
    tl.store(cut_ptr + at, cut)

    total, moment = 0.0, 0.0
    best = tl.full([], NEG_INF, tl.float32)
    best_id = tl.full([], _HIGHEST, tl.int32)
    for start in range(0, count, BLOCK_G):
        s, group, valid = _load_groups(
            logits, draft_logits, is_draft, candidates, start, count, vocab, inverse, GROUP, BLOCK_G, HAS_DRAFT
        )
        kept = valid & (s >= cut)
        e = tl.where(kept, tl.exp(s - highest), 0.0)
        total += tl.sum(e)
        moment += tl.sum(tl.where(e > 0, e * (s - highest), 0.0))
        value = s
        if STREAM >= 0:
            position = tl.load(position_ptr + b)
            if STREAM == STREAM_COUPLED:
                position += row
            quad = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
            value = s + gumbel_of(tl.load(seed_ptr + b), position, node, STREAM, quad)
        value = tl.where(kept, value, NEG_INF)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        block_best = tl.max(value)  # candidates come in ascending order: of equal values the first stays
        block_id = tl.min(tl.where(value == block_best, token, _HIGHEST))
        best_id = tl.where(block_best > best, block_id, best_id)
        best = tl.maximum(best, block_best)
    tl.store(stats_ptr + entry * 3 + 1, total)
    tl.store(stats_ptr + entry * 3 + 2, moment)
    tl.store(best_ptr + entry, best)
    tl.store(best_id_ptr + entry, best_id)


class RowStats(NamedTuple):
    """What is known of R rows, split over the vocabulary; the kernels describe the fields."""

    stats: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor
    cut: torch.Tensor | None

    @property
    def splits(self) -> int:
        return self.best.shape[-1]

    @property
    def block_s(self) -> int:
        """Splits of a merging tile: one size up to V = 262,144."""
        return max(64, triton.next_power_of_2(self.splits))


def row_stats(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    lens: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool,
    stream: int = -1,
    node: int = 0,
    greedy: bool = False,
    entropy: bool = False,
    drafts_for_filters: bool = False,
) -> RowStats:
    """Statistics of logits ``[B,rows,V]`` and, behind them, draft_logits ``[B,K,V]``: one launch, three with filters."""
    batch, rows, vocab = logits.shape
    all_rows = rows + (draft_logits.shape[1] if draft_logits is not None else 0)
    splits = triton.cdiv(vocab, SPLIT_V)
    shape = (batch, all_rows, splits)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    stats, best, best_id = empty(*shape, 3), empty(*shape), empty(*shape, dtype=torch.int32)
    peaks = empty(*shape, SPLIT_V // _GROUP) if has_filters else None
    params = (temperature, top_k, top_p, min_p, lens)
    strides = (*logits.stride()[:2], *(draft_logits.stride()[:2] if draft_logits is not None else (0, 0)))
    flags = {"SPLIT": SPLIT_V, "GROUP": _GROUP, "HAS_LENS": lens is not None, **EXACT}
    _row_stats_kernel[(splits, all_rows, batch)](
        stats,
        best,
        best_id,
        peaks,
        logits,
        draft_logits,
        *params,
        seed,
        position,
        vocab,
        rows,
        node,
        *strides,
        STREAM=stream,
        GREEDY=greedy,
        ENTROPY=entropy,
        HAS_DRAFT=draft_logits is not None,
        HAS_FILTERS=has_filters,
        DRAFTS_FOR_FILTERS=drafts_for_filters,
        num_warps=8,
        **flags,
    )
    if peaks is None:
        return RowStats(stats, best, best_id, None)
    result = RowStats(stats, best, best_id, empty(batch, all_rows))
    candidates, bound = torch.empty_like(peaks, dtype=torch.int32), empty(batch, all_rows, 2, dtype=torch.int32)
    _candidates_kernel[(all_rows, batch)](
        candidates,
        bound,
        stats,
        best,
        peaks,
        *params,
        vocab,
        rows,
        splits,
        BLOCK_S=result.block_s,
        BLOCK=_PEAKS,
        num_warps=8,
        **flags,
    )
    _cut_kernel[(all_rows, batch)](
        result.cut,
        stats,
        best,
        best_id,
        candidates,
        bound,
        logits,
        draft_logits,
        *params,
        seed,
        position,
        vocab,
        rows,
        splits,
        node,
        *strides,
        STREAM=stream,
        BLOCK_G=_BLOCK_G,
        HAS_DRAFT=draft_logits is not None,
        num_warps=4,
        **at_most_registers(128, chip_of(logits.device)),
        **flags,
    )
    return result
