"""``compact_kv``: move the rows of an accepted path of a tree to where a chain's would lie."""

from __future__ import annotations

import torch

from specdec_triton.reference.paging import locate, scatter


def compact_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    path: torch.Tensor,
    path_lens: torch.Tensor | None,
) -> None:
    """In place, all rows read before any is written; see ``specdec_triton.ops.compact_kv``."""
    if 0 in (k_cache.numel(), block_table.numel(), path.numel()):
        return
    step = torch.arange(path.shape[1], device=path.device)
    valid = (path >= 0).int().cumprod(1) > 0 if path_lens is None else step < path_lens[:, None]
    moves = valid & (path != step)
    start = context_lens.long()[:, None]
    source = locate(block_table, start + path, moves, k_cache.shape[1])
    target = locate(block_table, start + step, moves, k_cache.shape[1])
    for cache in (k_cache, v_cache):
        if cache.dtype.itemsize == 1:
            cache = cache.view(torch.uint8)
        scatter(cache, cache[source], *target, moves)
