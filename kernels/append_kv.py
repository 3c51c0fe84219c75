"""``append_kv``: the new tokens' keys and values into the pages of their requests.

Grid ``(B * T, blocks of heads)``: a program copies some heads of one token's rows, and stores fp8 caches as bytes, rounded
to nearest even and saturated. All lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, dense, on_device
from specdec_triton.kernels._primitives import as_stored, head_tile, key_offset

_BLOCK = 1024
_PER_THREAD = 8  # 128 bits of a 16-bit dtype

# The strides of k and v are left to be specialized: loads are wide only where they are known to be multiples of 16.
_RUNTIME = ["count", "stride_table"]


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
    stride_table,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
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
    k = tl.load(k_ptr + b * stride_k_batch + step * stride_k_step + head * stride_k_head + lane, mask=mask, other=0)
    v = tl.load(v_ptr + b * stride_v_batch + step * stride_v_step + head * stride_v_head + lane, mask=mask, other=0)
    k_at = key_offset(table, position, True, stride_k_cache_page, stride_k_cache_slot, PAGE_SIZE)
    v_at = key_offset(table, position, True, stride_v_cache_page, stride_v_cache_slot, PAGE_SIZE)
    k = as_stored(k, k_scale_ptr, head, k_ptr.dtype.element_ty, KV_HEADS, FP8, HAS_SCALES)
    v = as_stored(v, v_scale_ptr, head, v_ptr.dtype.element_ty, KV_HEADS, FP8, HAS_SCALES)
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
            count,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            block_table.stride(0),
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            HEADS=heads,
            BLOCK_D=block_d,
            PAGE_SIZE=k_cache.shape[1],
            FP8=fp8,
            HAS_SCALES=k_scale is not None,
            HAS_QUERY_LENS=query_lens is not None,
            num_warps=max(heads * block_d // (chip_of(k.device).warp_size * _PER_THREAD), 1),
            **EXACT,
        )
