"""``verify_attention``: T new positions of each request attend to its paged context and to one another.

    out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . k[j]) v[j]      over the keys j that position t may see

fp32 throughout. Three choices serve exactness and the CPU:

* Keys are taken in tiles of ``KEY_TILE`` that begin at multiples of it, and every matrix product has a tile's shape, so
  that a row's bits do not depend on how many rows are scored with it, nor on what follows it in the text.
* The G query heads that share a KV head are folded into the rows of one product: keys and values are never expanded.
* Rows are padded to a multiple of ``ROW_TILE``: BLAS libraries switch algorithm, and rounding, below 4 rows.

As a row's bits depend on nothing beside it, a batch may be attended to in any groups. The CPU path forms them by length
and by number of rows, so that one long text or one long draft does not pad all others to its size.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from specdec_triton.reference.paging import Plan, gather, load, make_plan

KEY_TILE = 256
ROW_TILE = 8
ROW_BLOCK = 512  # rows whose scores are held at once
# Measured on the CPU path: fetching a key and its value costs as much as scoring FETCH_ROWS rows with them, and the
# operations of one group more as much as GROUP_COST elements (rows times keys times Hkv * D).
FETCH_ROWS = 12
GROUP_COST = 1 << 21
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
        rows = plan.pack(q)
        out = attend_planned(rows, k_cache, v_cache, plan, scale, sliding_window, softcap, sinks, k_scale, v_scale)
        take, _ = plan.new()
        if take is None:
            return out.view_as(q)
        return out.new_zeros(batch * count, *q.shape[2:]).index_copy_(0, take, out).view_as(q)
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
    begin = torch.zeros_like(context)
    bias, idle = _bias(context, lens, begin, count, q_heads // k_cache.shape[2], length, sliding_window, tree_mask)
    return _attend_heads(q, _Operands(q.shape, keys, values, bias, idle), scale, softcap, sinks)


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
    """The CPU path of passes: only the tiles that hold a key are touched, and one plan serves all layers of a pass.

    Args:
        q: ``[N,Hq,D]``, the new positions of the plan's requests, one behind the other; more rows are padding.

    Returns:
        ``[N,Hq,D]``; finite in rows of padding.
    """
    shape = (q.shape[1], *k_cache.shape[2:])

    def make() -> list[_Group]:
        return [
            _Group(plan, requests, shape, k_cache.dtype, sliding_window)
            for requests in _partition(plan, shape, sliding_window)
        ]

    groups: list[_Group] = plan.keep(("groups", shape, k_cache.dtype, sliding_window), make)
    total = sum(plan.counts)
    if len(q) == total and len(groups) == 1 and groups[0].is_all:
        return _attend_heads(q, groups[0].load(k_cache, v_cache, k_scale, v_scale), scale, softcap, sinks)
    out = q.new_zeros(max(len(q), total + 1), *q.shape[1:])
    for group in groups:
        rows, into = group.rows
        mine = q.index_select(0, rows)
        mine = _attend_heads(mine, group.load(k_cache, v_cache, k_scale, v_scale), scale, softcap, sinks)
        out.index_copy_(0, into, mine)
    return out[: len(q)]


def _partition(plan: Plan, shape: tuple[int, ...], window: int | None) -> list[list[int]]:
    """The active requests in groups that share an operand's size: apart where that saves more than a group costs."""
    q_heads, kv_heads, dim = shape
    alike: dict[tuple[int, int], list[int]] = {}  # (keys, rows), both padded: requests
    for b, (context, n) in enumerate(zip(plan.contexts, plan.counts, strict=True)):
        if n > 0:
            begin = _first_key(context, window) // KEY_TILE * KEY_TILE
            size = (_padded(context + n - begin, KEY_TILE), _padded(n * q_heads // kv_heads, ROW_TILE))
            alike.setdefault(size, []).append(b)

    def cost(size: tuple[int, int], requests: list[int]) -> int:
        return len(requests) * size[0] * (size[1] + FETCH_ROWS) * kv_heads * dim

    groups: list[tuple[tuple[int, int], list[int]]] = []
    for size, requests in sorted(alike.items(), reverse=True):
        if groups:
            last, others = groups[-1]
            joined, everyone = (last[0], max(last[1], size[1])), sorted(others + requests)
            if cost(joined, everyone) <= cost(last, others) + cost(size, requests) + GROUP_COST:
                groups[-1] = joined, everyone
                continue
        groups.append((size, requests))
    return [requests for _, requests in groups]


class _Group:
    """N requests of a plan that are attended to together, and the buffers of their products.

    Args:
        shape: Hq, Hkv and D. dtype: the caches'.

    Attributes:
        is_all: their rows are 0, 1, 2, ... of the pass.
        slots: int64 ``[N*L]``, counted through all pages: where the L keys from each request's first tile on lie. Beside
            the keys it has, the nearest is repeated, which no row sees: nothing else may be read.
        fetched: ``[N*L,Hkv,D]``, a layer's keys, then its values. by_head: the same as ``[N,Hkv,L,D]``.
    """

    def __init__(
        self, plan: Plan, requests: list[int], shape: tuple[int, ...], dtype: torch.dtype, window: int | None
    ) -> None:
        q_heads, kv_heads, dim = shape
        chosen, counts = np.array(requests), np.array(plan.counts)
        context, lens = np.array(plan.contexts)[chosen], counts[chosen]
        count = int(lens.max())
        self.is_all = len(requests) * count == sum(plan.counts)
        self._requests, self._counts, self._count = chosen, counts, count
        first = np.array([_first_key(plan.contexts[b], window) for b in requests])
        begin, end = first // KEY_TILE * KEY_TILE, context + lens
        length = _padded(int((end - begin).max()), KEY_TILE)
        position = begin[:, None] + np.arange(length)
        position = np.minimum(np.maximum(position, first[:, None]), end[:, None] - 1)
        self.slots = plan.slots(chosen[:, None], position).flatten()
        self.fetched = torch.empty(len(self.slots), kv_heads, dim, dtype=dtype)
        self.by_head = self.fetched.unflatten(0, (len(requests), length)).transpose(1, 2)
        group = q_heads // kv_heads
        if plan.masks is None:
            bias = _chain_bias(context - begin, lens, count, group, length, window)
        else:
            mask = torch.tensor(plan.masks)[requests, :count]
            at = torch.from_numpy(np.stack((context, lens, begin)))
            bias, _ = _bias(at[0], at[1], at[2], count, group, length, window, mask)
        keys, values = torch.empty(2, len(requests), kv_heads, length, dim, dtype=torch.float32)
        self.operands = _Operands((len(requests), count, q_heads, dim), keys, values, bias, None)

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ``[N*T]``: where their T new positions each lie in the pass's rows; a request that has fewer repeats its last. And the
        same, but those repeated go to one row behind all."""
        counts, lens, step = self._counts, self._counts[self._requests, None], np.arange(self._count)
        row = (counts.cumsum() - counts)[self._requests, None] + step
        into = np.where(step < lens, row, counts.sum())
        return torch.from_numpy(np.minimum(row, row[:, :1] + lens - 1).ravel()), torch.from_numpy(into.ravel())

    def load(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> _Operands:
        """The operands with a layer's keys and values."""
        x = self.operands
        for cache, factor, out in ((k_cache, k_scale, x.keys), (v_cache, v_scale, x.values)):
            load(cache, self.slots, self.fetched)
            out.copy_(self.by_head)
            if factor is not None:
                out *= factor[:, None, None]
        return x


def _first_key(context: int, window: int | None) -> int:
    """The first position that a new token after ``context`` old ones sees."""
    return 0 if window is None else max(context + 1 - window, 0)


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Operands:
    """What the matrix products of a pass read, fp32, and the views of it that they take.

    Args:
        shape: B, T, Hq and D. keys, values: ``[B,Hkv,L,D]``, L a multiple of KEY_TILE. bias, idle: see :func:`_bias`.

    Attributes:
        rows: ``[B*Hkv,R,D]``: the G query heads of a KV head and the T positions folded, R = T * G padded with zeros.
        query: the rows that are not padding, as ``[B,Hkv,T,G,D]``.
        tiles: keys ``[B*Hkv,D,KEY_TILE]``, values ``[B*Hkv,KEY_TILE,D]`` and bias ``[B*Hkv or 1,R,KEY_TILE]`` of each tile.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
        idle: torch.Tensor | None,
    ) -> None:
        batch, count, q_heads, dim = shape
        kv_heads, length = keys.shape[1:3]
        self.shape = (batch, count, kv_heads, q_heads // kv_heads, dim)
        self.keys, self.values, self.idle = keys, values, idle
        rows = torch.zeros(batch, kv_heads, bias.shape[1], dim, dtype=torch.float32, device=keys.device)
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


def _chain_bias(
    before: np.ndarray, lens: np.ndarray, count: int, group: int, length: int, window: int | None
) -> torch.Tensor:
    """:func:`_bias` where there are no trees; ``before [B]``: keys from the first on that are not new."""
    step = np.arange(_padded(count * group, ROW_TILE)) // group
    last = np.where(step < lens[:, None], before[:, None] + step, length)[..., None]  # rows of padding see all
    key = np.arange(length)
    sees = key <= last
    if window is not None:
        sees &= (key > last - window) | (last == length)
    return torch.from_numpy(np.where(sees, np.float32(0), np.float32(NEG_INF)))


def _bias(
    context: torch.Tensor,
    lens: torch.Tensor,
    begin: torch.Tensor,
    count: int,
    group: int,
    length: int,
    window: int | None,
    tree_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """0 where a row sees a key, -inf elsewhere; fp32 ``[B,R,L]``: rows in the order (t, g), padded; keys from begin ``[B]`` on.

    Second, bool ``[B,T]``: the positions that see nothing (t >= query_lens, or an empty tree mask), None if there are
    none. Their rows get 0 everywhere, lest they turn NaN; the caller clears their output.
    """
    device = context.device
    key = begin[:, None] + torch.arange(length, device=device)  # [B,L]
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
        sees = sees & (key[:, None] > (context[:, None] + depth)[..., None] - window)
    idle = ~sees.any(-1)
    bias = torch.zeros(sees.shape, dtype=torch.float32, device=device).masked_fill_(~(sees | idle[..., None]), NEG_INF)
    bias = torch.nn.functional.pad(bias.repeat_interleave(group, 1), (0, 0, 0, -count * group % ROW_TILE))
    if device.type == "cpu" and not bool(idle.any()):
        return bias, None
    return bias, idle
