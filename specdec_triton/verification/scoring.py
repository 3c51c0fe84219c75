"""The target's logits, computed as a decoder computes them: prompts in its chunks, passes padded as it pads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_triton._checks import check_integer, require
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine.admission import check_prompt, check_prompts
from specdec_triton.engine.scheduler import PREFILL_CHUNK
from specdec_triton.exactness import ExactPasses
from specdec_triton.sampling import MAX_DRAFT_TOKENS

_PAGE_SIZE = 16
# How far two logits may seem apart that are equal but for rounding, as a share of the largest one: 4 units in the last
# place of 16-bit logits. fp32 sums of thousands of terms are off by more of their units.
_GAPS = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-17}


def checked(
    target: ModelAdapter, prompts: Sequence[Sequence[int]], *, k: int = 1, max_new_tokens: int = 1
) -> list[list[int]]:
    """The prompts as lists.

    Raises:
        ValueError: an argument of another kind or out of its range.
    """
    kind = type(target).__name__
    require(isinstance(target, ModelAdapter), "target", "a decoder's target: SpeculativeDecoder(model).target", kind)
    check_integer("k", k, 1, MAX_DRAFT_TOKENS)
    check_integer("max_new_tokens", max_new_tokens, 1)
    ids = [check_prompt(prompt, target.vocab_size) for prompt in check_prompts(prompts)]
    require(len(ids) > 0, "prompts", "at least one prompt", "none")
    return ids


def why_inexact(target: ModelAdapter, drafter: Drafter | None = None) -> str | None:
    """Why a row's bits depend on its neighbours, or on the drafter's; None: they do not."""
    if drafter is not None and drafter.trees:
        return "keys of a tree lie in another order than a chain's"
    reasons: list[str] = []
    ExactPasses(target, None, lambda error: reasons.append(str(error))).pad(1)
    return reasons[0] if reasons else None


def allowed_gap(target: ModelAdapter, logits: torch.Tensor) -> float:
    """How far below the best a token's logit may be where only rounding decides; logits: ``[V]``."""
    return _GAPS.get(target.dtype, 2.0**-17) * max(float(logits.amax().abs()), 1.0)


class Scorer:
    """Texts over pages of their own, one a slot.

    Args:
        target: the model.
        slots: the most texts at once.
    """

    def __init__(self, target: ModelAdapter, slots: int = 1) -> None:
        self.target = target
        self._passes = ExactPasses(target, None, lambda error: None)
        self._cache = target.new_cache(slots=slots, page_size=_PAGE_SIZE, num_pages=0, growable=True)

    def prefill(self, slot: int, prompt: Sequence[int]) -> torch.Tensor:
        """Take a new text into the slot; logits ``[V]`` of what follows it."""
        self._cache.release(slot)
        self._cache.reserve(slot, len(prompt))
        ids = torch.tensor([list(prompt)], device=self.target.device)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            logits = self.target.forward(
                ids[:, start : start + PREFILL_CHUNK],
                self._cache,
                self._cache.block_table[slot : slot + 1],
                self._int32([start]),
                last_only=True,
            )
        return logits[0, 0]

    def score(self, chains: Sequence[Sequence[int]], contexts: Sequence[int], first: int = 0) -> list[torch.Tensor]:
        """Score one chain of tokens each for the texts in the slots from ``first`` on, in one pass.

        Args:
            contexts: where in its text each chain begins; what the slot held from there on is forgotten.

        Returns:
            logits ``[n,V]`` of what follows each of a chain's n tokens.
        """
        for slot, (chain, context) in enumerate(zip(chains, contexts, strict=True), first):
            self._cache.reserve(slot, context + len(chain))
        width = max(map(len, chains))
        tokens = torch.tensor([[*chain, *[0] * (width - len(chain))] for chain in chains], device=self.target.device)
        logits = self.target.forward(
            tokens,
            self._cache,
            self._cache.block_table[first : first + len(chains)],
            self._int32(contexts),
            self._int32([len(chain) for chain in chains]),
            rows=self._passes.pad(tokens.numel() if self.target.fixed_shapes else sum(map(len, chains))),
        )
        return [rows[: len(chain)] for rows, chain in zip(logits, chains, strict=True)]

    def after(self, token: int, context: int, slot: int = 0) -> torch.Tensor:
        """Logits ``[V]`` of what follows one more token of a text, of which ``context`` tokens come before it."""
        return self.score([[token]], [context], slot)[0][0]

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.target.device)
