"""``append_kv``: write the new tokens' keys and values into the pages of their requests."""

from __future__ import annotations

import torch

from specdec_triton.reference.paging import Plan, locate, make_plan, scatter, store


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
        plan = make_plan(block_table, context_lens, query_lens, count, page_size)
        append_planned(plan.pack(k), plan.pack(v), k_cache, v_cache, plan)
    else:
        append_on_device(k, v, k_cache, v_cache, block_table, context_lens, query_lens)


def append_on_device(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
) -> None:
    """The path without host reads; rows past query_lens are not written."""
    if 0 in (k.numel(), k_cache.numel(), block_table.numel()):
        return
    step = torch.arange(k.shape[1], device=k.device)
    position = context_lens.long()[:, None] + step
    valid = torch.ones_like(position, dtype=torch.bool) if query_lens is None else step < query_lens[:, None]
    place = locate(block_table, position, valid, k_cache.shape[1])
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = _stored(x, cache)
        if cache.dtype.itemsize == 1:
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
        scatter(cache, rows, *place, valid)


def append_planned(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan) -> None:
    """The CPU path: one indexed write per cache.

    Args:
        k, v: ``[N,Hkv,D]``, the new tokens of the plan's requests, one behind the other; more rows are not read.
    """
    _, slots = plan.new()
    if len(slots) == 0:
        return
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows = x[: len(slots)]
        store(cache, slots, rows if rows.dtype == cache.dtype else _stored(rows, cache))


def _stored(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # e4m3 has no infinity: saturate instead of writing NaN
        limit = torch.finfo(cache.dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(cache.dtype)
