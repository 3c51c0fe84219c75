"""Drafts from the text itself: what followed the last occurrence of its tail (``ops.ngram_propose``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter


class PromptLookup(Drafter):
    """Prompt lookup (n-gram) drafting.

    Args:
        max_ngram: the longest tail that is looked up, in tokens.
        min_ngram: the shortest.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not (isinstance(min_ngram, int) and isinstance(max_ngram, int) and 1 <= min_ngram <= max_ngram):
            raise ValueError(f"PromptLookup needs 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        return _Session(self, options.backend)


class _Session(DraftSession):
    def __init__(self, drafter: PromptLookup, backend: str | None) -> None:
        self._drafter = drafter
        self._backend = backend

    def propose(self, round_: Round) -> Drafts:
        k = round_.k
        tokens, found = ops.ngram_propose(
            round_.texts, round_.lens, k, self._drafter.min_ngram, self._drafter.max_ngram, backend=self._backend
        )
        # A match that ends n < K tokens before the text's end says that the text repeats itself every n tokens.
        period = found.clamp(min=1)[:, None]
        tokens = tokens.gather(1, torch.arange(k, device=tokens.device) % period)
        return Drafts(tokens, torch.where(found > 0, round_.limits, 0))
