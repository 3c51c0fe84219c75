"""``append_kv``: write the new tokens' keys and values into the pages of their requests."""

from __future__ import annotations

import torch

from specdec_triton.reference.paging import Plan, locate, make_plan


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
    count, page_size = k.shape[1], k_cache.shape[1]
    if k_scale is not None:
        k = k / k_scale[:, None]
    if v_scale is not None:
        v = v / v_scale[:, None]
    if k.device.type == "cpu":
        append_planned(k, v, k_cache, v_cache, make_plan(block_table, context_lens, query_lens, count, page_size))
        return
    step = torch.arange(count, device=k.device)
    position = context_lens.long()[:, None] + step
    valid = torch.ones_like(position, dtype=torch.bool) if query_lens is None else step < query_lens[:, None]
    page, slot = locate(block_table, position, valid, page_size)
    # A row past query_lens must not write. It repeats its request's row 0 instead, or what lies there if it has none.
    if query_lens is not None:
        page, slot = (torch.where(valid, x, x[:, :1]) for x in (page, slot))
    for x, cache in ((k, k_cache), (v, v_cache)):
        new = _stored(x, cache)
        if query_lens is not None:
            anchor = torch.where(valid[:, :1, None, None], new[:, :1], cache[page[:, :1], slot[:, :1]])
            new = torch.where(valid[..., None, None], new, anchor)
        cache[page, slot] = new


def append_planned(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan) -> None:
    """The CPU path: slices, page by page (one or two short copies in a decode pass)."""
    if k_cache.dtype.itemsize == 1:
        k, v = _stored(k, k_cache), _stored(v, v_cache)
    for b, tokens, page, slots in plan.writes:
        k_cache[page, slots] = k[b, tokens]
        v_cache[page, slots] = v[b, tokens]


def _stored(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # e4m3 has no infinity: saturate instead of writing NaN
        limit = torch.finfo(cache.dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(cache.dtype)
