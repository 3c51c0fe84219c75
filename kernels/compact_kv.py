"""``compact_kv``: the rows of a tree's accepted path move up to where a chain's would lie, in place.

Grid ``(B, blocks of heads)``: a program owns its lanes of all of a request's rows and moves them in the order of the path,
so no other program reads or writes what it moves. Within a program nothing is lost either. A path increases, so
``path[i] >= i``: row i is read from path[i] before a later step may write there, a step writes only where no later one
reads, and every step gives a lane to the same thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, dense, on_device
from specdec_triton.kernels._primitives import head_tile, key_offset

_BYTES_PER_THREAD = 16  # one warp a program and one access a row: more would only make rows, taken in turn, slower


@triton.jit(do_not_specialize=["nodes", "stride_table"])
def _compact_kv_kernel(
    k_cache_ptr,  # [P,S,Hkv,D]
    v_cache_ptr,  # [P,S,Hkv,D]
    block_table_ptr,  # int32 [B,max_pages]
    context_lens_ptr,  # int32 [B]
    path_ptr,  # int32 [B,N]
    path_lens_ptr,  # int32 [B]
    nodes,  # N
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_table,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PATH_LENS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length = nodes
    if HAS_PATH_LENS:
        length = tl.load(path_lens_ptr + b)
    context = tl.load(context_lens_ptr + b)
    table = block_table_ptr + b * stride_table
    path = path_ptr + b * nodes
    head, lane, mask = head_tile(tl.program_id(1), KV_HEADS, HEAD_DIM, HEADS, BLOCK_D)
    k_lanes = k_cache_ptr + head * stride_k_head + lane
    v_lanes = v_cache_ptr + head * stride_v_head + lane

    i = 0
    node = tl.load(path, mask=length > 0, other=-1)
    while node >= 0:
        if node != i:
            k_from = key_offset(table, context + node, True, stride_k_page, stride_k_slot, PAGE_SIZE)
            v_from = key_offset(table, context + node, True, stride_v_page, stride_v_slot, PAGE_SIZE)
            k_to = key_offset(table, context + i, True, stride_k_page, stride_k_slot, PAGE_SIZE)
            v_to = key_offset(table, context + i, True, stride_v_page, stride_v_slot, PAGE_SIZE)
            k = tl.load(k_lanes + k_from, mask=mask)
            v = tl.load(v_lanes + v_from, mask=mask)
            tl.store(k_lanes + k_to, k, mask=mask)
            tl.store(v_lanes + v_to, v, mask=mask)
        i += 1
        node = tl.load(path + i, mask=i < length, other=-1)


def compact_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    path: torch.Tensor,
    path_lens: torch.Tensor | None,
) -> None:
    """In place; see ``specdec_triton.ops.compact_kv``."""
    _, page_size, kv_heads, dim = k_cache.shape
    batch, nodes = path.shape
    if k_cache.numel() == 0 or path.numel() == 0:
        return
    if k_cache.dtype.itemsize == 1:  # not every chip knows the type, and bytes are all that moves
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_table, context_lens, path, path_lens = dense(block_table, context_lens, path, path_lens)
    block_d = triton.next_power_of_2(dim)
    elements = chip_of(k_cache.device).warp_size * _BYTES_PER_THREAD // k_cache.dtype.itemsize
    heads = min(triton.next_power_of_2(kv_heads), max(elements // block_d, 1))
    with on_device(k_cache):
        _compact_kv_kernel[(batch, triton.cdiv(kv_heads, heads))](
            k_cache,
            v_cache,
            block_table,
            context_lens,
            path,
            path_lens,
            nodes,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0),
            KV_HEADS=kv_heads,
            HEAD_DIM=dim,
            HEADS=heads,
            BLOCK_D=block_d,
            PAGE_SIZE=page_size,
            HAS_PATH_LENS=path_lens is not None,
            num_warps=1,
            **EXACT,
        )
