"""``verify_attention``: T new positions of each request over its paged context, split over the keys.

    out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[j]) v[j]      over the keys j that position t may see

Grid ``(B * row tiles, Hkv, splits)``. A program holds BLOCK_M of the T * G rows that share a KV head (G query heads of T
positions), so that keys and values are read once for all of them, and walks over the key chunks that fall to its split: chunk c
(keys c * SPLIT_SIZE and up) belongs to split c % NUM_SPLITS, whatever the lengths, T or B are. A second kernel, one program for
each row, merges the splits (kernels/README.md). All lengths are read on the device.

    keys      0      SPLIT_SIZE   2 x         3 x         4 x         5 x
              |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |  chunk 4 ...
    split        0           1           2           0           1            (NUM_SPLITS = 3)

Bits: a row of a product depends on that row alone, tiles have one shape, chunks and their order depend on the key's position
alone, and a block or split that a row does not see adds exact zeros. So a row's bits depend on its own text only.

(Dao et al., "Flash-decoding", 2023; Kwon et al. 2023 for pages; Miao et al. 2023 for tree masks.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import (
    EXACT,
    at_most_registers,
    attention_config,
    chip_of,
    dense,
    fp8_mode,
    on_device,
)
from specdec_triton.kernels._primitives import (
    KV_FP8_BYTES,
    KV_FP8_NATIVE,
    KV_PLAIN,
    LOG2_E,
    NEG_INF,
    load_kv,
    matmul,
    narrow,
    page_slot,
    popcount,
    softmax_step,
    tanh,
    widen,
)

# The other strides are multiples of D, whatever T and B are, and 16 bytes can be loaded at once where Triton knows that.
_RUNTIME = ["count", "heads", "sliding_window", "stride_table", "stride_mask"]


@triton.jit
def _chunks(
    context, length, sliding_window, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, SPLIT_SIZE: tl.constexpr
):
    """First key that any row of a request may see, and the chunks [first, last) that hold its keys."""
    start = context * 0
    if HAS_WINDOW:
        lowest = -1 if HAS_TREE else 0  # depth; a tree row with an empty mask has -1
        start = tl.maximum(context + lowest - sliding_window + 1, 0)
    end = tl.where(length > 0, context + length, start)
    return start, start // SPLIT_SIZE, (end + SPLIT_SIZE - 1) // SPLIT_SIZE


@triton.jit(do_not_specialize=_RUNTIME)
def _verify_attention_kernel(
    partial_ptr,  # fp32 [B,T,Hq,splits,D]: sums of weights x values
    stats_ptr,  # fp32 [B,T,Hq,splits,2]: their maximum (base 2) and sum of weights
    q_ptr,  # [B,T,Hq,D]
    k_cache_ptr,  # [P,S,Hkv,D]
    v_cache_ptr,  # [P,S,Hkv,D]
    block_table_ptr,  # int32 [B,max_pages]
    context_lens_ptr,  # int32 [B]
    query_lens_ptr,  # int32 [B]
    tree_mask_ptr,  # int64 [B,T]
    k_scale_ptr,  # fp32 [Hkv]
    v_scale_ptr,  # fp32 [Hkv]
    scale,
    softcap,
    sliding_window,
    count,  # T
    heads,  # Hq
    stride_q_batch,
    stride_q_step,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_mask,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV: tl.constexpr,
    HAS_QUERY_LENS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    split = tl.program_id(2)
    kv_head = tl.program_id(1)
    tiles = (count * GROUP + BLOCK_M - 1) // BLOCK_M
    b = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles

    context = tl.load(context_lens_ptr + b)
    length = count
    if HAS_QUERY_LENS:
        length = tl.load(query_lens_ptr + b)
    start, first_chunk, last_chunk = _chunks(context, length, sliding_window, HAS_WINDOW, HAS_TREE, SPLIT_SIZE)
    chunk = first_chunk + (split + NUM_SPLITS - first_chunk % NUM_SPLITS) % NUM_SPLITS
    if chunk >= last_chunk or tile * BLOCK_M >= length * GROUP:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    step = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = step < length
    lane = tl.arange(0, BLOCK_D)
    in_head = lane < HEAD_DIM
    q_offset = b * stride_q_batch + step.to(tl.int64) * stride_q_step + head.to(tl.int64) * stride_q_head
    q = tl.load(q_ptr + q_offset[:, None] + lane, mask=real[:, None] & in_head, other=0.0)
    depth = step
    if HAS_TREE:
        visible_nodes = tl.load(tree_mask_ptr + b * stride_mask + step, mask=real, other=0)
        depth = (popcount(visible_nodes) - 1).to(tl.int32)
    factor = scale
    if HAS_SCALES:
        factor = scale * tl.load(k_scale_ptr + kv_head)

    # The rows of a chain's tile see no key past their last one.
    end = context + length
    if not HAS_TREE:
        end = tl.minimum(end, context + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    chunks = (tl.maximum((end + SPLIT_SIZE - 1) // SPLIT_SIZE, chunk) - chunk + NUM_SPLITS - 1) // NUM_SPLITS

    k_head = k_cache_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head = v_cache_ptr + kv_head.to(tl.int64) * stride_v_head
    highest = tl.full([BLOCK_M], NEG_INF, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    BLOCKS: tl.constexpr = SPLIT_SIZE // BLOCK_N
    for i in range(chunks * BLOCKS):
        key = (chunk + (i // BLOCKS) * NUM_SPLITS) * SPLIT_SIZE + (i % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        held = (key >= start) & (key < end)
        table = block_table_ptr + b * stride_table
        # Keys lie as values do, so that both share a layout and the table is read once.
        page, slot = page_slot(table, key, held, PAGE_SIZE)
        stored = held[:, None] & in_head
        k_offset = page * stride_k_page + slot * stride_k_slot
        k = load_kv(k_head + k_offset[:, None] + lane, stored, q.dtype, KV)
        scores = matmul(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * factor
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        new = key - context  # >= 0: index of a new position
        if HAS_TREE:
            bit = (visible_nodes[:, None] >> tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)[None, :]) & 1
            sees = (new < 0)[None, :] | (bit != 0)
        else:
            sees = new[None, :] <= step[:, None]
        if HAS_WINDOW:
            sees = sees & (new[None, :] > (depth - sliding_window)[:, None])
        scores = tl.where(sees & held[None, :] & real[:, None], scores * LOG2_E, NEG_INF)
        highest, total, weights, decay = softmax_step(scores, highest, total)
        v_offset = page * stride_v_page + slot * stride_v_slot
        v = load_kv(v_head + v_offset[:, None] + lane, stored, q.dtype, KV)
        acc = matmul(weights.to(v.dtype), v, acc * decay[:, None])

    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head)
    out = ((b * count + step) * heads + head) * tl.num_programs(2) + split
    tl.store(partial_ptr + out[:, None] * HEAD_DIM + lane, acc, mask=real[:, None] & in_head)
    tl.store(stats_ptr + out * 2, highest, mask=real)
    tl.store(stats_ptr + out * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["rows", "count", "heads", "splits", "sliding_window"])
def _merge_splits_kernel(
    out_ptr,  # [B,T,Hq,D]
    partial_ptr,  # fp32 [B,T,Hq,splits,D]
    stats_ptr,  # fp32 [B,T,Hq,splits,2]
    context_lens_ptr,  # int32 [B]
    query_lens_ptr,  # int32 [B]
    sinks_ptr,  # [Hq]
    sliding_window,
    rows,  # B * T * Hq
    count,
    heads,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_QUERY_LENS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    b, step, head = row // (count * heads), row // heads % count, row % heads
    context = tl.load(context_lens_ptr + b, mask=inside, other=0)
    length = context * 0 + count
    if HAS_QUERY_LENS:
        length = tl.load(query_lens_ptr + b, mask=inside, other=0)
    _, first_chunk, last_chunk = _chunks(context, length, sliding_window, HAS_WINDOW, HAS_TREE, SPLIT_SIZE)
    real = inside & (step < length)

    split = tl.arange(0, NUM_SPLITS)
    used = (split[None, :] + NUM_SPLITS - (first_chunk % NUM_SPLITS)[:, None]) % NUM_SPLITS
    used = (used < (last_chunk - first_chunk)[:, None]) & real[:, None]
    at = row[:, None] * splits + split[None, :]
    highest = tl.load(stats_ptr + at * 2, mask=used, other=NEG_INF)
    total = tl.load(stats_ptr + at * 2 + 1, mask=used, other=0.0)
    peak = tl.max(highest, 1)
    if HAS_SINKS:
        sink = widen(tl.load(sinks_ptr + head, mask=inside, other=0.0)).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == NEG_INF, 0.0, peak)
    weight = tl.exp2(highest - peak[:, None])
    denominator = tl.sum(total * weight, 1)
    if HAS_SINKS:
        denominator += tl.exp2(sink - peak)
    lane = tl.arange(0, BLOCK_D)
    in_head = lane < HEAD_DIM
    mask = used[:, :, None] & in_head[None, None, :]
    partial = tl.load(partial_ptr + at[:, :, None] * HEAD_DIM + lane[None, None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, :, None], 1) / tl.where(denominator > 0, denominator, 1.0)[:, None]
    out = tl.where(real[:, None], out, 0.0)
    mask = inside[:, None] & in_head[None, :]
    tl.store(out_ptr + row[:, None] * HEAD_DIM + lane[None, :], narrow(out, out_ptr.dtype.element_ty), mask=mask)


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    scale: float | None,
    tree_mask: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """``[B,T,Hq,D]`` in q's dtype; see ``specdec_triton.ops.verify_attention``."""
    batch, count, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group = heads // kv_heads
    chip = chip_of(q.device)
    config = attention_config(dim, group, kv_heads, q.dtype, k_cache.dtype, chip)
    kv = fp8_mode(k_cache.dtype, chip)
    block_table, context_lens, query_lens, tree_mask, sinks, k_scale, v_scale = dense(
        block_table, context_lens, query_lens, tree_mask, sinks, k_scale, v_scale
    )
    if kv == "bytes":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    # Splits that the table is too short to reach have no programs and no memory; the schedule stays what it is.
    reachable = max(triton.cdiv(block_table.shape[1] * page_size, config.split_size), 1)
    splits = min(config.num_splits, reachable)
    partial = torch.empty(batch, count, heads, splits, dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, count, heads, splits, 2, dtype=torch.float32, device=q.device)
    shared = {
        "HEAD_DIM": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "SPLIT_SIZE": config.split_size,
        "NUM_SPLITS": config.num_splits,
        "HAS_QUERY_LENS": query_lens is not None,
        "HAS_TREE": tree_mask is not None,
        "HAS_WINDOW": sliding_window is not None,
    }
    with on_device(q):
        _verify_attention_kernel[(batch * triton.cdiv(count * group, config.block_m), kv_heads, splits)](
            partial,
            stats,
            q,
            k_cache,
            v_cache,
            block_table,
            context_lens,
            query_lens,
            tree_mask,
            k_scale,
            v_scale,
            dim**-0.5 if scale is None else float(scale),
            float(softcap or 0.0),
            sliding_window or 0,
            count,
            heads,
            *q.stride()[:3],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0),
            tree_mask.stride(0) if tree_mask is not None and tree_mask.dim() == 2 else 0,
            GROUP=group,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            PAGE_SIZE=page_size,
            KV={"plain": KV_PLAIN, "native": KV_FP8_NATIVE, "bytes": KV_FP8_BYTES}[kv].value,
            HAS_SOFTCAP=softcap is not None,
            HAS_SCALES=k_scale is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **(at_most_registers(255, chip) if kv == "bytes" else {}),
            **shared,
            **EXACT,
        )
        _merge_splits_kernel[(triton.cdiv(batch * count * heads, config.merge_rows),)](
            out,
            partial,
            stats,
            context_lens,
            query_lens,
            sinks,
            sliding_window or 0,
            batch * count * heads,
            count,
            heads,
            splits,
            BLOCK_ROWS=config.merge_rows,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            **shared,
            **EXACT,
        )
    return out
