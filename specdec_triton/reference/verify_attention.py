"""``verify_attention``: T new positions of each request attend to its paged context and to one another.

    out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[j]) v[j]      over the keys j that position t may see

Computed as flash attention is (Dao 2022; Milakov and Gimelshein 2018): keys in tiles of ``KEY_TILE``, an online softmax
across tiles, fp32 throughout. Three choices serve exactness and the CPU:

* The tiles begin at multiples of KEY_TILE, whatever T, B and the lengths are, and the matrix products have the tile's
  shape, so that a row's bits do not depend on how many rows are scored with it.
* The G query heads that share a KV head are folded into the rows of one product: keys and values are never expanded.
* Rows are padded to a multiple of ``ROW_TILE``: BLAS libraries switch algorithm, and rounding, below 4 rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch

KEY_TILE = 256
ROW_TILE = 8
NEG_INF = float("-inf")


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
    batch, count, q_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = q_heads // kv_heads
    device = q.device
    lens = context_lens.new_full((batch,), count) if query_lens is None else query_lens
    if batch == 0 or count == 0:
        return torch.zeros_like(q)
    if device.type == "cpu":
        contexts, counts = context_lens.tolist(), lens.tolist()
        first, stop = _key_range(contexts, counts, sliding_window)
        if stop == 0:
            return torch.zeros_like(q)
        causal = None if tree_mask is not None else (tuple(contexts), tuple(counts))
    else:
        first, stop, causal = 0, block_table.shape[1] * k_cache.shape[1], None

    rows = count * group
    padded = -(-rows // ROW_TILE) * ROW_TILE
    folded = torch.zeros(batch, kv_heads, padded, dim, dtype=torch.float32, device=device)
    grouped = q.view(batch, count, kv_heads, group, dim) if q.is_contiguous() else q.unflatten(2, (kv_heads, group))
    folded[:, :, :rows].view(batch, kv_heads, count, group, dim).copy_(grouped.permute(0, 2, 1, 3, 4))
    folded = folded.mul_(dim**-0.5 if scale is None else scale).flatten(0, 1)

    highest = total = out = None
    for begin in range(first, stop, KEY_TILE):
        keys, values = (
            _load_tile(cache, factor, block_table, context_lens, lens, begin, stop)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = torch.bmm(folded, keys.transpose(1, 2))  # [B*Hkv, rows, KEY_TILE]
        if softcap is not None:
            scores = (scores / softcap).tanh_().mul_(softcap)
        if causal is not None:
            bias = _causal_bias(*causal, count, group, padded, begin, sliding_window)
        else:
            bias = _bias(context_lens.long(), lens.long(), count, group, padded, begin, sliding_window, tree_mask)
        if bias is not None:
            scores = scores.view(batch, kv_heads, padded, KEY_TILE).add_(bias[:, None]).flatten(0, 1)
        tile_highest = scores.amax(-1, keepdim=True)
        new_highest = tile_highest if highest is None else torch.maximum(highest, tile_highest)
        weights = scores.sub_(new_highest.clamp(min=torch.finfo(torch.float32).min)).exp_()  # -inf - -inf: no NaN
        tile_total, tile_out = weights.sum(-1, keepdim=True), torch.bmm(weights, values)
        if highest is None:
            total, out = tile_total, tile_out
        else:
            keep = (highest - new_highest).exp_().nan_to_num_(0.0)
            total, out = total * keep + tile_total, out * keep + tile_out
        highest = new_highest

    if sinks is not None:  # a sink is a key without a value
        sink = sinks.float().view(1, kv_heads, 1, group).expand(batch, kv_heads, count, group).flatten(2)
        sink = torch.nn.functional.pad(sink, (0, padded - rows)).reshape(total.shape)
        new_highest = torch.maximum(highest, sink)
        keep = (highest - new_highest).exp_().nan_to_num_(0.0)
        total, out = total * keep + (sink - new_highest).exp_(), out * keep
    out = out / total.clamp(min=torch.finfo(torch.float32).tiny)  # a row that sees nothing: 0
    out = out.view(batch, kv_heads, padded, dim)[:, :, :rows].view(batch, kv_heads, count, group, dim)
    out = out.permute(0, 2, 1, 3, 4).reshape(q.shape).to(q.dtype)
    if query_lens is not None and not (device.type == "cpu" and min(counts) == count):
        step = torch.arange(count, device=device)
        out = out.masked_fill((step >= lens[:, None])[..., None, None], 0)
    return out


def _key_range(contexts: list[int], counts: list[int], window: int | None) -> tuple[int, int]:
    """First tile's begin, and the end of the keys, over the requests that have a query."""
    active = [(context, n) for context, n in zip(contexts, counts, strict=True) if n > 0]
    if not active:
        return 0, 0
    first = 0 if window is None else min(max(context + 1 - window, 0) for context, _ in active)
    return first // KEY_TILE * KEY_TILE, max(context + n for context, n in active)


def _load_tile(
    cache: torch.Tensor,
    factor: torch.Tensor | None,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    lens: torch.Tensor,
    begin: int,
    stop: int,
) -> torch.Tensor:
    """Keys or values begin .. begin + KEY_TILE - 1 of each request, fp32 ``[B*Hkv, KEY_TILE, D]``, 0 past its end.

    Neither table entries past a request's length nor slots past it are used: they may hold anything.
    """
    page_size = cache.shape[1]
    batch = block_table.shape[0]
    width = min(KEY_TILE, stop - begin)
    if cache.device.type == "cpu" and batch == 1:
        # One request: whole pages by index, without a mask.
        pages = block_table[0, begin // page_size : -(-(begin + width) // page_size)]
        tile = cache.index_select(0, pages).flatten(0, 1)[begin % page_size :][:width].float()
        if factor is not None:
            tile = tile * factor[:, None]
        if width < KEY_TILE:
            tile = torch.nn.functional.pad(tile, (0, 0, 0, 0, 0, KEY_TILE - width))
        return tile.transpose(0, 1)
    end = torch.where(lens > 0, context_lens + lens, 0).long()
    position = begin + torch.arange(KEY_TILE, device=cache.device)
    valid = position < end[:, None]
    index = torch.where(valid, (position // page_size)[None], 0)
    page = torch.where(valid, block_table.gather(1, index).long(), 0)
    tile = cache[page, (position % page_size).expand_as(page)].float()  # [B, KEY_TILE, Hkv, D]
    if factor is not None:
        tile = tile * factor[:, None]
    tile = tile.masked_fill(~valid[..., None, None], 0)
    return tile.transpose(1, 2).flatten(0, 1)


def _bias(
    context: torch.Tensor,
    lens: torch.Tensor,
    count: int,
    group: int,
    padded: int,
    begin: int,
    window: int | None,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    """0 where a row sees a key of the tile, -inf elsewhere; fp32 ``[B, padded, KEY_TILE]``."""
    device = context.device
    key = begin + torch.arange(KEY_TILE, device=device)
    step = torch.arange(count, device=device)
    new = key - context[:, None]  # [B, KEY_TILE]; >= 0: index of a new position
    if tree_mask is None:
        depth = step.expand(context.shape[0], count)
        sees = new[:, None] <= step[:, None]
    else:
        mask = tree_mask.expand(context.shape[0], count)
        bits = (mask[..., None] >> torch.arange(64, device=device)) & 1
        depth = bits.sum(-1) - 1
        sees = (new < 0)[:, None] | (bits.gather(2, new.clamp(0, 63)[:, None].expand(-1, count, -1)) > 0)
    sees = sees & (new < lens[:, None])[:, None] & (step < lens[:, None])[..., None]
    if window is not None:
        sees = sees & (key > (context[:, None] + depth)[..., None] - window)
    bias = torch.zeros(sees.shape, device=device).masked_fill_(~sees, NEG_INF)
    bias = bias.repeat_interleave(group, 1)
    return torch.nn.functional.pad(bias, (0, 0, 0, padded - bias.shape[1]))


@lru_cache(maxsize=16)
def _causal_bias(
    contexts: tuple[int, ...],
    counts: tuple[int, ...],
    count: int,
    group: int,
    padded: int,
    begin: int,
    window: int | None,
) -> torch.Tensor | None:
    """:func:`_bias` of a chain on the CPU, made once for all layers of a pass; None where every row sees the tile."""
    whole = min(contexts) + 1 >= begin + KEY_TILE and min(counts) == count
    if whole and (window is None or max(contexts) + count - 1 - window < begin):
        return None
    return _bias(torch.tensor(contexts), torch.tensor(counts), count, group, padded, begin, window, None)
