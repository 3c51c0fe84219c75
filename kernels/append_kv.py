"""``append_kv``: the new tokens' keys and values into the pages of their requests.

Grid ``(B * T, blocks of Hkv * D)``: a program copies a part of one token's row, and stores fp8 caches as bytes, rounded to
nearest even and saturated. All lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import on_device
from specdec_triton.kernels._primitives import encode_e4m3, key_offset, widen

_BLOCK = 1024
_RUNTIME = ["count", "stride_k_batch", "stride_k_step", "stride_v_batch", "stride_v_step", "stride_table"]


@triton.jit
def _stored(x, scale_ptr, head, mask, FP8: tl.constexpr):
    if FP8:
        stored = encode_e4m3(tl.div_rn(widen(x).to(tl.float32), tl.load(scale_ptr + head, mask=mask, other=1.0)))
    else:
        stored = x
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
    count,  # T
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_k_batch,
    stride_k_step,
    stride_k_row_head,
    stride_v_batch,
    stride_v_step,
    stride_v_row_head,
    stride_table,
    WIDTH: tl.constexpr,  # Hkv * D
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_QUERY_LENS: tl.constexpr,
):
    b = (tl.program_id(0) // count).to(tl.int64)
    step = tl.program_id(0) % count
    length = count
    if HAS_QUERY_LENS:
        length = tl.load(query_lens_ptr + b)
    if step >= length:
        return
    position = tl.load(context_lens_ptr + b) + step
    table = block_table_ptr + b * stride_table
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < WIDTH
    head = (element // HEAD_DIM).to(tl.int64)
    lane = element % HEAD_DIM

    k = tl.load(k_ptr + b * stride_k_batch + step * stride_k_step + head * stride_k_row_head + lane, mask=mask)
    at = key_offset(table, position, True, stride_k_page, stride_k_slot, PAGE_SIZE) + head * stride_k_head + lane
    tl.store(k_cache_ptr + at, _stored(k, k_scale_ptr, head, mask, FP8), mask=mask)
    v = tl.load(v_ptr + b * stride_v_batch + step * stride_v_step + head * stride_v_row_head + lane, mask=mask)
    at = key_offset(table, position, True, stride_v_page, stride_v_slot, PAGE_SIZE) + head * stride_v_head + lane
    tl.store(v_cache_ptr + at, _stored(v, v_scale_ptr, head, mask, FP8), mask=mask)


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
    block_table = block_table.contiguous()
    width = kv_heads * dim
    block = min(_BLOCK, triton.next_power_of_2(width))
    with on_device(k):
        _append_kv_kernel[(batch * count, triton.cdiv(width, block))](
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
            WIDTH=width,
            HEAD_DIM=dim,
            BLOCK=block,
            PAGE_SIZE=k_cache.shape[1],
            FP8=fp8,
            HAS_QUERY_LENS=query_lens is not None,
            num_warps=4,
        )
