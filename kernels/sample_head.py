"""``sample_head``: one token per row by a Gumbel race over the head's logits, which are not written, and their log-sum-exp.

Two launches: the logits' statistics (``head_stats.py``), and one program a row that merges their parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, on_device
from specdec_triton.kernels._head import merge_parts
from specdec_triton.kernels.head_stats import head_stats


@triton.jit(do_not_specialize=["parts", "vocab"])
def _merge_head_kernel(
    tokens_ptr,  # int64 [B]
    lse_ptr,  # fp32 [B]
    stats_ptr,
    best_ptr,
    best_id_ptr,
    parts,
    vocab,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    peak, log_sum, _, _, best_id = merge_parts(stats_ptr, best_ptr, best_id_ptr, row, row >= 0, parts, BLOCK_S)
    # Of a row of NaN nobody wins; what is drawn from it may be fed to a model, and must be an id.
    tl.store(tokens_ptr + row, tl.where(best_id < vocab, best_id, 0).to(tl.int64))
    tl.store(lse_ptr + row, tl.where(peak == float("inf"), peak, peak + log_sum))


def sample_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    node: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 ``[B]`` and the log-sum-exp fp32 ``[B]``; see ``specdec_triton.ops.sample_head``."""
    batch, vocab = hidden.shape[0], weight.shape[0]
    tokens = torch.empty(batch, dtype=torch.int64, device=hidden.device)
    lse = torch.empty(batch, dtype=torch.float32, device=hidden.device)
    if batch == 0:
        return tokens, lse
    layer, noise = (hidden[:, None], weight, bias, scale, softcap), (temperature, seed, position)
    race = "coupled" if node is None else "draft"
    stats = head_stats(*layer, None, None, *noise, 0, vocab, race, node or 0)
    with on_device(hidden):
        parts = stats[2].shape[-1]
        _merge_head_kernel[(batch,)](tokens, lse, *stats, parts, vocab, BLOCK_S=512, num_warps=4, **EXACT)
    return tokens, lse
