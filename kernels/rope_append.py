"""``rope_append``: norm and rotate a token's queries and keys, and append its keys and values, in one launch.

Grid ``(B * T, blocks of query heads, then of key heads, then of value heads)``: a program takes HEADS heads of one token. A head
is read once, as the PAIRS first lanes of its rotated pairs, the PAIRS second ones, and the REST that is not rotated; with (x, y) a
pair, x cos - y sin and y cos + x sin are stored. The mean of a normed head's squares is added up within the program. fp8 caches are
stored as bytes, rounded to nearest even and saturated. All lengths are read on the device.

Bits: one binary for every B, T and layout of the inputs. Triton would compile for strides that are multiples of 16, which for some D
and R depends on T; it is given strides over what a new tensor's always are multiples of (``even_strides``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import (
    EXACT,
    at_most_registers,
    chip_of,
    dense,
    even_strides,
    on_device,
    rope_config,
)
from specdec_triton.kernels._primitives import as_stored, head_tile, key_offset, narrow, widen

_RUNTIME = [
    "count", "stride_table", *(f"stride_{x}_{d}" for x in "qkv" for d in ("batch", "step", "head")),
    *(f"stride_{x}_{d}" for x in ("cos", "sin") for d in ("batch", "step")),
]  # fmt: skip


@triton.jit
def _load_pairs(row, mask, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second lanes, fp32 ``[HEADS,PAIRS]`` each, of the rows that ``row [HEADS,1]`` points to; 0 where there are none."""
    if INTERLEAVED:
        lane = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(row + lane, mask=mask & (lane < ROTARY), other=0)
        first, second = tl.split(tl.reshape(x, [row.shape[0], PAIRS, 2]))
    else:
        lane = tl.arange(0, PAIRS)[None, :]
        inside = mask & (lane < ROTARY // 2)
        first = tl.load(row + lane, mask=inside, other=0)
        second = tl.load(row + ROTARY // 2 + lane, mask=inside, other=0)
    return widen(first).to(tl.float32), widen(second).to(tl.float32)


@triton.jit
def _store_pairs(row, first, second, mask, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        lane = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.reshape(tl.join(first, second), [row.shape[0], 2 * PAIRS])
        tl.store(row + lane, x, mask=mask & (lane < ROTARY))
    else:
        lane = tl.arange(0, PAIRS)[None, :]
        inside = mask & (lane < ROTARY // 2)
        tl.store(row + lane, first, mask=inside)
        tl.store(row + ROTARY // 2 + lane, second, mask=inside)


@triton.jit
def _normed(x, factor, weight, dtype: tl.constexpr, ADD_ONE: tl.constexpr):
    """fp32, rounded to ``dtype``."""
    if ADD_ONE:
        weight += 1.0
    return widen(narrow(x * factor * weight, dtype)).to(tl.float32)


@triton.jit
def _norm_and_turn(
    to,  # [HEADS,1]: where a head goes
    row,  # [HEADS,1]: where it lies
    head,  # [HEADS,1]
    norm_ptr,  # [HEAD_DIM]
    cos_row,  # [ROTARY]
    sin_row,  # [ROTARY]
    scale_ptr,  # fp32 [COUNT]
    eps,
    COUNT: tl.constexpr,  # heads
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADD_ONE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    mask = head < COUNT
    dtype: tl.constexpr = row.dtype.element_ty
    same = head * 0  # a thread loads the factors of its lanes itself, for each head
    # All loads come before the first store, which the compiler would not move them across.
    if PAIRS > 0:
        first, second = _load_pairs(row, mask, ROTARY, PAIRS, INTERLEAVED)
        cos_first, cos_second = _load_pairs(cos_row + same, mask, ROTARY, PAIRS, INTERLEAVED)
        sin_first, sin_second = _load_pairs(sin_row + same, mask, ROTARY, PAIRS, INTERLEAVED)
    if REST > 0:
        lane = ROTARY + tl.arange(0, REST)[None, :]
        inside = mask & (lane < HEAD_DIM)
        rest = widen(tl.load(row + lane, mask=inside, other=0)).to(tl.float32)
    if HAS_NORM:
        total = tl.zeros([head.shape[0]], tl.float32)
        if PAIRS > 0:
            weight_first, weight_second = _load_pairs(norm_ptr + same, mask, ROTARY, PAIRS, INTERLEAVED)
            total += tl.sum(first * first + second * second, 1)
        if REST > 0:
            weight = widen(tl.load(norm_ptr + same + lane, mask=inside, other=0)).to(tl.float32)
            total += tl.sum(rest * rest, 1)
        factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, 1.0 * HEAD_DIM) + eps))[:, None]
        if PAIRS > 0:
            first = _normed(first, factor, weight_first, dtype, ADD_ONE)
            second = _normed(second, factor, weight_second, dtype, ADD_ONE)
        if REST > 0:
            rest = _normed(rest, factor, weight, dtype, ADD_ONE)
    if PAIRS > 0:
        # The explicit fma leaves the compiler no choice of rounding.
        turned = tl.fma(-second, sin_first, first * cos_first)
        second = as_stored(
            tl.fma(first, sin_second, second * cos_second), scale_ptr, head, dtype, COUNT, FP8, HAS_SCALES
        )
        first = as_stored(turned, scale_ptr, head, dtype, COUNT, FP8, HAS_SCALES)
        _store_pairs(to, first, second, mask, ROTARY, PAIRS, INTERLEAVED)
    if REST > 0:
        tl.store(to + lane, as_stored(rest, scale_ptr, head, dtype, COUNT, FP8, HAS_SCALES), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME)
def _rope_append_kernel(
    out_ptr,  # [B,T,Hq,D]
    k_cache_ptr,  # [P,S,Hkv,D]; uint8 with FP8
    v_cache_ptr,  # [P,S,Hkv,D]
    q_ptr,  # [B,T,Hq,D]
    k_ptr,  # [B,T,Hkv,D]
    v_ptr,  # [B,T,Hkv,D]
    cos_ptr,  # [B,T,ROTARY]
    sin_ptr,  # [B,T,ROTARY]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    block_table_ptr,  # int32 [B,max_pages]
    context_lens_ptr,  # int32 [B]
    query_lens_ptr,  # int32 [B]
    k_scale_ptr,  # fp32 [Hkv]
    v_scale_ptr,  # fp32 [Hkv]
    count,  # T
    eps,
    stride_k_cache_page,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_page,
    stride_v_cache_slot,
    stride_v_cache_head,
    stride_q_batch,  # these in units of UNIT elements
    stride_q_step,
    stride_q_head,
    stride_k_batch,
    stride_k_step,
    stride_k_head,
    stride_v_batch,
    stride_v_step,
    stride_v_head,
    stride_cos_batch,  # these of TURN_UNIT
    stride_cos_step,
    stride_sin_batch,
    stride_sin_step,
    stride_table,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,  # 0: nothing is rotated
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    ADD_ONE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_QUERY_LENS: tl.constexpr,
    UNIT: tl.constexpr,
    TURN_UNIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(0) // count).to(tl.int64)
    step = (tl.program_id(0) % count).to(tl.int64)
    length = count
    if HAS_QUERY_LENS:
        length = tl.load(query_lens_ptr + b)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    cos_row = cos_ptr
    sin_row = sin_ptr
    if ROTARY > 0:
        cos_row += (b * stride_cos_batch + step * stride_cos_step) * TURN_UNIT
        sin_row += (b * stride_sin_batch + step * stride_sin_step) * TURN_UNIT
    if block < q_blocks:
        head, lane, mask = head_tile(block, Q_HEADS, HEAD_DIM, HEADS, BLOCK_D)
        to = out_ptr + (token * Q_HEADS + head) * HEAD_DIM
        if step < length:
            row = q_ptr + (b * stride_q_batch + step * stride_q_step + head * stride_q_head) * UNIT
            _norm_and_turn(
                to, row, head, q_norm_ptr, cos_row, sin_row, None, eps, Q_HEADS, HEAD_DIM, ROTARY, PAIRS, REST,
                INTERLEAVED, HAS_Q_NORM, ADD_ONE, False, False,
            )  # fmt: skip
        else:
            tl.store(to + lane, tl.zeros([HEADS, BLOCK_D], out_ptr.dtype.element_ty), mask=mask)
    elif step < length:
        position = tl.load(context_lens_ptr + b) + step
        table = block_table_ptr + b * stride_table
        if block < q_blocks + kv_blocks:
            head, lane, mask = head_tile(block - q_blocks, KV_HEADS, HEAD_DIM, HEADS, BLOCK_D)
            row = k_ptr + (b * stride_k_batch + step * stride_k_step + head * stride_k_head) * UNIT
            at = key_offset(table, position, True, stride_k_cache_page, stride_k_cache_slot, PAGE_SIZE)
            _norm_and_turn(
                k_cache_ptr + at + head * stride_k_cache_head, row, head, k_norm_ptr, cos_row, sin_row, k_scale_ptr, eps,
                KV_HEADS, HEAD_DIM, ROTARY, PAIRS, REST, INTERLEAVED, HAS_K_NORM, ADD_ONE, FP8, HAS_SCALES,
            )  # fmt: skip
        else:
            head, lane, mask = head_tile(block - q_blocks - kv_blocks, KV_HEADS, HEAD_DIM, HEADS, BLOCK_D)
            row = v_ptr + (b * stride_v_batch + step * stride_v_step + head * stride_v_head) * UNIT
            v = tl.load(row + lane, mask=mask, other=0)
            at = key_offset(table, position, True, stride_v_cache_page, stride_v_cache_slot, PAGE_SIZE)
            v = as_stored(v, v_scale_ptr, head, v_ptr.dtype.element_ty, KV_HEADS, FP8, HAS_SCALES)
            tl.store(v_cache_ptr + at + head * stride_v_cache_head + lane, v, mask=mask)


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
    batch, count, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_table, context_lens, query_lens, k_scale, v_scale, q_norm, k_norm = dense(
        block_table, context_lens, query_lens, k_scale, v_scale, q_norm, k_norm
    )
    rotary = 0 if cos is None else cos.shape[2]
    chip = chip_of(q.device)
    config = rope_config(max(q_heads, kv_heads), dim, rotary, chip)
    (q, q_strides), (k, k_strides), (v, v_strides) = (even_strides(x, config.unit) for x in (q, k, v))
    cos_strides = sin_strides = (0, 0)
    if cos is not None and sin is not None:
        (cos, cos_strides), (sin, sin_strides) = (even_strides(x, config.turn_unit) for x in (cos, sin))
    blocks = triton.cdiv(q_heads, config.heads) + 2 * triton.cdiv(kv_heads, config.heads)
    with on_device(q):
        _rope_append_kernel[(batch * count, blocks)](
            out,
            k_cache,
            v_cache,
            q,
            k,
            v,
            cos,
            sin,
            q_norm,
            k_norm,
            block_table,
            context_lens,
            query_lens,
            k_scale,
            v_scale,
            count,
            eps,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *q_strides,
            *k_strides,
            *v_strides,
            *cos_strides,
            *sin_strides,
            block_table.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            HEADS=config.heads,
            BLOCK_D=triton.next_power_of_2(dim),
            PAGE_SIZE=k_cache.shape[1],
            ROTARY=rotary,
            PAIRS=config.pairs,
            REST=config.rest,
            INTERLEAVED=interleaved,
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            ADD_ONE=add_one,
            FP8=fp8,
            HAS_SCALES=k_scale is not None,
            HAS_QUERY_LENS=query_lens is not None,
            UNIT=config.unit,
            TURN_UNIT=config.turn_unit,
            num_warps=config.num_warps,
            **at_most_registers(128, chip),
            **EXACT,
        )
    return out
