"""The logits of the last layer as tiles in registers, and the merge of what programs keep of them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from specdec_triton.kernels._primitives import INTERPRETING, NEG_INF, narrow, product, tanh, widen
from specdec_triton.kernels._splits import HIGHEST, pick_best


@triton.jit
def logits_tile(
    hidden_row, weight_ptr, bias_ptr, row_exists, column, columns, width, stride_weight_row, scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BLOCK_M,BLOCK_N]``: what ``skinny_linear`` and transformers would have written, rounded after every step as they do.

    Args:
        hidden_row: pointers ``[BLOCK_M,1]``. column: int64 ``[1,BLOCK_N]``.
    """
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    exists = column < columns
    weight_column = weight_ptr + column * stride_weight_row
    blocks = tl.cdiv(width, BLOCK_K)
    share = tl.cdiv(blocks, SPLITS)
    x = product(
        hidden_row, weight_column, row_exists, exists, 0, tl.minimum(share, blocks), width, 1, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    for split in tl.static_range(1, SPLITS):
        first = split * share
        x += product(
            hidden_row, weight_column, row_exists, exists, first, tl.minimum(first + share, blocks), width, 1,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if HAS_BIAS:
        x += widen(tl.load(bias_ptr + column, mask=exists, other=0.0)).to(tl.float32)
    x = narrow(x, dtype).to(tl.float32)
    if HAS_SCALE:
        x = narrow(x * scale, dtype).to(tl.float32)
    if HAS_SOFTCAP:
        if INTERPRETING:
            x = tanh(narrow(tl.div_rn(x, softcap), dtype).to(tl.float32))
        else:  # PyTorch multiplies by the inverse there, and takes tanh from this library
            x = libdevice.tanh(narrow(x * tl.div_rn(1.0, softcap), dtype).to(tl.float32))
        x = narrow(narrow(x, dtype).to(tl.float32) * softcap, dtype).to(tl.float32)
    return x


@triton.jit
def merge_parts(stats_ptr, best_ptr, best_id_ptr, row, exists, parts, BLOCK_S: tl.constexpr):
    """Of rows ``[T]``, from their parts: the maximum m, the log of the sum of exp(s - m), s of the draft, and the winner: the larger part of
    its value, its id."""
    peak = tl.full(row.shape, NEG_INF, tl.float32)
    drafted, best, best_low = peak, peak, peak
    total = tl.zeros(row.shape, tl.float32)
    best_id = tl.full(row.shape, HIGHEST, tl.int32)
    for start in range(0, parts, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)[None, :]
        at = row[:, None] * parts + part
        mask = exists[:, None] & (part < parts)
        highest = tl.load(stats_ptr + at * 3, mask=mask, other=NEG_INF)
        sums = tl.load(stats_ptr + at * 3 + 1, mask=mask, other=0.0)
        drafted = tl.maximum(drafted, tl.max(tl.load(stats_ptr + at * 3 + 2, mask=mask, other=NEG_INF), 1))
        above = tl.maximum(peak, tl.max(highest, 1))
        finite = tl.where(tl.abs(above) < float("inf"), above, 0.0)
        total = total * tl.exp(peak - finite) + tl.sum(sums * tl.exp(highest - finite[:, None]), 1)
        peak = above
        high = tl.load(best_ptr + at * 2, mask=mask, other=NEG_INF)
        low = tl.load(best_ptr + at * 2 + 1, mask=mask, other=0.0)
        token = tl.load(best_id_ptr + at, mask=mask, other=HIGHEST)
        here, here_low, here_id = pick_best(high, low, token)
        same = (here == best) & (here_low == best_low)  # shards come in any order
        wins = (here > best) | ((here == best) & (here_low > best_low)) | (same & (here_id < best_id))
        best, best_low = tl.where(wins, here, best), tl.where(wins, here_low, best_low)
        best_id = tl.where(wins, here_id, best_id)
    return peak, tl.log(total), drafted, best, best_id
