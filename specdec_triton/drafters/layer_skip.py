"""Drafts from the target itself, without some of its layers: no second model, no second cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING

import torch

from specdec_triton._checks import check_integer, require
from specdec_triton.drafters.base import (
    Drafter,
    Drafts,
    DraftSession,
    Drawn,
    Round,
    SessionOptions,
    Turns,
    drafts_of,
    nothing,
)
from specdec_triton.drafters.cached import Columns
from specdec_triton.errors import UnsupportedModelError

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.kv_cache import KVCache

_MEASURED = 256  # tokens of context while costs are measured


class LayerSkip(Drafter):
    """Self-speculative decoding.

    Args:
        exit_layer: draft with the first so many layers and the head, as models do that were trained for it (LayerSkip).
        skip: draft without these layers, numbered from 0. With neither, the ones that ``specdec-triton tune-skip`` has found for the
            target on this machine.

    Raises:
        ValueError: both are given; once bound, a layer that the target does not have, or nothing is given and nothing was found.

    Drafts look at the target's own keys, and leave theirs behind the text's end, where verification writes over them.

    Source: Zhang et al. 2024, "Draft & verify" (arXiv:2309.08168); Elhoushi et al. 2024, "LayerSkip" (arXiv:2404.16710).
    """

    def __init__(self, exit_layer: int | None = None, *, skip: Collection[int] | None = None) -> None:
        require(exit_layer is None or skip is None, "skip", "None where exit_layer is given", skip)
        if exit_layer is not None:
            check_integer("exit_layer", exit_layer, 1)
        for layer in skip or ():
            check_integer("skip", layer, 0)
        self.exit_layer = exit_layer
        self.skip = None if skip is None else frozenset(skip)

    def layers_of(self, target: ModelAdapter) -> frozenset[int]:
        """The layers that are skipped."""
        count = target.config.num_hidden_layers
        if self.exit_layer is not None:
            require(self.exit_layer <= count, "exit_layer", f"at most the target's {count} layers", self.exit_layer)
            return frozenset(range(self.exit_layer, count))
        if self.skip is None:
            from specdec_triton.tune_skip import recall

            found = recall(target)
            if found is None:
                raise ValueError(
                    "LayerSkip() needs exit_layer= or skip=, or what `specdec-triton tune-skip` finds: nothing is known of this target"
                )
            return found
        require(max(self.skip, default=0) < count, "skip", f"layers below the target's {count}", sorted(self.skip))
        require(len(self.skip) < count, "skip", "fewer than all layers", f"all {count}")
        return self.skip

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        skip = self.layers_of(target)
        assert options.cache is not None
        return _Session(target, skip, options.cache, options)


class _Session(DraftSession):
    free = False

    def __init__(self, target: ModelAdapter, skip: frozenset[int], cache: KVCache, options: SessionOptions) -> None:
        self._target = target
        self._skip = skip
        self.costs_like = f"the target without its layers {sorted(skip)}"
        self._cache = cache
        self._columns = Columns(cache, options, fixed_shapes=target.fixed_shapes)
        self.max_len = target.max_len
        try:
            self.drafting(1)()
        except Exception as error:
            name = type(target.model).__name__
            raise UnsupportedModelError(f"{name} cannot run without some of its layers: {error}") from error

    @property
    def key(self) -> Hashable:
        return self._columns.count

    def reserve(self, slot: int, tokens: int) -> None:
        self._columns.reserve(slot, tokens)

    def move(self, src: int, dst: int) -> None:
        self._columns.move(src, dst)

    def release(self, slot: int) -> None:
        self._columns.release(slot)

    def propose(self, round_: Round) -> Drafts:
        n = len(round_.lens)
        k = min(round_.k, int(round_.limits.max())) if round_.reads else round_.k
        if k == 0:
            return nothing(round_.lens)
        table = self._cache.block_table[:n, : self._columns.count]
        context = (round_.lens - 1).clamp(min=0)
        tokens = round_.texts.gather(1, context.long()[:, None]).clamp(0, self._target.vocab_size - 1)
        turns = Turns(round_, round_.limits, k)
        drawn: list[Drawn] = []
        fed: torch.Tensor | None = turns.asked[0].int()
        while fed is not None:
            j = len(drawn)
            at = torch.where(fed > 0, context + j, 0)
            logits = self._target.forward(tokens, self._cache, table, at, fed, skip=self._skip)[:, 0]
            drawn.append(round_.draw(logits, j))
            tokens = drawn[j].tokens[:, None]
            fed = turns.next(drawn[j])
        return drafts_of(drawn, turns, self._target.vocab_size if round_.needs_logits else None)

    def drafting(self, n: int) -> Callable[[], object]:
        target = self._target
        pages = target.new_cache(slots=n, page_size=self._cache.page_size, num_pages=0, growable=True)
        context = min(_MEASURED, (self.max_len or _MEASURED) - 1)
        for slot in range(n):
            pages.reserve(slot, context + 1)
        lens = torch.full((n,), context, dtype=torch.int32, device=target.device)
        tokens = torch.zeros(n, 1, dtype=torch.int64, device=target.device)
        return lambda: target.forward(tokens, pages, pages.block_table, lens, skip=self._skip)
