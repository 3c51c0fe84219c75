"""What ``sample`` and ``accept_reject`` do to rows of logits: one pass over each row, the vocabulary split across programs.

``_row_stats_kernel``, grid ``(splits, rows, B)``: for its part of a row, the maximum and sum that make the log-sum-exp, and the
winner of the row: the argmax, or the Gumbel race's. Raw logits are read in place, in their own dtype.

``_row_cut_kernel``, grid ``(rows, B)``, only where some request filters: the smallest scaled logit that top-k, top-p and min-p
keep, by bisection over the 2^32 ordered fp32 numbers, exact for ties. Rows without filters end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._primitives import NEG_INF, STREAM_COUPLED, gumbel, scaled_logits

SPLIT_V = 8192  # tokens of a split
BLOCK_V = 1024
_RUNTIME = ["vocab", "rows", "extra", "node"]


@triton.jit(do_not_specialize=_RUNTIME)
def _row_stats_kernel(
    stats_ptr,  # fp32 [B,rows,splits,2]: maximum of the kept scaled logits (+inf: NaN or +inf found), sum of exp(s - maximum)
    best_ptr,  # fp32 [B,rows,splits]: the winner's value
    best_id_ptr,  # int32 [B,rows,splits]
    logits_ptr,  # [B,rows,V]
    temperature_ptr,  # fp32 [B]
    cut_ptr,  # fp32 [B,rows]
    lens_ptr,  # int32 [B]: rows at lens + extra and beyond are skipped
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    vocab,
    rows,
    extra,
    node,
    stride_batch,
    stride_row,
    STREAM: tl.constexpr,  # of the race's noise; -1: argmax
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if HAS_LENS:
        if row >= tl.load(lens_ptr + b) + extra:
            return
    temperature = tl.load(temperature_ptr + b)
    races = False
    if STREAM >= 0:
        races = temperature > 0
        seed = tl.load(seed_ptr + b)
        position = tl.load(position_ptr + b)
        if STREAM == STREAM_COUPLED:
            position += row
    if HAS_CUT:
        cut = tl.load(cut_ptr + b * rows + row)
    logits = logits_ptr + b * stride_batch + row.to(tl.int64) * stride_row

    nothing = tl.full([], NEG_INF, tl.float32)
    highest, total, bad = nothing, tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    best, best_id = nothing, split * SPLIT
    for i in range(SPLIT // BLOCK):
        first = split * SPLIT + i * BLOCK
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=NEG_INF)
        s = scaled_logits(x, temperature)
        bad = tl.maximum(bad, tl.max(((s != s) | (s == float("inf"))).to(tl.int32), 0))
        if HAS_CUT:
            s = tl.where(s < cut, NEG_INF, s)
        new_highest = tl.maximum(highest, tl.max(s, 0))
        finite = tl.where(new_highest == NEG_INF, 0.0, new_highest)
        total = total * tl.exp(highest - finite) + tl.sum(tl.exp(s - finite), 0)
        highest = new_highest
        value = s
        if STREAM >= 0:
            if races:
                value = s + gumbel(seed, position, node, STREAM, first, BLOCK)
        block_best = tl.max(value, 0)
        block_id = tl.min(tl.where(value == block_best, token, vocab), 0)
        better = block_best > best  # of equal ones the first stays: the lowest id
        best_id = tl.where(better, block_id, best_id)
        best = tl.where(better, block_best, best)
    at = (b * rows + row) * tl.num_programs(0) + split
    tl.store(stats_ptr + at * 2, tl.where(bad > 0, float("inf"), highest))
    tl.store(stats_ptr + at * 2 + 1, total)
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, best_id)


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, temperature, key, highest, vocab, STRICT: tl.constexpr, BLOCK: tl.constexpr):
    """How many scaled logits lie at or above ``key`` (STRICT: above), and their sum of exp(s - highest)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        s = scaled_logits(tl.load(logits + token, mask=token < vocab, other=NEG_INF), temperature)
        order = _ordered(s)
        inside = (order > key) if STRICT else (order >= key)
        inside = inside & (s > NEG_INF)
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(s - highest), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit(do_not_specialize=["vocab", "rows", "extra"])
def _row_cut_kernel(
    cut_ptr,  # fp32 [B,rows]
    logits_ptr,  # [B,rows,V]
    temperature_ptr,  # fp32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # fp32 [B]
    min_p_ptr,  # fp32 [B]
    lens_ptr,  # int32 [B]
    vocab,
    rows,
    extra,
    stride_batch,
    stride_row,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    row, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + b)
    top_k, top_p, min_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), tl.load(min_p_ptr + b)
    skipped = temperature <= 0
    if HAS_LENS:
        skipped = skipped | (row >= tl.load(lens_ptr + b) + extra)
    cut = tl.full([], NEG_INF, tl.float32)
    logits = logits_ptr + b * stride_batch + row.to(tl.int64) * stride_row
    filters = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
    if filters & (skipped == 0):
        peaks = tl.full([BLOCK], NEG_INF, tl.float32)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < vocab, other=NEG_INF)
            peaks = tl.maximum(peaks, scaled_logits(x, temperature))
        highest = tl.max(peaks, 0)
        if (top_k > 0) & (top_k < vocab):
            # The largest key that at least top_k tokens reach. low does, high + 1 does not.
            low, high = _ordered(cut), _ordered(highest)
            while low < high:
                middle = low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)
                count, _ = _above(logits, temperature, middle, highest, vocab, False, BLOCK)
                low = tl.where(count >= top_k, middle, low)
                high = tl.where(count >= top_k, high, middle - 1)
            cut = _unordered(low)
        if top_p < 1:
            # The smallest key above which the kept tokens hold less than top_p of what top-k left.
            low, high = _ordered(cut), _ordered(highest)
            _, mass = _above(logits, temperature, low, highest, vocab, False, BLOCK)
            while low < high:
                middle = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
                _, before = _above(logits, temperature, middle, highest, vocab, True, BLOCK)
                high = tl.where(before < top_p * mass, middle, high)
                low = tl.where(before < top_p * mass, low, middle + 1)
            cut = tl.maximum(cut, _unordered(low))
        if min_p > 0:
            cut = tl.maximum(cut, highest + tl.log(min_p))
    tl.store(cut_ptr + b * rows + row, cut)


def row_stats(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    cut: torch.Tensor | None,
    lens: torch.Tensor | None,
    extra: int,
    seed: torch.Tensor,
    position: torch.Tensor,
    node: int,
    stream: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """stats ``[B,rows,splits,2]``, best ``[B,rows,splits]`` and best_id of logits ``[B,rows,V]``."""
    batch, rows, vocab = logits.shape
    splits = triton.cdiv(vocab, SPLIT_V)
    stats = torch.empty(batch, rows, splits, 2, dtype=torch.float32, device=logits.device)
    best = torch.empty(batch, rows, splits, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(batch, rows, splits, dtype=torch.int32, device=logits.device)
    block = min(BLOCK_V, max(triton.next_power_of_2(vocab), 16))
    _row_stats_kernel[(splits, rows, batch)](
        stats,
        best,
        best_id,
        logits,
        temperature,
        cut,
        lens,
        seed,
        position,
        vocab,
        rows,
        extra,
        node,
        logits.stride(0),
        logits.stride(1),
        STREAM=stream,
        SPLIT=min(SPLIT_V, triton.cdiv(vocab, block) * block),
        BLOCK=block,
        HAS_CUT=cut is not None,
        HAS_LENS=lens is not None,
        num_warps=4,
    )
    return stats, best, best_id


def row_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    lens: torch.Tensor | None,
    extra: int,
) -> torch.Tensor:
    """fp32 ``[B,rows]``: tokens whose scaled logit is below it are removed; -inf where nothing is."""
    batch, rows, vocab = logits.shape
    cut = torch.empty(batch, rows, dtype=torch.float32, device=logits.device)
    _row_cut_kernel[(rows, batch)](
        cut,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        lens,
        vocab,
        rows,
        extra,
        logits.stride(0),
        logits.stride(1),
        BLOCK=min(2 * BLOCK_V, max(triton.next_power_of_2(vocab), 16)),
        HAS_LENS=lens is not None,
        num_warps=8,
    )
    return cut
