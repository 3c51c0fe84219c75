"""``sample``: one token per row by a Gumbel race, and the log-sum-exp of what the filters keep.

Two launches, three where a row filters: the cut of each row, its statistics with the vocabulary split across programs
(``_rows.py``), and one program a row that merges the splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import on_device
from specdec_triton.kernels._primitives import NEG_INF, STREAM_COUPLED, STREAM_DRAFT
from specdec_triton.kernels._rows import row_cut, row_stats


@triton.jit
def merge_sums(stats_ptr, at, mask):
    """Log-sum-exp over the last axis of the splits at ``at``, and the maximum (+inf: the row held NaN or +inf)."""
    highest = tl.load(stats_ptr + at * 2, mask=mask, other=NEG_INF)
    total = tl.load(stats_ptr + at * 2 + 1, mask=mask, other=0.0)
    axis: tl.constexpr = len(highest.shape) - 1
    peak = tl.max(highest, axis)
    finite = tl.where((peak == NEG_INF) | (peak == float("inf")), 0.0, peak)
    return finite + tl.log(tl.sum(total * tl.exp(highest - tl.expand_dims(finite, axis)), axis)), peak


@triton.jit
def merge_winners(best_ptr, best_id_ptr, at, mask):
    """The id of the largest value over the last axis, the lowest of equal ones."""
    value = tl.load(best_ptr + at, mask=mask, other=NEG_INF)
    token = tl.load(best_id_ptr + at, mask=mask, other=2147483647)
    axis: tl.constexpr = len(value.shape) - 1
    best = tl.max(value, axis)
    return tl.min(tl.where(value == tl.expand_dims(best, axis), token, 2147483647), axis)


@triton.jit(do_not_specialize=["splits"])
def _merge_rows_kernel(
    tokens_ptr,  # int64 [B]
    lse_ptr,  # fp32 [B]
    stats_ptr,
    best_ptr,
    best_id_ptr,
    splits,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    at = b * splits + split
    mask = split < splits
    lse, _ = merge_sums(stats_ptr, at, mask)
    tl.store(tokens_ptr + b, merge_winners(best_ptr, best_id_ptr, at, mask).to(tl.int64))
    tl.store(lse_ptr + b, lse)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    has_filters: bool | None,
    node: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 ``[B]`` and the log-sum-exp fp32 ``[B]``; see ``specdec_triton.ops.sample``."""
    batch = logits.shape[0]
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    lse = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch == 0:
        return tokens, lse
    rows = logits[:, None]
    with on_device(logits):
        cut = None if has_filters is False else row_cut(rows, temperature, top_k, top_p, min_p, None, 0)
        stream = STREAM_COUPLED if node is None else STREAM_DRAFT
        stats, best, best_id = row_stats(rows, temperature, cut, None, 0, seed, position, node or 0, stream.value)
        splits = best.shape[-1]
        _merge_rows_kernel[(batch,)](
            tokens, lse, stats, best, best_id, splits, BLOCK_S=triton.next_power_of_2(splits), num_warps=1
        )
    return tokens, lse
