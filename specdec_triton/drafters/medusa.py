"""Drafts from Medusa heads on the target's last hidden state (Cai et al. 2024)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton.drafters.base import (
    Branch,
    Drafter,
    Drafts,
    DraftSession,
    Round,
    SessionOptions,
    Turns,
    drafts_of,
    nothing,
)
from specdec_triton.drafters.heads.checkpoint import Checkpoint, find
from specdec_triton.drafters.heads.growing import grow, level_of
from specdec_triton.drafters.heads.states import LastStates
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.trees import DynamicTree, StaticTree, check_target

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.drafters.heads.medusa_heads import MedusaHeads


class MedusaDrafter(Drafter):
    """Medusa heads that were trained for the target: head i drafts the token i + 2 places behind the hidden state.

    Args:
        source: a folder or a hub id, in a published layout: of the Medusa repository (``0.0.linear.weight`` ...) or of vLLM
            (``blocks.0.layers.0.weight`` ...), with an lm_head for each head, one for all, or the target's.

    Raises:
        ModelNotFoundError: there are no such heads.

    Once it is bound to a target:
        UnsupportedModelError: a tensor is missing, of another shape, not finite or of no known use, or they are not for that target, or the
            tree is deeper than there are heads; with a tree also a target whose sliding window is shorter than 64 tokens.

    A chain is no longer than there are heads.

    Source: Cai et al. 2024, "Medusa: Simple LLM inference acceleration framework with multiple decoding heads" (arXiv:2401.10774).
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        tree: DynamicTree | StaticTree | Sequence[Sequence[int]] | None = None,
    ) -> None:
        find(source)  # its tensors are read for each target
        self.source = source
        whole = tree is None or isinstance(tree, (DynamicTree, StaticTree))
        self.tree = tree if whole else StaticTree.of_choices(tree)  # type: ignore[arg-type]
        self.trees = self.tree is not None

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        from specdec_triton.drafters.heads.medusa_heads import load_medusa

        if self.tree is not None:
            check_target(target)
        heads = load_medusa(Checkpoint(self.source), target)
        if self.tree is not None and self.tree.depth > len(heads):  # type: ignore[union-attr]
            raise UnsupportedModelError(f"tree is {self.tree.depth} deep, but there are {len(heads)} Medusa heads")  # type: ignore[union-attr]
        return _Session(heads, target, options, self.tree)  # type: ignore[arg-type]


class _Session(DraftSession):
    """Keeps the hidden states of a round, of which one, behind which the text's last token was chosen, is drafted from."""

    free = False

    def __init__(
        self,
        heads: MedusaHeads,
        target: ModelAdapter,
        options: SessionOptions,
        tree: DynamicTree | StaticTree | None,
    ) -> None:
        self._heads = heads
        self._tree = tree
        self.trees = tree is not None
        self.costs_like = f"Medusa heads, {target.hidden_size} wide, {target.vocab_size} ids"
        if tree is not None:
            self.level = level_of(tree, options.max_drafts)
        self._vocab_size = target.vocab_size
        self.taps = (target.config.num_hidden_layers,)
        kept = options.chunk + options.max_drafts + 1
        self._states = LastStates(options.slots, kept, target.hidden_size, heads.dtype, target.device)

    @torch.inference_mode()
    def see(self, first: int, states: torch.Tensor, start: torch.Tensor, counts: torch.Tensor | None) -> None:
        self._states.write(first, states, start, counts)

    def move(self, src: int, dst: int) -> None:
        self._states.move(src, dst)

    def swap_out(self, slot: int, tokens: int) -> Any:
        return self._states.take(slot)

    def swap_in(self, slot: int, saved: Any) -> None:
        self._states.give(slot, saved)

    @torch.inference_mode()
    def propose(self, round_: Round) -> Drafts:
        n, limits = len(round_.lens), round_.limits
        state = self._states.read(slice(n), (round_.lens - 2).clamp(min=0).long()[:, None])[:, 0]
        if self._tree is not None and round_.branch is not None:
            return self._grown(round_, self._tree, state, round_.branch)
        limits = limits.clamp(max=len(self._heads))
        k = min(round_.k, len(self._heads), int(limits.max()) if round_.reads else round_.k)
        if k == 0:
            return nothing(round_.lens)
        turns, drawn = Turns(round_, limits, k), [round_.draw(self._heads(0, state), 0)]
        while turns.next(drawn[-1]) is not None:
            drawn.append(round_.draw(self._heads(len(drawn), state), len(drawn)))
        return drafts_of(drawn, turns, self._vocab_size if round_.needs_logits else None)

    def _grown(self, round_: Round, tree: DynamicTree | StaticTree, state: torch.Tensor, branch: Branch) -> Drafts:
        """Trees: what a head says is the same behind all nodes of a depth."""

        def score(states: torch.Tensor, depth: int) -> torch.Tensor:
            return self._heads(depth, state)[:, None].expand(-1, states.shape[1], -1)

        k = min(round_.k, int(round_.limits.max())) if round_.reads else round_.k
        if k == 0:
            return nothing(round_.lens)
        drafts = grow(tree, k, state, lambda tokens, states, sees: states, score, branch, None)
        drafts.lens = torch.minimum(drafts.lens, round_.limits)
        return drafts

    def drafting(self, n: int) -> Callable[[], object]:
        state = self._states.blank(n)
        return lambda: self._heads(0, state)
