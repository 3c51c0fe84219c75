"""``append_kv``: write the new tokens' keys and values into the pages of their requests."""

from __future__ import annotations

import torch

from specdec_triton.reference.paging import token_slots


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
    batch, count = k.shape[:2]
    page_size = k_cache.shape[1]
    if k_scale is not None:
        k = k / k_scale[:, None]
    if v_scale is not None:
        v = v / v_scale[:, None]

    if k.device.type == "cpu":
        # Lengths are at hand: copy slices, page by page (a handful of short copies in a decode pass).
        counts = [count] * batch if query_lens is None else query_lens.tolist()
        rows = zip(block_table.tolist(), context_lens.tolist(), counts, strict=True)
        for b, (table, context, n) in enumerate(rows):
            t = 0
            while t < n:
                page, slot = table[(context + t) // page_size], (context + t) % page_size
                width = min(page_size - slot, n - t)
                k_cache[page, slot : slot + width] = _stored(k[b, t : t + width], k_cache)
                v_cache[page, slot : slot + width] = _stored(v[b, t : t + width], v_cache)
                t += width
        return

    step = torch.arange(count, device=k.device)
    valid = torch.ones(batch, count, dtype=torch.bool, device=k.device)
    if query_lens is not None:
        valid = step < query_lens[:, None]
    page, slot = token_slots(block_table, context_lens.long(), count, valid, page_size)
    if query_lens is not None:
        if k.device.type == "meta":
            return
        page, slot, k, v = page[valid], slot[valid], k[valid], v[valid]
    k_cache[page, slot] = _stored(k, k_cache)
    v_cache[page, slot] = _stored(v, v_cache)


def _stored(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # e4m3 has no infinity: saturate instead of writing NaN
        limit = torch.finfo(cache.dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(cache.dtype)
