"""What ``sample`` and ``accept_reject`` need of rows of logits: maximum, log-sum-exp and winner, filtered or not.

``_row_stats_kernel``, grid ``(B * R, splits)``, reads every row once, raw and in place: for SPLIT_V of its tokens the maximum, the
sums and the winner (argmax, or Gumbel race). Where a request filters, ``_filters.py`` finds the cut and puts the kept tokens'
statistics in place of the row's. R rows are the target's, then the drafter's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of
from specdec_triton.kernels._filters import GROUP, filter_rows, filters_at_all
from specdec_triton.kernels._primitives import NEG_INF, STREAM_COUPLED, gumbel, inverse_of
from specdec_triton.kernels._splits import SPLIT_V, depth_of, is_skipped, load_row, pick_best, two_sum


@triton.jit
def _store_part(stats_ptr, at, s, bad, ENTROPY: tl.constexpr):
    """Statistics of one tile of scaled logits as the split ``at`` of its row."""
    highest = tl.max(s, 0)
    finite = tl.where(highest == NEG_INF, 0.0, highest)
    e = tl.exp(s - finite)
    tl.store(stats_ptr + at * 3, tl.where(bad, float("inf"), highest))
    tl.store(stats_ptr + at * 3 + 1, tl.sum(e, 0))
    if ENTROPY:
        tl.store(stats_ptr + at * 3 + 2, tl.sum(tl.where(s == NEG_INF, 0.0, e * (s - finite)), 0))


@triton.jit(do_not_specialize=["rows", "all_rows", "node", "stride_parents"])
def _row_stats_kernel(
    stats_ptr,  # fp32 [B,R,splits,3]: maximum m (+inf: NaN or +inf found), sum of e = exp(s - m), sum of e (s - m)
    best_ptr,  # fp32 [B,R,splits,2]: the winner's s, plus noise, as an exact sum of two numbers
    best_id_ptr,  # int32 [B,R,splits]
    peaks_ptr,  # fp32 [B,R,splits * SPLIT / GROUP]: maxima of groups
    logits_ptr,  # [B,rows,V]
    draft_logits_ptr,  # [B,R - rows,V]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    min_p_ptr,  # fp32 [B]
    typical_p_ptr,  # fp32 [B]
    lens_ptr,  # int32 [B]: drafts; target rows past them, and draft rows from them on, are skipped
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    parents_ptr,  # int64 [B,rows] (TREE)
    vocab,
    rows,
    all_rows,  # R
    node,
    stride_parents,
    stride_logits_batch,
    stride_logits_row,
    stride_draft_batch,
    stride_draft_row,
    STREAM: tl.constexpr,  # of the race's noise; -1: argmax
    TREE: tl.constexpr,  # the target rows are a tree's nodes, of which lens counts the root too
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GREEDY: tl.constexpr,  # every request, whatever its temperature
    ENTROPY: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    HAS_TYPICAL: tl.constexpr,
    DRAFTS_FOR_FILTERS: tl.constexpr,  # draft rows matter only where the request filters
):
    split = tl.program_id(1)
    b, row = (tl.program_id(0) // all_rows).to(tl.int64), tl.program_id(0) % all_rows
    temperature = 0.0 if GREEDY else tl.load(temperature_ptr + b)
    inverse = inverse_of(temperature)
    if HAS_LENS:
        length = tl.load(lens_ptr + b)
        if is_skipped(row, rows, length, TREE):
            return
    if HAS_FILTERS:
        typical_p = tl.load(typical_p_ptr + b) if HAS_TYPICAL else 1.0
        filters = filters_at_all(
            temperature, tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b), typical_p, vocab
        )  # fmt: skip
        if DRAFTS_FOR_FILTERS:
            if (row >= rows) & (filters == 0):
                return
    depth = 0  # looked up while registers are free
    if STREAM == STREAM_COUPLED:
        depth = depth_of(row, parents_ptr, b * stride_parents, TREE)
    first = split * SPLIT
    logits = logits_ptr + b * stride_logits_batch + row.to(tl.int64) * stride_logits_row
    if HAS_DRAFT:
        if row < rows:
            s = load_row(logits, first, vocab, inverse, SPLIT)
        else:
            draft = draft_logits_ptr + b * stride_draft_batch + (row - rows).to(tl.int64) * stride_draft_row
            s = load_row(draft, first, vocab, inverse, SPLIT)
    else:
        s = load_row(logits, first, vocab, inverse, SPLIT)
    bad = tl.max(((s != s) | (s == float("inf"))).to(tl.int32), 0) > 0
    s = tl.where(s == s, s, NEG_INF)

    high, low = s, tl.zeros([SPLIT], tl.float32)
    if STREAM >= 0:
        if temperature > 0:
            position = tl.load(position_ptr + b) + depth
            high, low = two_sum(s, gumbel(tl.load(seed_ptr + b), position, node, STREAM, first, SPLIT))
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split
    _store_part(stats_ptr, at, s, bad, ENTROPY)
    best, best_low, best_id = pick_best(high, low, first + tl.arange(0, SPLIT))
    tl.store(best_ptr + at * 2, best)
    tl.store(best_ptr + at * 2 + 1, best_low)
    tl.store(best_id_ptr + at, best_id)
    if HAS_FILTERS:
        if filters:
            GROUPS: tl.constexpr = SPLIT // GROUP
            tl.store(peaks_ptr + at * GROUPS + tl.arange(0, GROUPS), tl.max(tl.reshape(s, [GROUPS, GROUP]), 1))


class RowStats(NamedTuple):
    """What is known of R rows, split over the vocabulary; the kernels describe the fields."""

    stats: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor
    cut: torch.Tensor | None

    @property
    def splits(self) -> int:
        return self.best_id.shape[-1]

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
    typical_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    has_filters: bool,
    parents: torch.Tensor | None = None,
    stream: int = -1,
    node: int = 0,
    greedy: bool = False,
    entropy: bool = False,
    drafts_for_filters: bool = False,
) -> RowStats:
    """Statistics of logits ``[B,rows,V]`` and, behind them, draft_logits ``[B,K,V]``: one launch, three with filters.

    Args:
        parents: int64 ``[B,rows]``, of a tree whose nodes the rows are; None: rows follow one another.
    """
    batch, rows, vocab = logits.shape
    all_rows = rows + (draft_logits.shape[1] if draft_logits is not None else 0)
    splits = triton.cdiv(vocab, SPLIT_V)
    shape = (batch, all_rows, splits)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    stats, best, best_id = empty(*shape, 3), empty(*shape, 2), empty(*shape, dtype=torch.int32)
    peaks = empty(*shape, SPLIT_V // GROUP) if has_filters else None
    params, noise = (temperature, top_k, top_p, min_p, typical_p, lens), (seed, position, parents)
    stride_parents = 0 if parents is None else parents.stride(0)
    strides = (
        stride_parents,
        *logits.stride()[:2],
        *(draft_logits.stride()[:2] if draft_logits is not None else (0, 0)),
    )
    _row_stats_kernel[(batch * all_rows, splits)](
        stats,
        best,
        best_id,
        peaks,
        logits,
        draft_logits,
        *params,
        *noise,
        vocab,
        rows,
        all_rows,
        node,
        *strides,
        STREAM=stream,
        TREE=parents is not None,
        SPLIT=SPLIT_V,
        GROUP=GROUP,
        GREEDY=greedy,
        ENTROPY=entropy,
        HAS_LENS=lens is not None,
        HAS_DRAFT=draft_logits is not None,
        HAS_FILTERS=has_filters,
        HAS_TYPICAL=typical_p is not None,
        DRAFTS_FOR_FILTERS=drafts_for_filters,
        num_warps=8,
        **(at_most_registers(96, chip_of(logits.device)) if parents is not None else {}),
        **EXACT,
    )
    result = RowStats(stats, best, best_id, None)
    if peaks is None:
        return result
    cut = filter_rows(
        stats, best, best_id, peaks, logits, draft_logits, params, noise, strides, stream, node, result.block_s
    )
    return result._replace(cut=cut)
