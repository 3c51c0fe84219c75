"""How drafts are drawn from a drafter's logits: with the noise of each request's method, under its filters and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec_triton import ops
from specdec_triton.drafters.base import Branch, Children, Draw, Drawn, spread
from specdec_triton.engine.judge import Judge
from specdec_triton.engine.shapes import Shape
from specdec_triton.engine.slots import Slots
from specdec_triton.head import Head
from specdec_triton.reference.logits import over_temperature
from specdec_triton.reference.noise import Stream, gumbel


class Drawing:
    """Makes what sessions are given to draw with.

    Args:
        reads: whether values may be read.
    """

    def __init__(self, slots: Slots, judge: Judge, backend: str | None, *, reads: bool) -> None:
        self._slots = slots
        self._judge = judge
        self._backend = backend
        self._reads = reads

    def chain(self, shape: Shape, params: ops.SamplingBatch, *, sure: bool) -> Draw:
        """See ``Round.draw``; ``sure``: and says how sure the drafter is."""
        before: list[torch.Tensor] = []

        def one(method: str, logits: torch.Tensor, j: int) -> Any:
            # Coupled drafts have the noise of their position, which the target will use as well.
            at, node = (params.after(j), None) if method == "coupled" else (params, j)
            return ops.sample(logits, params=at, return_lse=True, node=node, backend=self._backend)

        def draw(logits: torch.Tensor, j: int, ids: torch.Tensor | None = None) -> Drawn:
            if ids is not None and shape.methods == ("greedy",) and not shape.rules:
                # Noise and rules know ids; the largest of few is the largest whatever they are called.
                tokens, lse = one("greedy", logits, j)
                return Drawn(ids[tokens], lse, None, chance(logits, tokens, lse))
            logits = spread(logits, ids, self._slots.vocab_size)
            if shape.rules:
                logits = self._judge.draft_logits(shape, logits, before[:j])
            tokens, lse = one(shape.methods[0], logits, j)
            for method in shape.methods[1:]:
                others, lse = one(method, logits, j)
                mine = self._slots.methods[: shape.rows] == ops.METHODS.index(method)
                tokens = torch.where(mine, others, tokens)
            before[j:] = [tokens]
            return Drawn(tokens, lse, logits, chance(logits, tokens, lse))

        def chance(logits: torch.Tensor, tokens: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
            if not sure:
                return None
            own = (logits.gather(1, tokens[:, None])[:, 0].float() - lse).exp()
            free_of_doubt = self._slots.fixed[: shape.rows] | (params.temperature > 0)  # get as many as they may have
            return torch.where(free_of_doubt, 1.0, own)

        return draw

    def branch(self, shape: Shape, params: ops.SamplingBatch) -> Branch:
        """See ``Round.branch``."""
        draws = shape.methods != ("greedy",)

        def branch(logits: torch.Tensor, j: int, count: int, ids: torch.Tensor | None = None) -> Children:
            scores = logits.float()
            if draws:  # each request's noise at that position is the same behind all of its nodes
                at = torch.zeros_like(params.seed)
                noise = gumbel(params.seed, params.position + j, at, Stream.COUPLED, self._slots.vocab_size)
                noise = noise[:, : logits.shape[-1]] if ids is None else noise[:, ids]
                noise = noise.masked_fill(params.temperature[:, None] <= 0, 0.0)
                temperatures = params.temperature.repeat_interleave(scores.shape[1])
                scores = over_temperature(scores.flatten(0, 1), temperatures).view_as(scores) + noise[:, None]
            best, lse = scores.topk(count, -1), scores.logsumexp(-1, keepdim=True)
            log_probs = (best.values - lse).masked_fill(lse == float("-inf"), float("-inf"))  # nothing is possible
            return Children(best.indices if ids is None else ids[best.indices], log_probs)

        return branch

    def unwritten(self, shape: Shape, params: ops.SamplingBatch) -> Callable[[Head, torch.Tensor, int], Drawn] | None:
        """See ``Round.draw_from``; None where rows of logits are needed."""
        (method, *others) = shape.methods
        if self._reads or others or shape.rules or shape.has_filters or method in ops.BY_PROBABILITY:
            return None

        def draw(head: Head, hidden: torch.Tensor, j: int) -> Drawn:
            at, node = (params.after(j), None) if method == "coupled" else (params, j)
            tokens, lse = head.sample(hidden, params=at, return_lse=True, node=node, backend=self._backend)
            return Drawn(tokens, lse, None)

        return draw
