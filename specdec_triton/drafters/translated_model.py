"""A draft model with another tokenizer: it reads the text in its own tokens, and drafts those that the target has too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specdec_triton.drafters.base import Drafts, Drawn, Round, SessionOptions, Turns, drafts_of, nothing
from specdec_triton.drafters.cached import CachedSession
from specdec_triton.drafters.translation import PIECES

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.drafters.translation import Translation
    from specdec_triton.kv_cache import KVCache

_CHUNK = 512
_TAIL = 8  # tokens of the text that drafts are joined to, when the target's tokenizer cuts them
_RATIO, _MORE = (
    2,
    64,
)  # room for so many tokens of its own for each of the target's, and some; texts that need more get no drafts


class TranslatedSession(CachedSession):
    """As of a draft model that shares the tokenizer, but each token of the target's is up to 8 of its own in the cache.

    Without ``back`` it drafts among the tokens that both have: a draft is one token for either, so that rejected ones are forgotten as
    usual, and its probabilities are those of its logits over the shared tokens alone. With ``back`` it drafts what it likes, and the
    target's tokenizer cuts that anew. Where a text's own tokens lie follows from the text.

    Args:
        back: ``(the text's last tokens, own tokens)`` -> what the latter are in the target's.

    Source: Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous vocabularies"
    (arXiv:2502.05202): token-level intersection, and exact matching of strings.
    """

    adapter: ModelAdapter

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: KVCache,
        words: Translation,
        vocab_size: int,
        options: SessionOptions,
        drafting: Callable[[int], Callable[[], object]],
        back: Callable[[Sequence[int], Sequence[int]], list[int]] | None = None,
    ) -> None:
        super().__init__(cache, options, fixed_shapes=adapter.fixed_shapes)
        if back is not None:
            self.reach = options.max_drafts + 1  # drafts' keys are not kept
        self._back = back
        self.adapter = adapter
        self._words = words.to(adapter.device)
        self._vocab_size = vocab_size
        self._drafting = drafting
        with torch.inference_mode(False):
            self._room = torch.zeros_like(self.seen)  # for own tokens

    @staticmethod
    def room_for(tokens: int, max_len: int | None) -> int:
        """Own tokens that are kept of a text."""
        own = _RATIO * tokens + _MORE
        return own if max_len is None else min(own, max_len)

    def room(self, tokens: int) -> int:
        return self.room_for(tokens, self.adapter.max_len)

    def reserve(self, slot: int, tokens: int) -> None:
        super().reserve(slot, tokens)
        self._room[slot] = self.room(tokens)

    def move(self, src: int, dst: int) -> None:
        super().move(src, dst)
        self._room[dst], self._room[src] = self._room[src], 0

    def swap_out(self, slot: int, tokens: int) -> None:
        self.release(slot)  # and read the text anew

    def swap_in(self, slot: int, saved: None) -> None:
        pass

    def _forget(self, slot: int) -> None:
        super()._forget(slot)
        self._room[slot] = 0

    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> None:
        """Reads how many tokens of its own there are."""
        known = text[:stop].clamp(0, self._vocab_size - 1)
        own = self._words.pieces[known[start:]].flatten()
        own = own[own >= 0]
        first = int(self._words.counts[known[:start]].sum())
        if first + len(own) <= int(self._room[slot]):
            table = self.table(slice(slot, slot + 1))
            for chunk in own.split(_CHUNK):
                context = torch.full((1,), first, dtype=torch.int32, device=text.device)
                self.adapter.forward(chunk[None], self._cache, table, context, last_only=True)
                first += len(chunk)
        self.seen[slot] = stop  # also of one that is too long, and never drafted for

    def propose(self, round_: Round) -> Drafts:
        n = len(round_.lens)
        lens, seen = round_.lens, self.seen[:n]
        start = torch.minimum(seen, lens - 1).clamp(min=0)  # without the keys of rejected drafts
        missing = lens - start
        texts = round_.texts.clamp(0, self._vocab_size - 1)
        ends = torch.nn.functional.pad(self._words.counts[texts].cumsum(1, dtype=torch.int32), (1, 0))
        own_start, own_stop = (ends.gather(1, x.long()[:, None])[:, 0] for x in (start, lens))
        limits = torch.where(missing <= self.reach, round_.limits, 0)
        limits = torch.minimum(limits, self._room[:n] - own_stop).clamp(min=0)
        k = min(round_.k, int(limits.max())) if round_.reads else round_.k
        if k == 0:
            return nothing(lens)
        going = limits > 0
        fed = torch.where(going, own_stop - own_start, 0)
        new = self._own(texts, start, missing)
        if round_.reads:
            new = new[:, : max(int(fed.max()), 1)]
        table = self.table(slice(n))
        scored = self.adapter.forward(new, self._cache, table, own_start, fed, last_only=True)[:, 0]
        seen.copy_(torch.where(going, lens, seen))

        turns, at = Turns(round_, limits, k), own_stop

        def after(own: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
            """Logits behind one more own token ``[n]`` of those who are fed."""
            nonlocal at
            scored = self.adapter.forward(own[:, None], self._cache, table, torch.where(fed > 0, at, 0), fed)[:, 0]
            at = at + fed
            return scored

        if self._back is not None:
            own = [scored.argmax(-1)]
            for j in range(k - 1):
                own.append(after(own[j], (limits > j + 1).int()).argmax(-1))
            return self._as_text(round_, torch.stack(own, 1), limits)
        drawn: list[Drawn] = []
        while True:
            drawn.append(round_.draw(scored[:, self._words.own], len(drawn), self._words.shared))
            if (fed_next := turns.next(drawn[-1])) is None:
                return drafts_of(drawn, turns, self._vocab_size if round_.needs_logits else None)
            scored = after(self._words.pieces[drawn[-1].tokens.clamp(0, self._vocab_size - 1), 0], fed_next)
            seen += fed_next

    def _as_text(self, round_: Round, own: torch.Tensor, limits: torch.Tensor) -> Drafts:
        """Own tokens ``[n,k]`` as certain drafts; their keys are not used again, since the target may cut the text elsewhere."""
        assert self._back is not None
        rows = []
        for text, length, tokens, limit in zip(
            round_.texts.tolist(), round_.lens.tolist(), own.tolist(), limits.tolist(), strict=True
        ):
            rows.append(self._back(text[max(length - _TAIL, 0) : length], tokens[:limit])[: round_.k] if limit else [])
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64)
        lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return Drafts(padded.view(len(rows), longest), torch.minimum(lens, round_.limits))

    def _own(self, texts: torch.Tensor, start: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        """The last tokens of the texts as own tokens, one behind the other, int64 ``[n, reach * 8]``; anything behind them."""
        step = torch.arange(self.reach, device=texts.device)
        tokens = texts.gather(1, (start.long()[:, None] + step).clamp(max=texts.shape[1] - 1))
        pieces = self._words.pieces[tokens].masked_fill((step >= missing[:, None])[..., None], -1)
        pieces = pieces.view(len(texts), self.reach * PIECES)
        order = (pieces < 0).int().argsort(dim=1, stable=True)
        return pieces.gather(1, order).clamp(min=0)

    def drafting(self, n: int) -> Callable[[], object]:
        return self._drafting(n)
