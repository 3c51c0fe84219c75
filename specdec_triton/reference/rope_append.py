"""``rope_append``: norm and rotate queries and keys, and append keys and values to the pages of their requests."""

from __future__ import annotations

import torch

from specdec_triton.reference.append_kv import append_kv


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    interleaved: bool,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    add_one: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """``[B,T,Hq,D]``; see ``specdec_triton.ops.rope_append``."""
    if q_norm is not None:
        q = _normed(q, q_norm, eps, add_one)
    if k_norm is not None:
        k = _normed(k, k_norm, eps, add_one)
    out = q
    if cos is not None and sin is not None:
        out, k = _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)
    append_kv(k, v, k_cache, v_cache, block_table, context_lens, query_lens, k_scale, v_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device).copy_(out)
    if query_lens is not None:
        step = torch.arange(q.shape[1], device=q.device)
        out.masked_fill_((step >= query_lens[:, None])[..., None, None], 0)
    return out


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, add_one: bool) -> torch.Tensor:
    """RMS norm of each head, in fp32, rounded once to x's dtype."""
    factor = weight.float() + 1 if add_one else weight.float()
    return torch.nn.functional.rms_norm(x.float(), factor.shape, factor, eps).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """fp32 ``[B,T,H,D]``: the lanes that cos and sin cover turned, the others as they are."""
    rotary = cos.shape[-1]
    part = x[..., :rotary].float()
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    part = part * cos[:, :, None].float() + turned * sin[:, :, None].float()
    return part if rotary == x.shape[-1] else torch.cat((part, x[..., rotary:].float()), -1)
