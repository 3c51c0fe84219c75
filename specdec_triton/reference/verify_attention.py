"""``verify_attention``: T new positions of each request attend to its paged context and to one another.

    out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[j]) v[j]      over the keys j that position t may see

fp32 throughout. Three choices serve exactness and the CPU:

* Keys are taken in tiles of ``KEY_TILE`` that begin at multiples of it, and every matrix product has a tile's shape, so
  that a row's bits do not depend on how many rows are scored with it, nor on what follows it in the text.
* The G query heads that share a KV head are folded into the rows of one product: keys and values are never expanded.
* Rows are padded to a multiple of ``ROW_TILE``: BLAS libraries switch algorithm, and rounding, below 4 rows.
"""

from __future__ import annotations

import torch

from specdec_triton.reference.paging import Plan, gather, load, make_plan

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
    batch, count, q_heads, _ = q.shape
    page_size = k_cache.shape[1]
    if batch == 0 or count == 0:
        return torch.zeros_like(q)
    if q.device.type == "cpu" and tree_mask is None:
        plan = make_plan(block_table, context_lens, query_lens, count, page_size)
        return attend_planned(q, k_cache, v_cache, plan, scale, sliding_window, softcap, sinks, k_scale, v_scale)
    context = context_lens.long()
    lens = torch.full_like(context, count) if query_lens is None else query_lens.long()
    # Keys below the window of every row may lie in freed pages. A node with an empty mask has depth -1.
    start = torch.zeros_like(context) if sliding_window is None else context - sliding_window
    length = -(-block_table.shape[1] * page_size // KEY_TILE) * KEY_TILE
    end = torch.where(lens > 0, context + lens, 0)
    keys = gather(k_cache, k_scale, block_table, start, end, length)
    values = gather(v_cache, v_scale, block_table, start, end, length)
    bias, idle = _bias(context, lens, count, q_heads // k_cache.shape[2], 0, length, sliding_window, tree_mask)
    rows = _row_buffer(q, k_cache.shape[2])
    return _attend_heads(q, keys, values, bias, idle, scale, softcap, sinks, rows)


def attend_planned(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: Plan,
    scale: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CPU path for chains: only the tiles that hold a key are touched, and one plan serves all layers of a pass."""
    group = q.shape[2] // k_cache.shape[2]
    below = None if sliding_window is None else 1 - sliding_window
    begin, length, reads = plan.reads(below, KEY_TILE)
    if length == 0:
        return torch.zeros_like(q)
    kv_heads, dim = k_cache.shape[2:]
    bias, idle = plan.keep(
        ("bias", group, sliding_window),
        lambda: _bias(
            torch.tensor(plan.contexts), torch.tensor(plan.counts), plan.count, group, begin, length, sliding_window,
            None,
        ),
    )  # fmt: skip
    # The buffers serve all layers of the pass, so they stay in the cache; each layer writes the same parts of them.
    shape = (2, len(plan.contexts), kv_heads, length, dim)
    k_buffer, v_buffer = plan.keep(("tiles", shape, sliding_window), lambda: torch.zeros(shape))
    keys, values = load(k_cache, k_scale, k_buffer, reads), load(v_cache, v_scale, v_buffer, reads)
    rows = plan.keep(("rows", shape, group), lambda: _row_buffer(q, kv_heads))
    return _attend_heads(q, keys, values, bias, idle, scale, softcap, sinks, rows)


def _row_buffer(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Zeros fp32 ``[B,Hkv,R,D]`` for the folded query, R = T * G padded."""
    batch, count, q_heads, dim = q.shape
    rows = count * (q_heads // kv_heads)
    return torch.zeros(batch, kv_heads, -(-rows // ROW_TILE) * ROW_TILE, dim, device=q.device)


def _attend_heads(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    idle: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    buffer: torch.Tensor,
) -> torch.Tensor:
    """Fold the query heads of a KV head into rows, attend, unfold; positions that see nothing give 0."""
    batch, count, q_heads, dim = q.shape
    kv_heads, padded = buffer.shape[1:3]
    group = q_heads // kv_heads
    rows = count * group
    # [B,T,Hkv,G,D] -> [B,Hkv,T,G,D] -> [B*Hkv,R,D]
    grouped = q.unflatten(2, (kv_heads, group)).transpose(1, 2)
    buffer[:, :, :rows].view(batch, kv_heads, count, group, dim).copy_(grouped)
    folded = buffer.flatten(0, 1)
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
    tiles = [slice(first, first + KEY_TILE) for first in range(0, keys.shape[1], KEY_TILE)]
    scores = []
    for tile in tiles:
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
    for tile in tiles:
        part, tile_values = weights[..., tile], values[:, tile]
        out = torch.bmm(part, tile_values) if out is None else out.add_(torch.bmm(part, tile_values))
    assert out is not None
    return out


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
