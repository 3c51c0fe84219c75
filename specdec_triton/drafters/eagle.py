"""Drafts from an EAGLE head on the target's hidden states (Li et al. 2024 and 2025)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton import ops
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
from specdec_triton.drafters.cached import CachedSession
from specdec_triton.drafters.heads.checkpoint import Checkpoint, find
from specdec_triton.drafters.heads.growing import fed_nodes, grow, level_of
from specdec_triton.drafters.heads.states import LastStates
from specdec_triton.kv_cache import KVCache, LayerShape
from specdec_triton.passes import AttentionOptions, Backends, make_pass, paged_attention
from specdec_triton.trees import DynamicTree, StaticTree, check_target

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.drafters.heads.eagle_head import EagleHead
    from specdec_triton.passes import Pass

_MEASURED = 256  # tokens of context while costs are measured
_MEMORY = 256  # hidden states of a text's last tokens that are kept, besides those of a chunk of the prompt


class EagleDrafter(Drafter):
    """An EAGLE head, version 1, 2 or 3, that was trained for the target.

    Args:
        source: a folder or a hub id, in a published layout (``config.json`` and safetensors, or what ``torch.save`` wrote); or
            ``smollm2``: the head for that model which comes with this package.
        aux_layers: EAGLE-3: after how many of the target's layers the hidden states are taken, as transformers counts them
            (``output_hidden_states``; 0 are the embeddings); None: what the head's configuration says, else 2, N/2 and N-3 of N.
        tree: the shape of a round's drafts: a :class:`~specdec_triton.DynamicTree` (EAGLE-2), a :class:`~specdec_triton.StaticTree` or its
            parents; None: a chain. A tree takes up to ``num_draft_tokens`` drafts. Children are certain; requests with logit rules, which
            follow the text, get chains.

    Raises:
        ModelNotFoundError: there is no such head.
        ValueError: no such tree.

    Once it is bound to a target:
        UnsupportedModelError: a tensor of the head is missing, of another shape, not finite or of no known use, or the head is not one
            for that target; with a tree also a target whose sliding window is shorter than 64 tokens.

    Source: Li et al. 2024, "EAGLE: Speculative sampling requires rethinking feature uncertainty" (arXiv:2401.15077); Li et al. 2024,
    "EAGLE-2" (arXiv:2406.16858); Li et al. 2025, "EAGLE-3" (arXiv:2503.01840).
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        aux_layers: Sequence[int] | None = None,
        tree: DynamicTree | StaticTree | Sequence[int] | None = None,
    ) -> None:
        find(source)  # its tensors are read for each target
        self.source = source
        self.aux_layers = None if aux_layers is None else tuple(aux_layers)
        self.tree = tree if tree is None or isinstance(tree, (DynamicTree, StaticTree)) else StaticTree(tree)
        self.trees = self.tree is not None

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        from specdec_triton.drafters.heads.load_eagle import load_eagle

        if self.tree is not None:
            check_target(target)
        head, taps = load_eagle(Checkpoint(self.source), target, self.aux_layers)
        return _Session(head, taps, target, options, self.tree)


class _Session(CachedSession):
    """The head with its own cache, and the target's last hidden states of each text.

    ``seen`` tokens of a text have been fed to the head: the pairs of hidden state i and token i + 1 for i = 0 .. seen - 2, whose keys lie
    at the positions i. A round's first pass feeds what the last round added to the text, up to K + 1 pairs. The pairs of drafts come
    behind them, and are forgotten with the round: the next one has the target's own hidden states in their place.
    """

    memory: int

    def __init__(
        self,
        head: EagleHead,
        taps: tuple[int, ...],
        target: ModelAdapter,
        options: SessionOptions,
        tree: DynamicTree | StaticTree | None,
    ) -> None:
        self._head = head
        self.taps = taps
        self._tree = tree
        self.trees = tree is not None
        self._deepest, self._spare = options.max_drafts, 0
        if tree is not None:
            self._deepest, self._spare = min(tree.depth, options.max_drafts), fed_nodes(tree)
            self.level = level_of(tree, options.max_drafts)
        self.reach = self._deepest + 1
        self.memory = _MEMORY + options.chunk
        self._vocab_size = target.vocab_size
        self._fixed = target.fixed_shapes
        device = target.device
        backend, like = options.backend, torch.empty(0, device=device)
        self._backends = Backends(
            *(ops.resolve_backend(backend, op, like) for op in ("append_kv", "verify_attention", "skinny_linear"))
        )
        longest = None if options.max_tokens is None else options.max_tokens + self._spare
        cache = self._new_cache(options.slots, options.page_size, options.num_pages, longest)
        super().__init__(cache, options, fixed_shapes=self._fixed)
        self.max_len = target.max_len
        ids = self._vocab_size if head.ids is None else len(head.ids)
        self.costs_like = f"EAGLE head, {head.out.out_features} wide, {ids} ids, {tree}"
        self._states = LastStates(options.slots, self.memory, head.out.out_features, head.dtype, device)

    def _new_cache(self, slots: int, page_size: int, num_pages: int, max_tokens: int | None = None) -> KVCache:
        return KVCache(
            [LayerShape(self._head.kv_heads, self._head.dim)],
            slots=slots,
            page_size=page_size,
            num_pages=num_pages,
            dtype=self._head.dtype,
            device=self._head.rotary.inv_freq.device,  # type: ignore[arg-type]
            growable=True,
            max_tokens=max_tokens,
        )

    # What it holds of each slot.

    def room(self, tokens: int) -> int:
        return tokens + self._spare

    def move(self, src: int, dst: int) -> None:
        super().move(src, dst)
        self._states.move(src, dst)

    def swap_out(self, slot: int, tokens: int) -> Any:
        return super().swap_out(slot, tokens), self._states.take(slot)

    def swap_in(self, slot: int, saved: Any) -> None:
        held, states = saved
        super().swap_in(slot, held)
        self._states.give(slot, states)

    # What it learns of a text.

    @torch.inference_mode()
    def see(self, first: int, states: torch.Tensor, start: torch.Tensor, counts: torch.Tensor | None) -> None:
        self._states.write(first, self._head.fuse(states), start, counts)

    @torch.inference_mode()
    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> None:
        rows = slice(slot, slot + 1)
        start = max(start, 1)  # the first token makes no pair
        if start < stop:
            context = torch.full((1,), start - 1, dtype=torch.int32, device=text.device)
            self._feed(text[None], context, None, stop - start, rows, self.table(rows))
        self.seen[slot] = stop

    def _feed(
        self,
        texts: torch.Tensor,
        context: torch.Tensor,
        counts: torch.Tensor | None,
        width: int,
        rows: slice,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """The pairs at ``context .. context + counts - 1`` (at most ``width``); the last hidden state of each request, ``[n,H]``."""
        position = context.long()[:, None] + torch.arange(width, device=context.device)
        tokens = texts.gather(1, (position + 1).clamp(max=texts.shape[1] - 1))
        p, at = self._pass(context, counts, len(context), width, table)
        hidden = self._layer(p, at, p.pack(tokens), p.pack(self._states.read(rows, position)))
        hidden = p.unpack(hidden)
        if counts is None:
            return hidden[:, -1]
        last = (counts - 1).clamp(min=0).long()
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]

    def _pass(
        self, context: torch.Tensor, counts: torch.Tensor | None, n: int, width: int, table: torch.Tensor
    ) -> tuple[Pass, torch.Tensor]:
        return make_pass(self._cache, table, context, counts, n, width, backends=self._backends, reads=not self._fixed)

    def _layer(self, p: Pass, at: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        options = AttentionOptions()
        return self._head(
            tokens,
            hidden,
            self._head.rotations(at, hidden),
            lambda q, k, v: paged_attention(p, 0, q, k, v, options),
        )  # type: ignore[no-any-return]

    # Drafting.

    @torch.inference_mode()
    def propose(self, round_: Round) -> Drafts:
        n = len(round_.lens)
        rows = slice(n)
        seen = self.seen[:n]
        start = torch.minimum(seen, round_.lens).clamp(min=1)  # have been fed; the first token makes no pair
        missing = round_.lens - start
        limits = torch.where((missing >= 1) & (missing <= self.reach), round_.limits, 0)
        k, as_tree = round_.k, self._tree is not None and round_.branch is not None
        if self._tree is not None and not as_tree:  # a chain as long as the tree's longest path
            k, limits = min(k, self._deepest), limits.clamp(max=self._deepest)
        if round_.reads:
            k = min(k, int(limits.max()))
        if k == 0:
            return nothing(round_.lens)
        table = self.table(rows)
        going = limits > 0
        fed = torch.where(going, missing, 0)
        width = int(fed.max()) if round_.reads else self.reach
        hidden = self._feed(round_.texts, start - 1, fed, width, rows, table)
        seen.copy_(torch.where(going, round_.lens, seen))
        if as_tree:
            return self._grown(round_, k, hidden, limits, table)
        turns = Turns(round_, limits, k)
        drawn: list[Drawn] = []
        fed_next: torch.Tensor | None = fed
        while fed_next is not None:
            j = len(drawn)
            drawn.append(round_.draw(self._head.lm_head(self._head.finish(hidden)), j, self._head.ids))
            if (fed_next := turns.next(drawn[j])) is not None:
                context = torch.where(fed_next > 0, round_.lens - 1 + j, 0)
                p, at = self._pass(context, fed_next, n, 1, table)
                fed_tokens, fed_hidden = p.pack(drawn[j].tokens[:, None]), p.pack(hidden[:, None])
                hidden = p.unpack(self._layer(p, at, fed_tokens, fed_hidden))[:, 0]
        return drafts_of(drawn, turns, self._vocab_size if round_.needs_logits else None)

    def _grown(self, round_: Round, k: int, root: torch.Tensor, limits: torch.Tensor, table: torch.Tensor) -> Drafts:
        """Trees behind the states ``root [n,H]`` at the texts' ends; their nodes' pairs lie behind the text in the order they are fed."""
        head, cache = self._head, self._cache.layer(0)
        going, base = limits > 0, (round_.lens - 1).clamp(min=0)
        fed, depth = 0, 0
        masks: list[torch.Tensor] = []
        append, attention, _ = self._backends

        def feed(tokens: torch.Tensor, hidden: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
            nonlocal fed, depth
            n, m = tokens.shape
            position = (base.long() + depth)[:, None].expand(n, m).flatten()
            masks.append(sees)

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                q, k, v = (x.unflatten(0, (n, m)) for x in (q, k, v))
                ops.append_kv(k, v, *cache, table, base + fed, torch.where(going, m, 0), backend=append)
                # The op knows only the newest tokens as a tree's: those fed before are among them, and ask for nothing.
                q = torch.cat((q.new_zeros(n, fed, *q.shape[2:]), q), 1)
                lens = torch.where(going, fed + m, 0)
                seen = torch.cat(masks, 1)
                out = ops.verify_attention(q, *cache, table, base, lens, tree_mask=seen, backend=attention)
                return out[:, fed:].flatten(0, 1)

            states = head(tokens.flatten(), hidden.flatten(0, 1), head.rotations(position, hidden), attend)
            fed, depth = fed + m, depth + 1
            return states.unflatten(0, (n, m))  # type: ignore[no-any-return]

        def score(states: torch.Tensor, depth: int) -> torch.Tensor:
            return head.lm_head(head.finish(states))  # type: ignore[no-any-return]

        assert self._tree is not None
        assert round_.branch is not None
        tree = self._tree
        if isinstance(tree, DynamicTree) and round_.reads:  # a pass for each level that is asked for
            tree = replace(tree, depth=min(self._deepest, -(-k // self.level)))
        drafts = grow(tree, k, root, feed, score, round_.branch, head.ids)
        drafts.lens = torch.minimum(drafts.lens, limits)
        return drafts

    def drafting(self, n: int) -> Callable[[], object]:
        pages, width = self._new_cache(n, self._cache.page_size, 0), 1
        if self._tree is not None:  # the nodes of a level
            width = max(1, -(-self._spare // max(self._tree.depth - 1, 1)))
        for slot in range(n):
            pages.reserve(slot, _MEASURED + width)
        device = self.seen.device
        context = torch.full((n,), _MEASURED, dtype=torch.int32, device=device)
        tokens, hidden = torch.zeros(n * width, dtype=torch.int64, device=device), self._states.blank(n * width)

        def draft() -> object:
            p, at = make_pass(
                pages, pages.block_table, context, None, n, width, backends=self._backends, reads=not self._fixed
            )
            return self._head.lm_head(self._head.finish(self._layer(p, at, tokens, hidden)))

        return draft
