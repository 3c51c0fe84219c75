"""``ngram_propose``: what followed the last earlier occurrence of the text's tail, one program a request.

The program walks over the text in blocks and keeps, for each lane, the best candidate so far: the longest match, then the
latest. Token i is a candidate's last one if the tokens before and at i equal the tail's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, dense, on_device
from specdec_triton.kernels._primitives import PAD

_BLOCK = 1024


@triton.jit(do_not_specialize=["k", "min_ngram", "max_ngram", "stride_batch"])
def _ngram_propose_kernel(
    draft_tokens_ptr,  # int64 [B,k]
    draft_lens_ptr,  # int32 [B]
    tokens_ptr,  # int64 [B,L]
    lens_ptr,  # int32 [B]
    k,
    min_ngram,
    max_ngram,
    stride_batch,
    stride_token,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + b)
    text = tokens_ptr + b * stride_batch
    best = tl.full([BLOCK], -1, tl.int64)  # match length * 2^32 + position
    for start in range(0, length - 1, BLOCK):
        end = (start + tl.arange(0, BLOCK)).to(tl.int64)
        run = end < length - 1
        matched = tl.zeros([BLOCK], tl.int64)
        for back in range(max_ngram):
            inside = run & (end >= back)  # so the tail reaches back as far
            tail = tl.load(text + tl.maximum(length - 1 - back, 0).to(tl.int64) * stride_token)
            run = inside & (tl.load(text + (end - back) * stride_token, mask=inside, other=0) == tail)
            matched += run.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= min_ngram, (matched << 32) + end, -1))
    winner = tl.max(best, 0)
    at = winner & 0xFFFFFFFF
    found = tl.where(winner >= 0, tl.minimum(length - 1 - at, k), 0).to(tl.int32)
    step = tl.arange(0, BLOCK_K)
    drafts = tl.load(text + (at + 1 + step) * stride_token, mask=step < found, other=PAD)
    tl.store(draft_tokens_ptr + b * k + step, drafts, mask=step < k)
    tl.store(draft_lens_ptr + b, found)


def ngram_propose(
    tokens: torch.Tensor, lens: torch.Tensor, k: int, min_ngram: int, max_ngram: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """draft_tokens int64 ``[B,k]`` padded with -1, draft_lens int32 ``[B]``; see ``specdec_triton.ops``."""
    batch, capacity = tokens.shape
    (lens,) = dense(lens)
    drafts = torch.empty(batch, k, dtype=torch.int64, device=tokens.device)
    draft_lens = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    if batch == 0:
        return drafts, draft_lens
    with on_device(tokens):
        _ngram_propose_kernel[(batch,)](
            drafts,
            draft_lens,
            tokens,
            lens,
            k,
            min_ngram,
            min(max_ngram, max(capacity, 1)),
            tokens.stride(0),
            tokens.stride(1),
            BLOCK=_BLOCK,
            BLOCK_K=triton.next_power_of_2(max(k, 1)),
            num_warps=4,
            **EXACT,
        )
    return drafts, draft_lens
