"""``sample``: one token per row by a Gumbel race, and the log-sum-exp of what the filters keep.

Two launches: each row's statistics with the vocabulary split across programs (``_rows.py``), and one program a row that merges
the splits. Two more, small ones, where a request may filter. A row with NaN or +inf gives some id of the vocabulary and a
log-sum-exp of +inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, dense, on_device
from specdec_triton.kernels._primitives import STREAM_COUPLED, STREAM_DRAFT
from specdec_triton.kernels._rows import row_stats
from specdec_triton.kernels._splits import merge_sums, merge_winners


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
    peak, log_sum = merge_sums(stats_ptr, at, mask)
    lse = tl.where(peak == float("inf"), peak, peak + log_sum)
    tl.store(tokens_ptr + b, merge_winners(best_ptr, best_id_ptr, at, mask)[1].to(tl.int64))
    tl.store(lse_ptr + b, lse)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None,
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
    params = dense(temperature, top_k, top_p, min_p, typical_p, seed, position)
    stream = STREAM_COUPLED if node is None else STREAM_DRAFT
    with on_device(logits):
        rows = row_stats(
            logits[:, None],
            None,
            None,
            *params,
            has_filters=has_filters is not False,
            stream=stream.value,
            node=node or 0,
        )
        _merge_rows_kernel[(batch,)](
            tokens, lse, rows.stats, rows.best, rows.best_id, rows.splits, BLOCK_S=rows.block_s, num_warps=1, **EXACT
        )
    return tokens, lse
