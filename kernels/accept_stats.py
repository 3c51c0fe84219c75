"""``accept_stats``: the decision of ``accept_reject`` with a one-hot q, from the statistics that ``head_stats`` leaves.

One launch, one program a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, at_most_registers, chip_of, dense, on_device
from specdec_triton.kernels._head import merge_parts
from specdec_triton.kernels._primitives import NEG_INF, PAD, STREAM_ACCEPT, uniform


@triton.jit(do_not_specialize=["k", "parts", "vocab"])
def _accept_stats_kernel(
    tokens_ptr,  # int64 [B,K+1]
    num_accepted_ptr,  # int32 [B]
    status_ptr,  # int32 [B]
    stats_ptr,  # fp32 [B,K+1,C,3]
    best_ptr,  # fp32 [B,K+1,C,2]
    best_id_ptr,  # int32 [B,K+1,C]
    draft_tokens_ptr,  # int64 [B,K]
    draft_lens_ptr,  # int32 [B]
    temperature_ptr,  # fp32 [B]
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    k,
    parts,  # C
    vocab,
    REJECTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_T)
    length = tl.load(draft_lens_ptr + b) if HAS_LENS else k
    drafts = tl.load(draft_tokens_ptr + b * k + step, mask=step < k, other=PAD)
    usable = tl.min(tl.where((step < length) & (drafts >= 0) & (drafts < vocab), k, step), 0)
    peak, log_sum, draft_s, best, best_id = merge_parts(
        stats_ptr, best_ptr, best_id_ptr, b * (k + 1) + step, step <= length, parts, BLOCK_S
    )
    winner = best_id.to(tl.int64)
    keeps = drafts == winner
    if REJECTION:
        if tl.load(temperature_ptr + b) > 0:
            u = uniform(tl.load(seed_ptr + b), tl.load(position_ptr + b), step, STREAM_ACCEPT)
            keeps = tl.log(u) < (draft_s - peak) - log_sum
            # Rejected although no other token has any probability: p = 1 up to rounding.
            winner = tl.where((step < usable) & (best == NEG_INF), drafts, winner)
    accepted = tl.min(tl.where((step < usable) & keeps, k, step), 0)
    bad = ((peak == float("inf")) | (peak == NEG_INF)) & (step <= length)
    bad = tl.max(bad.to(tl.int32), 0)
    accepted = tl.where(bad > 0, 0, accepted)
    last = tl.where(bad > 0, 0, winner)
    out = tl.where(step < accepted, drafts, tl.where(step == accepted, last, PAD))
    tl.store(tokens_ptr + b * (k + 1) + step, out, mask=step <= k)
    tl.store(num_accepted_ptr + b, accepted)
    tl.store(status_ptr + b, bad)


def accept_stats(
    stats: torch.Tensor,
    best: torch.Tensor,
    best_id: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab: int,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens ``[B,K+1]``, num_accepted ``[B]``, status ``[B]``; see ``specdec_triton.ops.accept_stats``."""
    batch, k = draft_tokens.shape
    device = stats.device
    results = (
        torch.empty(batch, k + 1, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    if batch == 0:
        return results
    block_t = max(8, triton.next_power_of_2(k + 1))
    with on_device(stats):
        _accept_stats_kernel[(batch,)](
            *results,
            *dense(stats, best, best_id, draft_tokens, draft_lens, temperature, seed, position),
            k,
            best_id.shape[-1],
            vocab,
            REJECTION=method in ("rejection", "block"),
            BLOCK_T=block_t,
            BLOCK_S=max(2048 // block_t, 32),
            HAS_LENS=draft_lens is not None,
            num_warps=8,
            **at_most_registers(255, chip_of(device)),
            **EXACT,
        )
    return results
