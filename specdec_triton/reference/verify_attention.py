"""``verify_attention``: T new positions of each request attend to its paged context and to one another.

    out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[j]) v[j]      over the keys j that position t may see

fp32 throughout. Three choices serve exactness and the CPU:

* Keys are taken in tiles of ``KEY_TILE`` that begin at multiples of it, and every matrix product has a tile's shape, so
  that a row's bits do not depend on how many rows are scored with it, nor on what follows it in the text.
* The G query heads that share a KV head are folded into the rows of one product: keys and values are never expanded.
* Rows are padded to a multiple of ``ROW_TILE``: BLAS libraries switch algorithm, and rounding, below 4 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

KEY_TILE = 256
ROW_TILE = 8
ROW_BLOCK = 512  # rows whose scores are held at once
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
    rows = count * group
    padded = -(-rows // ROW_TILE) * ROW_TILE
    if batch == 0 or count == 0:
        return torch.zeros_like(q)

    lens = context_lens.new_full((batch,), count) if query_lens is None else query_lens
    if q.device.type == "cpu":  # lengths are at hand: touch only what the requests use
        plan = _plan(
            tuple(map(tuple, block_table.tolist())), tuple(context_lens.tolist()), tuple(lens.tolist()),
            k_cache.shape[1], count, group, sliding_window,
        )  # fmt: skip
        if plan.length == 0:
            return torch.zeros_like(q)
        keys, values = plan.load(k_cache, k_scale), plan.load(v_cache, v_scale)
        begin, bias, idle = plan.begin, plan.bias, plan.idle
    else:
        begin, bias, idle = 0, None, None
        stop, end = block_table.shape[1] * k_cache.shape[1], context_lens.long() + lens
        keys = _gather(k_cache, k_scale, block_table, end, stop)
        values = _gather(v_cache, v_scale, block_table, end, stop)
    if tree_mask is not None or bias is None:
        bias, idle = _bias(
            context_lens.long(), lens.long(), count, group, begin, keys.shape[1], sliding_window, tree_mask
        )

    # [B,T,Hkv,G,D] -> [B,Hkv,T,G,D] -> [B*Hkv, T*G padded, D]
    folded = q.unflatten(2, (kv_heads, group)).transpose(1, 2).reshape(batch * kv_heads, rows, dim).float()
    if padded > rows:
        folded = torch.cat((folded, _zeros(batch * kv_heads, padded - rows, dim, q.device)), 1)
    sink_rows = None
    if sinks is not None:  # a sink is a key without a value
        sink_rows = sinks.float().view(1, kv_heads, 1, group).expand(batch, kv_heads, count, group)
        sink_rows = torch.nn.functional.pad(sink_rows.flatten(2), (0, padded - rows)).reshape(-1, padded, 1)
    factor = dim**-0.5 if scale is None else scale
    blocks = []
    for first in range(0, padded, ROW_BLOCK):
        r = slice(first, first + ROW_BLOCK)
        sink = None if sink_rows is None else sink_rows[:, r]
        blocks.append(_attend(folded[:, r], keys, values, bias[:, r], factor, softcap, sink))
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    out = out[:, :rows].view(batch, kv_heads, count, group, dim).transpose(1, 2).reshape(q.shape).to(q.dtype)
    return out if idle is None else out.masked_fill(idle[..., None, None], 0)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale q k + bias) v for q ``[N,R,D]``, keys and values ``[N,L,D]``, bias ``[B,R,L]``, N = B * Hkv.

    L is a multiple of KEY_TILE; trailing tiles that a row does not see leave its bits as they are: they add zeros.
    """
    heads = q.shape[0] // bias.shape[0]
    tiles = range(0, keys.shape[1], KEY_TILE)
    scores = []
    for first in tiles:
        tile = slice(first, first + KEY_TILE)
        transposed = keys[:, tile].transpose(1, 2)
        tile_bias = bias[..., tile] if heads == 1 or bias.shape[0] == 1 else bias[..., tile].repeat_interleave(heads, 0)
        if softcap is None:
            scores.append(torch.baddbmm(tile_bias, q, transposed, alpha=scale))
        else:
            scores.append(torch.bmm(q, transposed).mul_(scale / softcap).tanh_().mul_(softcap).add_(tile_bias))
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
    if sinks is None:
        weights = joined.softmax(-1)
    else:
        highest = torch.maximum(joined.amax(-1, keepdim=True), sinks)
        weights = (joined - highest).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sinks - highest).exp_()
    out = None
    for first in tiles:
        tile = slice(first, first + KEY_TILE)
        part, tile_values = weights[..., tile], values[:, tile]
        out = torch.bmm(part, tile_values) if out is None else out.add_(torch.bmm(part, tile_values))
    assert out is not None
    return out


@dataclass(frozen=True)
class _Plan:
    """Where the keys of a pass lie, and who sees them: the same for all layers, so made once (CPU only).

    Attributes:
        begin, length: the keys' first position, a multiple of KEY_TILE, and their number, whole tiles.
        sources: for each request its pages (a slice of adjacent ones, or their ids), the slots to skip, and its keys.
        bias, idle: see :func:`_bias`, for a chain.
    """

    begin: int
    length: int
    sources: tuple[tuple[slice | torch.Tensor, int, int], ...]
    bias: torch.Tensor | None
    idle: torch.Tensor | None

    def load(self, cache: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        """Keys or values, fp32 ``[B*Hkv,L,D]``, 0 past a request's end.

        Neither table entries nor slots past a request's length are used: they may hold anything.
        """
        tiles = []
        for pages, skip, used in self.sources:
            tile = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
            tile = tile.flatten(0, 1)[skip : skip + used].float()
            if factor is not None:
                tile = tile * factor[:, None]
            if used < self.length:
                tile = torch.cat((tile, _zeros(self.length - used, *cache.shape[2:], cache.device)))
            tiles.append(tile)
        if len(tiles) == 1:
            return tiles[0].transpose(0, 1)
        return torch.stack(tiles).transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=8)
def _plan(
    tables: tuple[tuple[int, ...], ...],
    contexts: tuple[int, ...],
    counts: tuple[int, ...],
    page_size: int,
    count: int,
    group: int,
    window: int | None,
) -> _Plan:
    active = [(context, n) for context, n in zip(contexts, counts, strict=True) if n > 0]
    if not active:
        return _Plan(0, 0, (), None, None)
    first = 0 if window is None else min(max(context + 1 - window, 0) for context, _ in active)
    begin = first // KEY_TILE * KEY_TILE
    length = -(-(max(context + n for context, n in active) - begin) // KEY_TILE) * KEY_TILE
    sources = []
    for table, context, n in zip(tables, contexts, counts, strict=True):
        used = max(context + n - begin, 0) if n else 0
        pages: slice | torch.Tensor = slice(0, 0)
        if used:
            ids = list(table[begin // page_size : -(-(begin + used) // page_size)])
            adjacent = ids == list(range(ids[0], ids[0] + len(ids)))
            pages = slice(ids[0], ids[0] + len(ids)) if adjacent else torch.tensor(ids)
        sources.append((pages, begin % page_size, used))
    bias, idle = _bias(torch.tensor(contexts), torch.tensor(counts), count, group, begin, length, window, None)
    return _Plan(begin, length, tuple(sources), bias, idle)


@lru_cache(maxsize=64)
def _zeros(a: int, b: int, c: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(a, b, c, device=device)


def _gather(
    cache: torch.Tensor, factor: torch.Tensor | None, block_table: torch.Tensor, end: torch.Tensor, stop: int
) -> torch.Tensor:
    """The same on a device, where lengths are not read: every slot of the table's width, masked."""
    page_size = cache.shape[1]
    position = torch.arange(-(-stop // KEY_TILE) * KEY_TILE, device=cache.device)
    valid = position < end[:, None]
    index = torch.where(valid, (position // page_size)[None], 0)
    page = torch.where(valid, block_table.gather(1, index).long(), 0)
    tile = cache[page, (position % page_size).expand_as(page)].float()  # [B,L,Hkv,D]
    if factor is not None:
        tile = tile * factor[:, None]
    return tile.masked_fill(~valid[..., None, None], 0).transpose(1, 2).flatten(0, 1)


def _bias(
    context: torch.Tensor,
    lens: torch.Tensor,
    count: int,
    group: int,
    begin: int,
    length: int,
    window: int | None,
    tree_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """0 where a row sees a key, -inf elsewhere; fp32 ``[B,R,L]``: rows in the order (t, g), padded.

    Second, bool ``[B,T]``: the positions that see nothing (t >= query_lens, or an empty tree mask), None if there are
    none. Their rows get 0 everywhere, lest they turn NaN; the caller clears their output.
    """
    device = context.device
    key = begin + torch.arange(length, device=device)
    step = torch.arange(count, device=device)
    new = key - context[:, None]  # [B,L]; >= 0: index of a new position
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
    idle = ~sees.any(-1)
    bias = torch.zeros(sees.shape, device=device).masked_fill_(~(sees | idle[..., None]), NEG_INF)
    bias = torch.nn.functional.pad(bias.repeat_interleave(group, 1), (0, 0, 0, -count * group % ROW_TILE))
    if device.type == "cpu" and not bool(idle.any()):
        return bias, None
    return bias, idle
