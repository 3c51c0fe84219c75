"""Drafts from a second, smaller model of the family (Leviathan et al. 2023)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton import ops
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, nothing

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

_MAX_PADDING = 1024  # columns by which the logits of two models with one tokenizer may differ
_CATCH_UP = 8  # more unseen tokens than this are prefilled request by request
_CHUNK = 512


class DraftModel(Drafter):
    """A transformers causal language model with the target's vocabulary.

    Args:
        model: loaded by transformers, in any dtype, on the target's device.

    The logits may be wider or narrower than the target's by padding; ids that only one of them has are never drafted or
    count as impossible. A row that outgrows the draft model's context goes on without drafts.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def bind(self, target: ModelAdapter, *, slots: int, page_size: int, backend: str | None) -> DraftSession:
        from specdec_triton.adapter import ModelAdapter

        if not hasattr(self.model, "config"):
            raise ValueError(f"DraftModel needs a transformers model, got {type(self.model).__name__}")
        adapter = ModelAdapter(self.model, backend=backend)
        if adapter.device != target.device:
            raise ValueError(f"the draft model must be on the target's device {target.device}, got {adapter.device}")
        if abs(adapter.vocab_size - target.vocab_size) > _MAX_PADDING:
            raise ValueError(
                f"the draft model has another vocabulary: {adapter.vocab_size} ids, the target has"
                f" {target.vocab_size}; draft and target must share a tokenizer"
            )
        return _Session(adapter, target.vocab_size, slots, page_size, backend)


class _Session(DraftSession):
    """The draft model with its own cache. ``_cached[slot]`` tokens of the text lie in it.

    A round leaves the keys of the last text token and of all drafts but the last in the cache. Those of rejected drafts
    are dropped by lowering the count; after full acceptance one key is missing, and the next round's first pass feeds
    that token too.
    """

    def __init__(self, adapter: ModelAdapter, vocab_size: int, slots: int, page_size: int, backend: str | None) -> None:
        self._adapter = adapter
        self._vocab_size = vocab_size
        self._backend = backend
        self._cache = adapter.new_cache(slots=slots, page_size=page_size, num_pages=0, growable=True)
        self._cached = [0] * slots
        self._max_len = adapter.max_len
        self._outgrown = False

    def admit(self, slot: int, prompt: Sequence[int], capacity: int) -> None:
        self._cache.reserve(slot, capacity if self._max_len is None else min(capacity, self._max_len))
        self._cached[slot] = 0

    def release(self, slot: int) -> None:
        self._cache.release(slot)
        self._cached[slot] = 0

    def propose(self, round_: Round) -> Drafts:
        limits = [self._limit(n, k) for n, k in zip(round_.lens, round_.limits, strict=True)]
        k, device = max(limits), round_.texts.device
        if k == 0:
            return nothing(len(limits), device)
        active = [b for b, limit in enumerate(limits) if limit > 0]
        slots = [round_.slots[b] for b in active]
        rows = torch.tensor(active, device=device)
        texts, params = round_.texts[rows], _take(round_.params, rows)
        texts = texts.clamp(max=self._adapter.vocab_size - 1)  # ids that only the target has
        table = self._cache.block_table[torch.tensor(slots, device=device)]

        logits = self._first_pass(texts, [round_.lens[b] for b in active], slots, table)
        tokens, all_logits, all_lse = [], [], []
        finite = torch.ones(len(active), dtype=torch.bool, device=device)
        lens = [0] * len(active)
        for j in range(k):
            if logits.shape[-1] > self._vocab_size:
                logits = logits[:, : self._vocab_size]
            drawn, lse = self._draw(logits, params, j, round_.method)
            finite = finite & lse.isfinite()
            lens = [
                n + 1 if good and j < limits[b] else n for n, good, b in zip(lens, finite.tolist(), active, strict=True)
            ]
            tokens.append(drawn)
            all_logits.append(logits)
            all_lse.append(lse)
            if j + 1 < k:
                context = torch.tensor([self._cached[s] for s in slots], dtype=torch.int32, device=device)
                going = [int(j + 1 < limits[b]) for b in active]
                logits = self._adapter.forward(drawn[:, None], self._cache, table, context, going)[:, 0]
                for slot, n in zip(slots, going, strict=True):
                    self._cached[slot] += n
        if not bool(finite.all()):
            warnings.warn("the draft model's logits hold NaN or infinity; those drafts are dropped", stacklevel=2)
        return self._spread(round_, active, torch.stack(tokens, 1), lens, all_logits, all_lse)

    def _limit(self, length: int, limit: int) -> int:
        """Drafts that still fit the draft model's own context."""
        if self._max_len is None or length + limit <= self._max_len:
            return limit
        if not self._outgrown:
            self._outgrown = True
            warnings.warn(
                f"a text has outgrown the draft model's context of {self._max_len} tokens; it goes on without drafts",
                stacklevel=2,
            )
        return max(self._max_len - length, 0)

    def _first_pass(
        self, texts: torch.Tensor, lens: Sequence[int], slots: Sequence[int], table: torch.Tensor
    ) -> torch.Tensor:
        """Feed what the cache lacks of each text; logits ``[B,V]`` after its last token."""
        device = texts.device
        for b, (slot, length) in enumerate(zip(slots, lens, strict=True)):
            self._cached[slot] = min(self._cached[slot], length - 1)  # keys of rejected drafts
            while length - self._cached[slot] > _CATCH_UP:
                start = self._cached[slot]
                stop = min(start + _CHUNK, length - 1)
                context = torch.tensor([start], dtype=torch.int32, device=device)
                chunk = texts[b : b + 1, start:stop]
                self._adapter.forward(chunk, self._cache, table[b : b + 1], context, last_only=True)
                self._cached[slot] = stop
        starts = [self._cached[slot] for slot in slots]
        missing = [length - start for length, start in zip(lens, starts, strict=True)]
        columns = torch.tensor(starts, device=device)[:, None] + torch.arange(max(missing), device=device)
        new = texts.gather(1, columns.clamp(max=texts.shape[1] - 1))
        context = torch.tensor(starts, dtype=torch.int32, device=device)
        logits = self._adapter.forward(new, self._cache, table, context, missing, last_only=True)[:, 0]
        for slot, length in zip(slots, lens, strict=True):
            self._cached[slot] = length
        return logits

    def _draw(
        self, logits: torch.Tensor, params: ops.SamplingBatch, j: int, method: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if method == "coupled":  # the noise of the position, which the target will use as well
            at = replace(params, position=params.position + j)
            drawn = ops.sample(logits, params=at, return_lse=True, backend=self._backend)
        else:
            drawn = ops.sample(logits, params=params, return_lse=True, node=j, backend=self._backend)
        return drawn  # type: ignore[return-value]

    def _spread(
        self,
        round_: Round,
        active: Sequence[int],
        tokens: torch.Tensor,
        lens: Sequence[int],
        logits: Sequence[torch.Tensor],
        lse: Sequence[torch.Tensor],
    ) -> Drafts:
        """Back from the rows that drafted to all rows of the round."""
        batch, k = len(round_.slots), max(lens)
        all_lens = [0] * batch
        for b, n in zip(active, lens, strict=True):
            all_lens[b] = n
        rows = torch.tensor(active, device=tokens.device)
        out = tokens.new_full((batch, k), ops.PAD)
        out[rows] = tokens[:, :k]
        if round_.method not in ("rejection", "block") or k == 0:  # the others ask for no probabilities
            return Drafts(out, all_lens)
        width = logits[0].shape[-1]
        # Columns that the draft model lacks have probability zero.
        q = logits[0].new_full((batch, k, self._vocab_size), float("-inf"))
        q[rows, :, :width] = torch.stack(list(logits[:k]), 1)
        q_lse = lse[0].new_zeros(batch, k)
        q_lse[rows] = torch.stack(list(lse[:k]), 1)
        return Drafts(out, all_lens, q, q_lse)


def _take(params: ops.SamplingBatch, rows: torch.Tensor) -> ops.SamplingBatch:
    fields = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position)
    temperature, top_k, top_p, min_p, seed, position = (x[rows] for x in fields)
    return ops.SamplingBatch(temperature, top_k, top_p, min_p, seed, position, params.has_filters)
