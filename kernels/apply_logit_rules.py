"""``apply_logit_rules``: what a request's rules make of its logits, each row with the text before it, drafts included.

Per token v of row t, with n_v its occurrences in the output and in the drafts before the row:

    x = logit + bias
    x = x / repetition if x >= 0 else x * repetition     where v occurs in prompt, output or those drafts
    x = x - frequency * n_v - presence * (n_v > 0)
    x = -inf                                             where the row's mask, or the text's least length, forbids v

``_rules_kernel``, grid ``(B * T, ceil(V / BLOCK))``, does that in one pass: logits are read once, and of bias and counts only what
requests use. ``_repeated_kernel``, grid ``(B * T, ceil((L + T) / BLOCK))``, runs behind it where requests forbid repeated n-grams:
each place of the text whose n - 1 tokens before it are the text's last ones bans its token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, dense, on_device
from specdec_triton.kernels._primitives import NEG_INF, PAD, widen
from specdec_triton.logit_rules import IN_PROMPT as _IN_PROMPT

IN_PROMPT: tl.constexpr = tl.constexpr(_IN_PROMPT)
_BLOCK = 1024  # tokens, or places of a text, of a program


@triton.jit(do_not_specialize=["words", "rows", "first", "stop_count", "stride_drafts"])
def _rules_kernel(
    out_ptr,  # fp32 [B,T,V]
    logits_ptr,  # [B,T,V]
    draft_tokens_ptr,  # int64 [B,first+T-1]
    draft_lens_ptr,  # int32 [B]
    lens_ptr,  # int32 [B]
    repetition_penalty_ptr,  # fp32 [B]
    presence_penalty_ptr,  # fp32 [B]
    frequency_penalty_ptr,  # fp32 [B]
    counts_ptr,  # int32 [B,V]
    bias_ptr,  # fp32 [B,V]
    mask_ptr,  # int32 [B,T,ceil(V/32)]
    min_lens_ptr,  # int32 [B]
    stop_ids_ptr,  # int64 [B,S]
    vocab,
    words,  # ceil(V / 32)
    rows,  # T
    first,  # drafts before the first row
    stop_count,  # S
    stride_drafts,
    stride_logits_batch,
    stride_logits_row,
    stride_counts,
    stride_bias,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_MIN: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, row = at // rows, (at % rows).to(tl.int32)
    drafted = first + row  # drafts that come before this row
    if HAS_LENS:
        if drafted > tl.load(draft_lens_ptr + b):
            return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocab
    logits = logits_ptr + b * stride_logits_batch + row.to(tl.int64) * stride_logits_row
    x = widen(tl.load(logits + token, mask=valid, other=0.0)).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + b * stride_bias + token, mask=valid, other=0.0)
    if HAS_PENALTIES:
        repetition = tl.load(repetition_penalty_ptr + b)
        presence, frequency = tl.load(presence_penalty_ptr + b), tl.load(frequency_penalty_ptr + b)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            seen = tl.load(counts_ptr + b * stride_counts + token, mask=valid, other=0)
            for j in range(drafted):
                seen += (token == tl.load(draft_tokens_ptr + b * stride_drafts + j)).to(tl.int32)
            x = tl.where(seen > 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
            written = seen & (IN_PROMPT - 1)
            x -= frequency * written.to(tl.float32)
            x -= tl.where(written > 0, presence, 0.0)
    if HAS_MIN:
        if tl.load(lens_ptr + b) + drafted < tl.load(min_lens_ptr + b):
            for i in range(stop_count):
                x = tl.where(token == tl.load(stop_ids_ptr + b * stop_count + i), NEG_INF, x)
    if HAS_MASK:
        word = tl.load(mask_ptr + at * words + token // 32, mask=valid, other=0)
        x = tl.where((word >> (token % 32)) & 1 == 0, NEG_INF, x)
    tl.store(out_ptr + at * vocab + token, x, mask=valid)


@triton.jit
def _history(text, drafts, place, length, end, valid):
    """Tokens of a text at some places below ``end``: of its ``length`` own, then of its drafts."""
    token = tl.load(text + place, mask=valid & (place < length), other=PAD)
    drafted = tl.load(drafts + (place - length), mask=valid & (place >= length) & (place < end), other=PAD)
    return tl.where(place < length, token, drafted)


@triton.jit(do_not_specialize=["rows", "first", "vocab", "stride_drafts", "stride_texts"])
def _repeated_kernel(
    out_ptr,  # fp32 [B,T,V]
    draft_tokens_ptr,  # int64 [B,first+T-1]
    draft_lens_ptr,  # int32 [B]
    lens_ptr,  # int32 [B]
    ngram_ptr,  # int32 [B]
    texts_ptr,  # int64 [B,L]
    rows,  # T
    first,  # drafts before the first row
    vocab,
    stride_drafts,
    stride_texts,
    BLOCK: tl.constexpr,
    HAS_LENS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b, drafted = at // rows, first + (at % rows).to(tl.int32)
    if HAS_LENS:
        if drafted > tl.load(draft_lens_ptr + b):
            return
    size, length = tl.load(ngram_ptr + b), tl.load(lens_ptr + b)
    end = length + drafted
    start = tl.program_id(1) * BLOCK
    if (size == 0) | (start >= end):
        return
    text, drafts = texts_ptr + b * stride_texts, draft_tokens_ptr + b * stride_drafts
    place = start + tl.arange(0, BLOCK)
    same = (place < end) & (place >= size - 1)
    for back in range(1, tl.minimum(size, end + 1)):
        before = _history(text, drafts, place - back, length, end, same)
        tail = _history(text, drafts, end - back, length, end, end >= size)
        same = same & (before == tail)
    token = _history(text, drafts, place, length, end, same)
    same = same & (token >= 0) & (token < vocab)
    tl.store(out_ptr + at * vocab + token, NEG_INF, mask=same)


def apply_logit_rules(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    lens: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    presence_penalty: torch.Tensor | None,
    frequency_penalty: torch.Tensor | None,
    counts: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    min_lens: torch.Tensor | None,
    stop_ids: torch.Tensor | None,
    ngram: torch.Tensor | None,
    texts: torch.Tensor | None,
    max_ngram: int,
    first: int,
) -> torch.Tensor:
    """fp32 ``[B,T,V]``; see ``specdec_triton.ops.apply_logit_rules``."""
    batch, rows, vocab = logits.shape
    out = torch.empty(batch, rows, vocab, dtype=torch.float32, device=logits.device)
    if batch == 0:
        return out
    draft_tokens, draft_lens, lens, mask = dense(draft_tokens, draft_lens, lens, mask)
    min_lens, stop_ids, ngram = dense(min_lens, stop_ids, ngram)
    penalties = dense(repetition_penalty, presence_penalty, frequency_penalty)
    with on_device(logits):
        _rules_kernel[(batch * rows, triton.cdiv(vocab, _BLOCK))](
            out,
            logits,
            draft_tokens,
            draft_lens,
            lens,
            *penalties,
            counts,
            bias,
            mask,
            min_lens,
            stop_ids,
            vocab,
            (vocab + 31) // 32,
            rows,
            first,
            0 if stop_ids is None else stop_ids.shape[1],
            draft_tokens.stride(0),
            *logits.stride()[:2],
            0 if counts is None else counts.stride(0),
            0 if bias is None else bias.stride(0),
            BLOCK=_BLOCK,
            HAS_LENS=draft_lens is not None,
            HAS_PENALTIES=counts is not None,
            HAS_BIAS=bias is not None,
            HAS_MASK=mask is not None,
            HAS_MIN=min_lens is not None,
            num_warps=4,
            **EXACT,
        )
        if ngram is not None and texts is not None:
            _repeated_kernel[(batch * rows, triton.cdiv(texts.shape[1] + first + rows, _BLOCK))](
                out,
                draft_tokens,
                draft_lens,
                lens,
                ngram,
                texts,
                rows,
                first,
                vocab,
                draft_tokens.stride(0),
                texts.stride(0),
                BLOCK=_BLOCK,
                HAS_LENS=draft_lens is not None,
                num_warps=4,
                **EXACT,
            )
    return out
