"""One forward pass over the paged KV cache: its metadata, and the attention that a model runs in it.

The metadata travel through the model's keyword arguments to :func:`_attention_interface`, which transformers calls in place of its
own attention functions, and to rewritten decoder layers (``fusion/``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from specdec_triton import ops  # noqa: F401  registers the two
from specdec_triton.kv_cache import KVCache
from specdec_triton.reference.append_kv import append_planned
from specdec_triton.reference.paging import Plan, make_plan
from specdec_triton.reference.verify_attention import attend_planned
from specdec_triton.trees import Lineage

IMPLEMENTATION = "specdec_paged"
_append_kv = torch.ops.specdec.append_kv.default
_verify_attention = torch.ops.specdec.verify_attention.default


class Backends(NamedTuple):
    """Of append_kv (and rope_append), of verify_attention, and of the ops on rows: products, norms and the like."""

    append: str
    attention: str
    rows: str


class AttentionOptions(NamedTuple):
    """Of a layer; see ``ops.verify_attention``."""

    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass
class Pass:
    """Metadata of one forward pass: B requests with up to T new tokens each, packed into N rows.

    Attributes:
        cache: the pages.
        block_table: int32 ``[B,max_pages]``. context_lens, query_lens: int32 ``[B]`` (query_lens None: T each).
        batch, count: B and T. rows: B*T, or with ``take`` the number of real rows.
        take: int64 ``[B,T]``, the packed row of (b, t) (any row where t >= query_lens[b]); None: row b*T + t.
        put: int64 ``[N]``, the b*T + t of a packed row; None with take None.
        backends: of the ops.
        exact: whether a row's bits must not depend on the number of rows.
        softcap: whether the module's own attention applies the softcap that the model states.
        tree_mask: int64 ``[B,T]``, if the new tokens are nodes of trees; None: chains.
        plan: on the CPU, what append and attention would find out again in every layer; None: let them.
        made: what a layer has made of the pass's arguments and the next ones need too.
    """

    cache: KVCache
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_lens: torch.Tensor | None
    batch: int
    count: int
    rows: int
    take: torch.Tensor | None
    put: torch.Tensor | None
    backends: Backends
    exact: bool
    softcap: bool
    tree_mask: torch.Tensor | None
    plan: Plan | None
    made: dict[Any, Any] = field(default_factory=dict)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``[B,T,...]`` -> the packed rows ``[N,...]``."""
        x = x.flatten(0, 1)
        return x if self.put is None else x.index_select(0, self.put)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Packed rows ``[N,...]`` -> ``[B,T,...]``."""
        if self.take is not None:
            return x[self.take]
        x = x if len(x) == self.rows else x[: self.rows]
        return x.unflatten(0, (self.batch, self.count))

    def attend(self, layer: int, q: torch.Tensor, options: AttentionOptions, total: int) -> torch.Tensor:
        """Attention of q ``[B,T,Hq,D]``, whose keys have been appended, in ``total`` packed rows: ``[total,Hq,D]``."""
        scale, window, softcap, sinks = options
        out = _verify_attention(
            q, *self.cache.layer(layer), self.block_table, self.context_lens, self.query_lens, scale, self.tree_mask,
            window,
            softcap if self.softcap else None, sinks, None, None, self.backends.attention,
        ).flatten(0, 1)  # fmt: skip
        if self.put is not None:
            out = out.index_select(0, self.put)
        if len(out) < total:  # rows that only pad the matrix products
            out = torch.cat((out, out.new_zeros(total - len(out), *out.shape[1:])))
        return out


def make_pass(
    cache: KVCache,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor | None,
    batch: int,
    count: int,
    *,
    backends: Backends,
    reads: bool,
    exact: bool = False,
    softcap: bool = False,
    tree: Lineage | None = None,
) -> tuple[Pass, torch.Tensor]:
    """A pass, and the positions of its rows, int64 ``[N]``.

    Args:
        tree: the new tokens are nodes of trees, ``[B,T]`` each: they see their ancestors, and their positions follow from their depth.
        reads: whether lengths may be read; then rows past them are left out, else they stay, at a position inside the text.
    """
    step = torch.arange(count, device=context_lens.device)
    # Rows past query_lens stay inside position tables, which end with the context.
    inside = step if query_lens is None else torch.minimum(step, query_lens[:, None] - 1)
    place = inside if tree is None else tree.depth.gather(1, inside.clamp(min=0).long().expand(batch, -1))
    position = (context_lens[:, None] + place).long()
    if query_lens is not None:
        position = position.clamp(min=0)
    position = position.flatten()
    total, take, put, plan = batch * count, None, None, None
    tree_mask = None if tree is None else tree.mask
    if reads:
        lens = [count] * batch if query_lens is None else query_lens.tolist()
        if min(lens) == count:
            query_lens = None
        else:
            assert query_lens is not None
            put = torch.cat([b * count + step[:n] for b, n in enumerate(lens)])
            total = len(put)
            starts = query_lens.cumsum(0) - query_lens
            take = (starts[:, None] + inside).clamp(min=0, max=total - 1)
            position = position[put]
        if backends[:2] == ("torch", "torch"):
            plan = make_plan(block_table, context_lens, query_lens, count, cache.page_size, tree_mask)
    p = Pass(
        cache=cache,
        block_table=block_table,
        context_lens=context_lens,
        query_lens=query_lens,
        batch=batch,
        count=count,
        rows=total,
        take=take,
        put=put,
        backends=backends,
        exact=exact,
        softcap=softcap,
        tree_mask=tree_mask,
        plan=plan,
    )
    return p, position


def applies_softcap(config: Any) -> bool:
    """Whether the model's own attention does. sdpa has none: older transformers drop it there without a word, and the text is what the
    module writes."""
    return bool(config._attn_implementation != "sdpa")


def paged_attention(
    p: Pass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Append the rows' keys and values ``[N,Hkv,D]`` to the pages, attend with q ``[N,Hq,D]``: ``[N,Hq,D]``."""
    k_cache, v_cache = p.cache.layer(layer)
    if p.plan is not None:
        append_planned(k, v, k_cache, v_cache, p.plan)
        scale, window, softcap, sinks = options
        return attend_planned(q, k_cache, v_cache, p.plan, scale, window, softcap if p.softcap else None, sinks)
    _append_kv(
        p.unpack(k), p.unpack(v), k_cache, v_cache, p.block_table, p.context_lens, p.query_lens, None, None,
        p.backends.append,
    )  # fmt: skip
    return p.attend(layer, p.unpack(q), options, len(q))


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    specdec_pass: Pass | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query ``[1,Hq,N,D]``, key and value ``[1,Hkv,N,D]`` -> ``[1,N,Hq,D]``."""
    if specdec_pass is None:  # observe() lets no model through that drops the keyword arguments
        raise RuntimeError(
            "a decoder runs this model in another thread: call the module's own forward or generate between its steps"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    return paged_attention(specdec_pass, layer, q, k, v, options)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention_interface)
