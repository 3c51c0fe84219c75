"""Drafts from the text itself: what followed the last occurrence of its tail (``ops.ngram_propose``).

A lookup is all but free, but verifying a wrong draft is not: each extra row makes the pass a few percent longer. So the
session keeps, per request, an estimate of how likely a draft is accepted, and asks for the K that maximises the
expected tokens per unit of time,

    (1 + a + ... + a^K) / (1 + ROW_COST * K).

The estimate depends on the text alone, never on a clock, so that a run can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, nothing

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

ROW_COST = 0.05  # an extra row's share of a pass of one row; 0.03 to 0.06 measured on CPUs for 135M parameters
_DECAY = 0.9
_FORGET = 0.02
_PRIOR_ACCEPTED, _PRIOR_REJECTED = 1.0, 1.0


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

    def bind(self, target: ModelAdapter, *, slots: int, page_size: int, backend: str | None) -> DraftSession:
        return _Session(self, backend)


@dataclass
class _Acceptance:
    """Decayed counts of drafts accepted and rejected; those after a rejection were never judged."""

    accepted: float = _PRIOR_ACCEPTED
    rejected: float = _PRIOR_REJECTED

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.rejected)

    def update(self, drafted: int, accepted: int) -> None:
        if (
            drafted == 0
        ):  # nothing was learnt; forget a little, so that a request which has stopped drafting tries again
            self.accepted += _FORGET * (_PRIOR_ACCEPTED - self.accepted)
            self.rejected += _FORGET * (_PRIOR_REJECTED - self.rejected)
            return
        self.accepted = _DECAY * self.accepted + accepted
        self.rejected = _DECAY * self.rejected + (accepted < drafted)


def best_length(rate: float, limit: int) -> int:
    """The K in 0..limit with the most expected tokens per unit of time."""
    best, best_value, tokens, power = 0, 1.0, 1.0, 1.0
    for k in range(1, limit + 1):
        power *= rate
        tokens += power
        if (value := tokens / (1 + ROW_COST * k)) > best_value:
            best, best_value = k, value
    return best


class _Session(DraftSession):
    def __init__(self, drafter: PromptLookup, backend: str | None) -> None:
        self._drafter = drafter
        self._backend = backend
        self._acceptance: dict[int, _Acceptance] = {}

    def admit(self, slot: int, prompt: object, capacity: int) -> None:
        self._acceptance[slot] = _Acceptance()

    def propose(self, round_: Round) -> Drafts:
        wanted = [
            best_length(self._acceptance[slot].rate, limit)
            for slot, limit in zip(round_.slots, round_.limits, strict=True)
        ]
        k = max(wanted)
        if k == 0:
            return nothing(len(wanted), round_.texts.device)
        lens = torch.tensor(round_.lens, dtype=torch.int32, device=round_.texts.device)
        tokens, found = ops.ngram_propose(
            round_.texts, lens, k, self._drafter.min_ngram, self._drafter.max_ngram, backend=self._backend
        )
        # A match that ends n < K tokens before the text's end says that the text repeats itself every n tokens.
        period = found.clamp(min=1)[:, None]
        tokens = tokens.gather(1, torch.arange(k, device=tokens.device) % period)
        lengths = [want if n else 0 for n, want in zip(found.tolist(), wanted, strict=True)]
        return Drafts(tokens[:, : max(lengths)], lengths)

    def judge(self, slot: int, drafted: int, accepted: int) -> None:
        self._acceptance[slot].update(drafted, accepted)

    def release(self, slot: int) -> None:
        self._acceptance.pop(slot, None)
