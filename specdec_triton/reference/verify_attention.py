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
    if batch == 0 or count == 0 or len(k_cache) == 0:
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
    if length == 0:
        return torch.zeros_like(q)
    keys = gather(k_cache, k_scale, block_table, start, end, length)
    values = gather(v_cache, v_scale, block_table, start, end, length)
    bias, idle = _bias(context, lens, count, q_heads // k_cache.shape[2], 0, length, sliding_window, tree_mask)
    return _attend_heads(q, _Operands(q, keys, values, bias, idle), scale, softcap, sinks)


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
    below = None if sliding_window is None else 1 - sliding_window
    begin, length, reads = plan.reads(below, KEY_TILE)
    if length == 0:
        return torch.zeros_like(q)
    q_heads, (kv_heads, dim) = q.shape[2], k_cache.shape[2:]

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside it
    def make() -> _Operands:
        context, lens = torch.tensor(plan.contexts), torch.tensor(plan.counts)
        bias, idle = _bias(context, lens, plan.count, q_heads // kv_heads, begin, length, sliding_window, None)
        keys, values = torch.zeros(2, len(plan.contexts), kv_heads, length, dim, dtype=torch.float32)
        return _Operands(q, keys, values, bias, idle)

    # All layers of the pass write the same parts of the operands, so the zeros beside them stay.
    operands = plan.keep(("operands", q_heads, kv_heads, dim, sliding_window), make)
    load(k_cache, k_scale, operands.keys, reads)
    load(v_cache, v_scale, operands.values, reads)
    return _attend_heads(q, operands, scale, softcap, sinks)


class _Operands:
    """What the matrix products of a pass read, fp32, and the views of it that they take.

    Args:
        q: ``[B,T,Hq,D]``, for its shape. keys, values: ``[B,Hkv,L,D]``, L a multiple of KEY_TILE. bias, idle: see :func:`_bias`.

    Attributes:
        rows: ``[B*Hkv,R,D]``: the G query heads of a KV head and the T positions folded, R = T * G padded with zeros.
        query: the rows that are not padding, as ``[B,Hkv,T,G,D]``.
        tiles: keys ``[B*Hkv,D,KEY_TILE]``, values ``[B*Hkv,KEY_TILE,D]`` and bias ``[B*Hkv or 1,R,KEY_TILE]`` of each tile.
    """

    def __init__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        idle: torch.Tensor | None,
    ) -> None:
        batch, count, q_heads, dim = q.shape
        kv_heads, length = keys.shape[1:3]
        self.shape = (batch, count, kv_heads, q_heads // kv_heads, dim)
        self.keys, self.values, self.idle = keys, values, idle
        rows = torch.zeros(batch, kv_heads, bias.shape[1], dim, dtype=torch.float32, device=q.device)
        self.rows = rows.flatten(0, 1)
        self.query = rows[:, :, : count * self.shape[3]].unflatten(2, (count, -1))
        if batch > 1:
            bias = bias.repeat_interleave(kv_heads, 0)
        flat_keys, flat_values = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
        spans = [slice(first, first + KEY_TILE) for first in range(0, length, KEY_TILE)]
        self.tiles = [(flat_keys[..., span], flat_values[:, span], bias[..., span]) for span in spans]


def _attend_heads(
    q: torch.Tensor, x: _Operands, scale: float | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Fold the query heads of a KV head into rows, attend, unfold; positions that see nothing give 0."""
    batch, count, kv_heads, group, dim = x.shape
    padded, rows = x.rows.shape[1], count * group
    x.query.copy_(q.view(x.shape).transpose(1, 2))
    sink_rows = None
    if sinks is not None:  # a sink is a key without a value
        sink_rows = sinks.float().view(1, kv_heads, 1, group).expand(batch, kv_heads, count, group)
        sink_rows = torch.nn.functional.pad(sink_rows.flatten(2), (0, padded - rows)).reshape(-1, padded, 1)
    factor = dim**-0.5 if scale is None else scale
    if padded <= ROW_BLOCK:
        out = _attend(x.rows, x.tiles, factor, softcap, sink_rows)
    else:
        blocks = []
        for first in range(0, padded, ROW_BLOCK):
            r = slice(first, first + ROW_BLOCK)
            tiles = [(keys, values, bias[:, r]) for keys, values, bias in x.tiles]
            sink = None if sink_rows is None else sink_rows[:, r]
            blocks.append(_attend(x.rows[:, r], tiles, factor, softcap, sink))
        out = torch.cat(blocks, 1)
    out = out[:, :rows].view(batch, kv_heads, count, group, dim).transpose(1, 2).reshape(q.shape).to(q.dtype)
    return out if x.idle is None else out.masked_fill(x.idle[..., None, None], 0)


def _attend(
    q: torch.Tensor,
    tiles: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale q k + bias) v for q ``[N,R,D]``, N = B * Hkv.

    Trailing tiles that a row does not see leave its bits as they are: they add zeros.
    """
    scores = []
    for keys, _, bias in tiles:
        if softcap is None:
            scores.append(torch.baddbmm(bias, q, keys, alpha=scale))
        else:
            scores.append(torch.bmm(q, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(bias))
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
    if sinks is None:
        weights = joined.softmax(-1)
    else:
        highest = torch.maximum(joined.amax(-1, keepdim=True), sinks)
        weights = (joined - highest).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sinks - highest).exp_()
    parts = weights.split(KEY_TILE, -1)
    out = torch.bmm(parts[0], tiles[0][1])
    for part, (_, values, _) in zip(parts[1:], tiles[1:], strict=True):
        out.add_(torch.bmm(part, values))
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
    bias = torch.zeros(sees.shape, dtype=torch.float32, device=device).masked_fill_(~(sees | idle[..., None]), NEG_INF)
    bias = torch.nn.functional.pad(bias.repeat_interleave(group, 1), (0, 0, 0, -count * group % ROW_TILE))
    if device.type == "cpu" and not bool(idle.any()):
        return bias, None
    return bias, idle
