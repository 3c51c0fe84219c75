"""Run a transformers causal language model over the paged KV cache.

The model stays the module that transformers loaded. For the length of one forward pass its attention implementation is
switched to that of ``passes.py``, which appends the new keys and values to the pages and attends through
``verify_attention``; the pass's metadata travel through the model's keyword arguments. Which models this works for is
found by watching a short pass (``observe.py``), not from a list of names.

The new tokens of all requests form one sequence ``[1, N]`` with explicit position ids. Where values may be read (on a
CPU) the rows are packed: a batch whose requests draft different numbers of tokens has no padding rows in the model's
matrix products. On a device every request has T rows, whatever it uses of them: shapes depend on no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from specdec_triton import ops
from specdec_triton.exactness import InvariantRows, kernels_backend
from specdec_triton.head import Head, candidates, find_head
from specdec_triton.kv_cache import KVCache
from specdec_triton.observe import Observation, attention_configs, has_dropout, model_lock, observe
from specdec_triton.passes import IMPLEMENTATION, Backends, Pass, applies_softcap, make_pass
from specdec_triton.reference.head_stats import finished
from specdec_triton.row_invariant import RowInvariant
from specdec_triton.skipping import skipping
from specdec_triton.taps import Taps
from specdec_triton.trees import Lineage


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
        self.hidden_size: int = self.config.hidden_size
        self.max_len: int | None = self.observation.max_len
        self.stop_ids = _eos_ids(model)
        self.fixed_shapes = self.device.type != "cpu"  # a pass reads no value back
        self._configs = attention_configs(model)
        like = torch.empty(0, device=self.device)
        self.backends = Backends(
            *(ops.resolve_backend(backend, op, like) for op in ("append_kv", "verify_attention", "skinny_linear"))
        )
        self._invariant_backend = kernels_backend(backend, like)
        self._keeps_logits = self.observation.keeps_logits
        self._softcap = applies_softcap(self.config)
        self._rows: InvariantRows | None = None
        self._head = find_head(model)
        self.observation.check_cached_passes(self)

    @property
    def head(self) -> Head | None:
        """The last product, where drafts can be judged without writing its logits; None: logits are all there is."""
        return None if self._head is None or self.model is None else self._head.of(self.model)

    def without_head(self) -> None:
        """Write logits from now on."""
        self._head = None

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
        taps: Taps | None = None,
        skip: frozenset[int] = frozenset(),
        tree: Lineage | None = None,
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
            taps: takes hidden states from the pass.
            skip: decoder layers to pass by.
            tree: the new tokens are nodes of trees, and this their lineage.

        Returns:
            logits ``[B,T,V]``, or ``[B,1,V]`` with ``last_only``; rows at or past query_lens are unspecified. ``[N,V]`` if packed.
        """
        batch, count = tokens.shape
        ids, position, p = self._pack(tokens, cache, block_table, context_lens, query_lens, rows is not None, tree)
        if rows is not None and self.pads and rows > p.rows:
            ids = torch.nn.functional.pad(ids, (0, rows - p.rows))
            position = torch.nn.functional.pad(position, (0, rows - p.rows))
        keep: dict[str, Any] = {}
        if last_only:
            ends = _last_rows(p)
            if self._keeps_logits:
                keep = {"logits_to_keep": ends}
        logits = self._call(self.model, ids, position, p, taps, skip, **keep).logits[0]
        if last_only:
            return (logits if keep else logits[ends])[:, None]
        if packed:
            return logits[: p.rows]
        return logits[p.take] if p.take is not None else logits[: p.rows].unflatten(0, (batch, count))

    def hidden(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_lens: torch.Tensor | None = None,
        *,
        exact: bool = False,
        last_only: bool = False,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """:meth:`forward` up to the head, ``[B,T,H]`` or ``[B,1,H]``; only with ``fixed_shapes`` and a :attr:`head`.

        Args:
            exact: as with ``rows``.
        """
        head = self.head
        assert head is not None
        ids, position, p = self._pack(tokens, cache, block_table, context_lens, query_lens, exact)
        x = self._call(head.decoder, ids, position, p, taps).last_hidden_state[0]
        return x[_last_rows(p)][:, None] if last_only else x.unflatten(0, tokens.shape)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits ``[...,V]`` of what its head is given, ``[...,H]``: for drafts, which need not be its very numbers."""
        factor, softcap = candidates(self.config)[0]
        return finished(self.model.get_output_embeddings()(hidden), factor, softcap)[..., : self.vocab_size]

    def _call(
        self,
        module: Any,
        ids: torch.Tensor,
        position: torch.Tensor,
        p: Pass,
        taps: Taps | None,
        skip: frozenset[int] = frozenset(),
        **options: Any,
    ) -> Any:
        """The model, or its part before the head, over the pages."""
        products = self.invariant_products() if p.exact else nullcontext()
        watching = nullcontext() if taps is None else taps.watching()
        with (
            model_lock(self.model),
            self._switched(),
            products,
            watching,
            skipping(self.model, skip),
            torch.inference_mode(),
        ):
            out = module(input_ids=ids[None], position_ids=position[None], use_cache=False, specdec_pass=p, **options)
            if taps is not None:
                taps.take(p)
            return out

    def _pack(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_lens: torch.Tensor | None,
        exact: bool,
        tree: Lineage | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Pass]:
        """Token ids and positions of the pass's rows, int64 ``[N]`` each, and its metadata."""
        p, position = make_pass(
            cache,
            block_table,
            context_lens,
            query_lens,
            *tokens.shape,
            backends=self.backends,
            reads=not self.fixed_shapes,
            exact=exact,
            softcap=self._softcap,
            tree=tree,
        )
        return p.pack(tokens), position, p

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
