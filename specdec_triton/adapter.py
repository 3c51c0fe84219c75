"""Run a transformers causal language model over the paged KV cache.

The model stays the module that transformers loaded. For the length of one forward pass its attention implementation is
switched to :func:`paged_attention`, which appends the new keys and values to the pages and attends through
``verify_attention``; the pass's metadata travel through the model's keyword arguments. Which models this works for is
found by watching a short pass (``observe.py``), not from a list of names.

The new tokens of all requests form one sequence ``[1, N]`` with explicit position ids. Where values may be read (on a
CPU) the rows are packed: a batch whose requests draft different numbers of tokens has no padding rows in the model's
matrix products. On a device every request has T rows, whatever it uses of them: shapes depend on no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from specdec_triton import ops
from specdec_triton.exactness import InvariantRows, kernels_backend
from specdec_triton.kv_cache import KVCache
from specdec_triton.observe import Observation, attention_configs, has_dropout, model_lock, observe
from specdec_triton.reference.append_kv import append_planned
from specdec_triton.reference.paging import Plan, make_plan
from specdec_triton.reference.verify_attention import attend_planned
from specdec_triton.row_invariant import RowInvariant

IMPLEMENTATION = "specdec_paged"
_append_kv = torch.ops.specdec.append_kv.default
_verify_attention = torch.ops.specdec.verify_attention.default


@dataclass
class Pass:
    """Metadata of one forward pass: B requests with up to T new tokens each, packed into N rows.

    Attributes:
        cache: the pages.
        block_table: int32 ``[B,max_pages]``. context_lens, query_lens: int32 ``[B]`` (query_lens None: T each).
        batch, count: B and T. rows: B*T, or with ``take`` the number of real rows.
        take: int64 ``[B,T]``, the packed row of (b, t) (any row where t >= query_lens[b]); None: row b*T + t.
        put: int64 ``[N]``, the b*T + t of a packed row; None with take None.
        backend: of append_kv and of verify_attention.
        softcap: whether the module's own attention applies the softcap that the model states.
        plan: on the CPU, what both ops would find out again in every layer; None: let them.
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
    backend: tuple[str, str]
    softcap: bool
    plan: Plan | None

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Packed rows ``[N,H,D]`` -> ``[B,T,H,D]``."""
        if self.take is not None:
            return x[self.take]
        x = x if len(x) == self.rows else x[: self.rows]
        return x.view(self.batch, self.count, *x.shape[1:])


def paged_attention(
    p: Pass,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append the rows' keys and values ``[N,Hkv,D]`` to the pages, attend with q ``[N,Hq,D]``: ``[N,Hq,D]``."""
    k_cache, v_cache = p.cache.layer(layer)
    if p.plan is not None:
        append_planned(k, v, k_cache, v_cache, p.plan)
        return attend_planned(q, k_cache, v_cache, p.plan, scale, sliding_window, softcap, sinks)
    total = len(q)
    q, k, v = p.unpack(q), p.unpack(k), p.unpack(v)
    _append_kv(k, v, k_cache, v_cache, p.block_table, p.context_lens, p.query_lens, None, None, p.backend[0])
    out = _verify_attention(
        q, k_cache, v_cache, p.block_table, p.context_lens, p.query_lens, scale, None, sliding_window, softcap,
        sinks, None, None, p.backend[1],
    ).flatten(0, 1)  # fmt: skip
    if p.put is not None:
        out = out.index_select(0, p.put)
    if len(out) < total:  # rows that only pad the matrix products
        out = torch.cat((out, out.new_zeros(total - len(out), *out.shape[1:])))
    return out


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
    softcap = softcap if specdec_pass.softcap else None
    return paged_attention(specdec_pass, layer, q, k, v, scaling, sliding_window, softcap, s_aux)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention_interface)


class ModelAdapter:
    """A causal language model over paged KV.

    Args:
        model: a transformers causal language model on one device.
        backend: of the ops; see :mod:`specdec_triton.ops`.

    Raises:
        UnsupportedModelError: the model cannot be decoded this way; the message says why.
    """

    def __init__(self, model: Any, *, backend: str | None = None) -> None:
        self.model = model
        self.observation: Observation = observe(model)
        self.config = model.config.get_text_config()
        self.device: torch.device = self.observation.device
        self.dtype: torch.dtype = self.observation.dtype
        self.vocab_size: int = self.observation.vocab_size
        self.max_len: int | None = self.observation.max_len
        self.stop_ids = _eos_ids(model)
        self.fixed_shapes = self.device.type != "cpu"  # a pass reads no value back
        self._configs = attention_configs(model)
        like = torch.empty(0, device=self.device)
        self._backend = (
            ops.resolve_backend(backend, "append_kv", like),
            ops.resolve_backend(backend, "verify_attention", like),
        )
        self._invariant_backend = kernels_backend(backend, like)
        self._keeps_logits = self.observation.keeps_logits
        # sdpa has no softcap. Older transformers drop it there without a word, and the text is what the module writes.
        self._softcap = self.config._attn_implementation != "sdpa"
        self._rows: InvariantRows | None = None
        self.observation.check_cached_passes(self)

    def check_ready(self) -> None:
        """Raises RuntimeError in training mode, where passes are random."""
        if self.model.training and has_dropout(self.model):
            raise RuntimeError(f"{type(self.model).__name__} is in training mode, with dropout: call model.eval()")

    @property
    def pads(self) -> bool:
        """Whether exact passes are padded, and do not run in kernels that take any number of rows (see ``exactness.py``)."""
        return self._invariant_backend is None

    def invariant_products(self) -> AbstractContextManager[object]:
        """Where exact passes are not padded, the products and means in which they run; else nothing."""
        return nullcontext() if self.pads else RowInvariant(self._invariant_backend)

    def invariant_rows(self) -> InvariantRows:
        """The row counts of exact passes; found, or for the kernels tested, on first use.

        Raises:
            ExactnessError: there are none.
        """
        if self._rows is None:
            self._rows = InvariantRows(self)
        return self._rows

    def new_cache(
        self, *, slots: int, page_size: int, num_pages: int, growable: bool = False, max_tokens: int | None = None
    ) -> KVCache:
        """A KV cache of this model's shapes."""
        return KVCache(
            self.observation.layers,
            slots=slots,
            page_size=page_size,
            num_pages=num_pages,
            dtype=self.dtype,
            device=self.device,
            growable=growable,
            max_tokens=max_tokens,
        )

    def forward(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_lens: torch.Tensor | None = None,
        *,
        rows: int | None = None,
        last_only: bool = False,
        packed: bool = False,
    ) -> torch.Tensor:
        """One pass over the new tokens of B requests. Reads nothing back with ``fixed_shapes``.

        Args:
            tokens: int64 ``[B,T]``.
            block_table: int32 ``[B,max_pages]``, the requests' rows of the cache's table.
            context_lens: int32 ``[B]``, tokens already in the cache.
            query_lens: int32 ``[B]``, new tokens of each request, 0 to T; None: T.
            rows: an exact pass, by the way of this device: its products are padded to so many rows, or run in kernels for
                which the number does not matter (see ``exactness.py``).
            last_only: logits of each request's last new token alone.
            packed: logits of the new tokens alone, those of a request behind those of the one before; not with
                ``fixed_shapes``.

        Returns:
            logits ``[B,T,V]``, or ``[B,1,V]`` with ``last_only``; rows at or past query_lens are unspecified. ``[N,V]`` if packed.
        """
        batch, count = tokens.shape
        ids, position, p = self._pack(tokens, cache, block_table, context_lens, query_lens)
        products: AbstractContextManager[object] = nullcontext()
        if rows is not None and not self.pads:
            products = self.invariant_products()
        elif rows is not None and rows > p.rows:
            ids = torch.nn.functional.pad(ids, (0, rows - p.rows))
            position = torch.nn.functional.pad(position, (0, rows - p.rows))
        keep: dict[str, Any] = {}
        if last_only:
            ends = _last_rows(p)
            if self._keeps_logits:
                keep = {"logits_to_keep": ends}
        with model_lock(self.model), self._switched(), products, torch.inference_mode():
            logits = self.model(
                input_ids=ids[None], position_ids=position[None], use_cache=False, specdec_pass=p, **keep
            ).logits[0]
        if last_only:
            return (logits if keep else logits[ends])[:, None]
        if packed:
            return logits[: p.rows]
        return logits[p.take] if p.take is not None else logits[: p.rows].unflatten(0, (batch, count))

    def _pack(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Pass]:
        """Token ids and positions of the pass's rows, int64 ``[N]`` each, and its metadata."""
        batch, count = tokens.shape
        step = torch.arange(count, device=self.device)
        # Rows past query_lens stay inside position tables, which end with the context.
        inside = step if query_lens is None else torch.minimum(step, (query_lens[:, None] - 1).clamp(min=0))
        position = (context_lens[:, None] + inside).long()
        total, take, put, plan = batch * count, None, None, None
        if not self.fixed_shapes:
            lens = [count] * batch if query_lens is None else query_lens.tolist()
            if min(lens) == count:
                query_lens = None
            else:
                assert query_lens is not None
                put = torch.cat([b * count + step[:n] for b, n in enumerate(lens)])
                total = len(put)
                starts = query_lens.cumsum(0) - query_lens
                take = (starts[:, None] + inside).clamp(max=total - 1)
                tokens, position = tokens.flatten()[put], position.flatten()[put]
            if self._backend == ("torch", "torch"):
                plan = make_plan(block_table, context_lens, query_lens, count, cache.page_size)
        p = Pass(
            cache,
            block_table,
            context_lens,
            query_lens,
            batch,
            count,
            total,
            take,
            put,
            self._backend,
            self._softcap,
            plan,
        )
        return tokens.flatten(), position.flatten(), p

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Our attention inside, the module's own outside."""
        before = [config._attn_implementation_internal for config in self._configs]
        try:  # from the first change on: Ctrl-C may come between any two lines
            for config in self._configs:
                config._attn_implementation_internal = IMPLEMENTATION
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = implementation


def _last_rows(p: Pass) -> torch.Tensor:
    """The row of each request's last new token, int64 ``[B]``."""
    if p.query_lens is None:
        return torch.arange(1, p.batch + 1, device=p.context_lens.device) * p.count - 1
    last = (p.query_lens - 1).clamp(min=0).long()[:, None]
    if p.take is not None:
        return p.take.gather(1, last)[:, 0]
    return torch.arange(p.batch, device=last.device) * p.count + last[:, 0]


def _eos_ids(model: Any) -> frozenset[int]:
    """The model's end-of-sequence ids; one, several or none."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
