"""Drafts from a second, smaller model (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton._checks import require
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
from specdec_triton.drafters.translated_model import TranslatedSession
from specdec_triton.drafters.translation import Recutting, Translation, same_texts, token_texts

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.head import Head
    from specdec_triton.kv_cache import KVCache

_MAX_PADDING = 1024  # columns by which the logits of two models with one tokenizer may differ
_CHUNK = 512
_MEASURED = 256  # tokens of context while costs are measured
_FIRST = 2  # tokens of a round's first pass: the text's last, and the last draft if all were accepted


class DraftModel(Drafter):
    """A transformers causal language model with the target's vocabulary, or with another one.

    Args:
        model: loaded by transformers, in any dtype, on the target's device.
        tokenizer, target_tokenizer: if the models' tokenizers differ, both. Then the draft model reads the text in tokens of its own.
        match: what it drafts then. ``tokens``: those whose text is one token of the target's too. ``text``: anything; the target's
            tokenizer cuts the text anew. That is for tokenizers that share little; it happens on the host, so only a CPU does it, and
            drafts are certain whatever the method.

    The logits may be wider or narrower than the target's by padding; ids that only one of them has are never drafted or
    count as impossible. A row that outgrows the draft model's context goes on without drafts.

    Raises:
        ValueError: one tokenizer without the other, or another ``match``.

    Once it is bound to a target:
        ValueError: another device, other vocabularies without tokenizers, tokenizers that share no token, or ``text`` on a device.

    Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding" (arXiv:2211.17192).
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, target_tokenizer: Any = None, match: str = "tokens"
    ) -> None:
        together = (tokenizer is None) == (target_tokenizer is None)
        require(together, "tokenizer", "given together with target_tokenizer", "one of the two")
        require(match in ("tokens", "text"), "match", "'tokens' or 'text'", repr(match))
        self.model = model
        self.match = match
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        from specdec_triton.adapter import ModelAdapter

        if not hasattr(self.model, "config"):
            raise ValueError(f"DraftModel needs a transformers model, got {type(self.model).__name__}")
        adapter = ModelAdapter(self.model, backend=options.backend)
        if adapter.device != target.device:
            raise ValueError(f"the draft model must be on the target's device {target.device}, got {adapter.device}")
        words = self._translation(adapter, target)
        if words is None and abs(adapter.vocab_size - target.vocab_size) > _MAX_PADDING:
            raise ValueError(
                f"the draft model has another vocabulary: {adapter.vocab_size} ids, the target has"
                f" {target.vocab_size}; give tokenizer= and target_tokenizer= if their tokenizers differ"
            )
        adapter.fixed_shapes = target.fixed_shapes
        most = options.max_tokens
        if words is not None and most is not None:
            most = TranslatedSession.room_for(most, adapter.max_len)
        cache = adapter.new_cache(
            slots=options.slots,
            page_size=options.page_size,
            num_pages=options.num_pages,
            growable=True,
            max_tokens=most,
        )
        if words is None:
            return _Session(adapter, cache, target.vocab_size, options)
        back = None
        if self.match == "text":
            require(
                not target.fixed_shapes, "match", "'tokens' on a device, whose drafts the host does not see", "'text'"
            )
            back = Recutting(self.target_tokenizer, words.draft)
        return TranslatedSession(
            adapter,
            cache,
            words,
            target.vocab_size,
            options,
            lambda n: drafting_pass(adapter, n, options.page_size),
            back,
        )

    def _translation(self, adapter: ModelAdapter, target: ModelAdapter) -> Translation | None:
        """None: ids mean the same to both."""
        if self.tokenizer is None:
            return None
        theirs, ours = token_texts(self.target_tokenizer), token_texts(self.tokenizer)
        if same_texts(theirs[: target.vocab_size], ours[: adapter.vocab_size]):
            return None
        known = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("unk", "bos", "eos"))
        fallback = next((i for i in known if i is not None and i < adapter.vocab_size), 0)
        return Translation(theirs, ours, target.vocab_size, adapter.vocab_size, fallback)


class _Session(CachedSession):
    """The draft model with its own cache.

    A round leaves the keys of the last text token and of all drafts but the last in the cache. After full acceptance one key is missing,
    and the next round's first pass feeds that token too, so that its shape never changes.
    """

    adapter: ModelAdapter

    def __init__(self, adapter: ModelAdapter, cache: KVCache, vocab_size: int, options: SessionOptions) -> None:
        super().__init__(cache, options, fixed_shapes=adapter.fixed_shapes)
        self.adapter = adapter
        self._vocab_size = vocab_size
        self.max_len = adapter.max_len

    def room(self, tokens: int) -> int:
        return tokens if self.max_len is None else min(tokens, self.max_len)

    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> None:
        stop = stop if self.max_len is None else min(stop, self.max_len)
        table = self.table(slice(slot, slot + 1))
        while start < stop:
            end = min(start + _CHUNK, stop)
            context = torch.full((1,), start, dtype=torch.int32, device=text.device)
            chunk = text[None, start:end].clamp(max=self.adapter.vocab_size - 1)
            self.adapter.forward(chunk, self._cache, table, context, last_only=True)
            start = end
        self.seen[slot] = stop

    def propose(self, round_: Round) -> Drafts:
        n = len(round_.lens)
        seen = self.seen[:n]
        start = torch.minimum(seen, round_.lens - 1).clamp(min=0)  # without the keys of rejected drafts
        missing = round_.lens - start
        limits = torch.where(missing <= _FIRST, round_.limits, 0)
        if self.max_len is not None:
            limits = torch.minimum(limits, self.max_len - round_.lens).clamp(min=0)
        k = min(round_.k, int(limits.max())) if round_.reads else round_.k
        if k == 0:
            return nothing(round_.lens)
        table = self.table(slice(n))

        going = limits > 0
        width = int(torch.where(going, missing, 1).max()) if round_.reads else _FIRST
        columns = start.long()[:, None] + torch.arange(width, device=start.device)
        columns = columns.clamp(max=round_.texts.shape[1] - 1)
        # Ids that only the target has, and what lies past a text.
        new = round_.texts.gather(1, columns).clamp(0, self.adapter.vocab_size - 1)
        fed = torch.where(going, missing.clamp(max=width), 0)
        head = None if round_.draw_from is None else self._head()
        score = self.adapter.forward if head is None else self.adapter.hidden
        scored = score(new, self._cache, table, start, fed, last_only=True)[:, 0]
        seen.copy_(torch.where(going, start + fed, seen))

        turns = Turns(round_, limits, k)
        drawn: list[Drawn] = []
        while True:
            j = len(drawn)
            if head is None or round_.draw_from is None:
                drawn.append(round_.draw(scored[:, : self._vocab_size], j))
            else:
                drawn.append(round_.draw_from(head, scored, j))
            if (fed_next := turns.next(drawn[j])) is None:
                return drafts_of(drawn, turns, self._vocab_size if round_.needs_logits else None)
            scored = score(drawn[j].tokens[:, None], self._cache, table, seen.clone(), fed_next)[:, 0]
            seen += fed_next

    def _head(self) -> Head | None:
        """The draft model's, for the ids that the target has too."""
        head = self.adapter.head
        return head.first(self._vocab_size) if head is not None and head.usable else None

    def drafting(self, n: int) -> Callable[[], object]:
        return drafting_pass(self.adapter, n, self._cache.page_size)


def drafting_pass(adapter: ModelAdapter, n: int, page_size: int) -> Callable[[], object]:
    """A pass of a draft model over a token of n requests each, over pages of its own."""
    pages = adapter.new_cache(slots=n, page_size=page_size, num_pages=0, growable=True)
    context = min(_MEASURED, (adapter.max_len or _MEASURED) - 1)
    for slot in range(n):
        pages.reserve(slot, context + 1)
    lens = torch.full((n,), context, dtype=torch.int32, device=adapter.device)
    tokens = torch.zeros(n, 1, dtype=torch.int64, device=adapter.device)
    return lambda: adapter.forward(tokens, pages, pages.block_table, lens)
