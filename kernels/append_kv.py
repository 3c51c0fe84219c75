"""``append_kv``: the new tokens' keys and values into the pages of their requests, the keys rotated on the way if asked.

Grid ``(B * T, blocks of heads)``: a program copies some heads of one token's rows, and stores fp8 caches as bytes, rounded
to nearest even and saturated. All lengths are read on the device. A rotated lane is ``k cos + turned sin``, where
``turned`` is minus the partner on the first lane of a pair and the partner on the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, dense, on_device
from specdec_triton.kernels._primitives import encode_e4m3, head_tile, key_offset, narrow, widen

_BLOCK = 1024
_PER_THREAD = 8  # 128 bits of a 16-bit dtype

# The strides of k, v, cos and sin are left to be specialized: loads are wide only where they are known to be multiples of 16.
_RUNTIME = ["count", "stride_table"]


@triton.jit
def _turned(x, row_ptr, lane, mask, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The factor of sin, fp32; meaningless past ROTARY. Pairs are (2i, 2i+1) or (i, i + ROTARY / 2)."""
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        turned = tl.reshape(tl.join(-second, first), x.shape)
    else:  # the partner is another thread's: a second load, which the cache serves, is cheaper than an exchange
        inside = mask & (lane < ROTARY)
        partner = widen(tl.load(row_ptr + (lane + ROTARY // 2) % ROTARY, mask=inside, other=0)).to(tl.float32)
        turned = tl.where(lane < ROTARY // 2, -partner, partner)
    return turned


@triton.jit
def _stored(
    x, scale_ptr, head, dtype: tl.constexpr, KV_HEADS: tl.constexpr, FP8: tl.constexpr, HAS_SCALES: tl.constexpr
):
    if HAS_SCALES:
        scale = tl.load(scale_ptr + head, mask=head < KV_HEADS, other=1.0)
        x = tl.div_rn(widen(x).to(tl.float32), scale)
    if FP8:
        stored = encode_e4m3(widen(x).to(tl.float32))
    elif x.dtype == dtype:
        stored = x
    else:
        stored = narrow(x, dtype)
    return stored


@triton.jit(do_not_specialize=_RUNTIME)
def _append_kv_kernel(
    k_cache_ptr,  # [P,S,Hkv,D]; uint8 with FP8
    v_cache_ptr,  # [P,S,Hkv,D]
    k_ptr,  # [B,T,Hkv,D]
    v_ptr,  # [B,T,Hkv,D]
    block_table_ptr,  # int32 [B,max_pages]
    context_lens_ptr,  # int32 [B]
    query_lens_ptr,  # int32 [B]
    k_scale_ptr,  # fp32 [Hkv]
    v_scale_ptr,  # fp32 [Hkv]
    cos_ptr,  # [B,T,ROTARY]
    sin_ptr,  # [B,T,ROTARY]
    count,  # T
    stride_k_cache_page,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_page,
    stride_v_cache_slot,
    stride_v_cache_head,
    stride_k_batch,
    stride_k_step,
    stride_k_head,
    stride_v_batch,
    stride_v_step,
    stride_v_head,
    stride_cos_batch,
    stride_cos_step,
    stride_sin_batch,
    stride_sin_step,
    stride_table,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,  # 0: keys are stored as they are
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_QUERY_LENS: tl.constexpr,
):
    b = (tl.program_id(0) // count).to(tl.int64)
    step = (tl.program_id(0) % count).to(tl.int64)
    length = count
    if HAS_QUERY_LENS:
        length = tl.load(query_lens_ptr + b)
    if step >= length:
        return
    position = tl.load(context_lens_ptr + b) + step
    table = block_table_ptr + b * stride_table
    head, lane, mask = head_tile(tl.program_id(1), KV_HEADS, HEAD_DIM, HEADS, BLOCK_D)

    # All loads come before the first store, which the compiler would not move them across.
    row = k_ptr + b * stride_k_batch + step * stride_k_step + head * stride_k_head
    k = tl.load(row + lane, mask=mask, other=0)
    v = tl.load(v_ptr + b * stride_v_batch + step * stride_v_step + head * stride_v_head + lane, mask=mask, other=0)
    k_at = key_offset(table, position, True, stride_k_cache_page, stride_k_cache_slot, PAGE_SIZE)
    v_at = key_offset(table, position, True, stride_v_cache_page, stride_v_cache_slot, PAGE_SIZE)
    if ROTARY > 0:
        plain = widen(k).to(tl.float32)
        each = tl.broadcast_to(lane, [HEADS, BLOCK_D])  # a thread loads the factors of its lanes itself
        at = b * stride_cos_batch + step * stride_cos_step + each
        cos = widen(tl.load(cos_ptr + at, mask=each < ROTARY, other=1)).to(tl.float32)
        at = b * stride_sin_batch + step * stride_sin_step + each
        sin = widen(tl.load(sin_ptr + at, mask=each < ROTARY, other=0)).to(tl.float32)
        # The explicit fma leaves the compiler no choice of rounding.
        k = tl.fma(_turned(plain, row, lane, mask, ROTARY, INTERLEAVED), sin, plain * cos)
        k = tl.where(lane < ROTARY, k, plain)
    k = _stored(k, k_scale_ptr, head, k_ptr.dtype.element_ty, KV_HEADS, FP8, HAS_SCALES)
    v = _stored(v, v_scale_ptr, head, v_ptr.dtype.element_ty, KV_HEADS, FP8, HAS_SCALES)
    tl.store(k_cache_ptr + k_at + head * stride_k_cache_head + lane, k, mask=mask)
    tl.store(v_cache_ptr + v_at + head * stride_v_cache_head + lane, v, mask=mask)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """In place; see ``specdec_triton.ops.append_kv``."""
    batch, count, kv_heads, dim = k.shape
    if k.numel() == 0:
        return
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_table, context_lens, query_lens, k_scale, v_scale = dense(
        block_table, context_lens, query_lens, k_scale, v_scale
    )
    rotary, turns = 0, (0, 0, 0, 0)
    if cos is not None and sin is not None:
        cos, sin = (x.expand(batch, -1, -1) for x in (cos, sin))
        rotary, turns = cos.shape[2], (*cos.stride()[:2], *sin.stride()[:2])
    block_d = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(kv_heads), max(_BLOCK // block_d, 1))
    with on_device(k):
        _append_kv_kernel[(batch * count, triton.cdiv(kv_heads, heads))](
            k_cache,
            v_cache,
            k,
            v,
            block_table,
            context_lens,
            query_lens,
            k_scale,
            v_scale,
            cos,
            sin,
            count,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *turns,
            block_table.stride(0),
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            HEADS=heads,
            BLOCK_D=block_d,
            PAGE_SIZE=k_cache.shape[1],
            ROTARY=rotary,
            INTERLEAVED=interleaved,
            FP8=fp8,
            HAS_SCALES=k_scale is not None,
            HAS_QUERY_LENS=query_lens is not None,
            num_warps=max(heads * block_d // (chip_of(k.device).warp_size * _PER_THREAD), 1),
            **EXACT,
        )
