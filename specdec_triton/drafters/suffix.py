"""Drafts from the text itself and from earlier texts: the longest end that has occurred before, and what mostly followed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton import ops
from specdec_triton._checks import check_bool, check_integer, require
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions, nothing
from specdec_triton.drafters.suffix_automaton import ROOT, SuffixAutomaton

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

_NGRAM_ON_DEVICE = 16


class SuffixDrafter(Drafter):
    """Suffix decoding: as prompt lookup, with ends of any length, what followed them counted, and other texts to look in.

    Where values may be read (on a CPU) each text has a suffix automaton, to which a token is added in constant amortised time. On a
    device, where nothing is read back, the longest repeated end of up to 16 tokens is looked up and what followed it last is
    drafted (``ops.ngram_propose``); a corpus is of no use there, and refused.

    Args:
        corpus: token ids of texts to look in besides a request's own, such as earlier answers.
        remember: add each request's output to the corpus when it ends. Texts then depend on what was decoded before only in so far as
            they depend on drafts at all: never, where they are greedy or seeded.
        min_match: the shortest end that is looked up, in tokens.
        min_confidence: drafts end before the product of their shares (how often each followed, among all that did) falls below it.

    Raises:
        ValueError: an argument out of range.

    Source: Oliaro et al. 2024, "SuffixDecoding: Extreme speculative decoding for emerging AI applications" (arXiv:2411.04975).
    """

    def __init__(
        self,
        corpus: Iterable[Sequence[int]] = (),
        *,
        remember: bool = False,
        min_match: int = 1,
        min_confidence: float = 0.1,
    ) -> None:
        check_integer("min_match", min_match, 1)
        check_bool("remember", remember)
        fits = isinstance(min_confidence, (int, float)) and 0 <= min_confidence <= 1
        require(fits, "min_confidence", "a number from 0 to 1", repr(min_confidence))
        self.remember = remember
        self.min_match = min_match
        self.min_confidence = float(min_confidence)
        self._shared = SuffixAutomaton()
        self._texts = 0
        for text in corpus:
            self.add(text)

    def add(self, text: Sequence[int]) -> None:
        """Another text to look in."""
        require(not isinstance(text, (str, bytes)), "text", "a sequence of token ids", type(text).__name__)
        self._shared.start()
        for token in text:
            self._shared.add(int(token))
        self._texts += 1

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        if target.fixed_shapes:
            if self._texts or self.remember:
                raise ValueError(
                    "a corpus for SuffixDrafter needs a target on the CPU: on a device nothing is read back"
                )
            return _OnDevice(self, options.backend)
        return _Session(self, options.slots)


class _OnDevice(DraftSession):
    def __init__(self, drafter: SuffixDrafter, backend: str | None) -> None:
        self._drafter = drafter
        self._backend = backend

    def propose(self, round_: Round) -> Drafts:
        low = self._drafter.min_match
        tokens, found = ops.ngram_propose(
            round_.texts, round_.lens, round_.k, low, max(low, _NGRAM_ON_DEVICE), backend=self._backend
        )
        return Drafts(tokens, torch.minimum(found, round_.limits))


class _Text:
    """A request's text, and where its end stands in the corpus."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt = 0
        self.automaton = SuffixAutomaton()
        self.shared = ROOT, 0


class _Session(DraftSession):
    def __init__(self, drafter: SuffixDrafter, slots: int) -> None:
        self._drafter = drafter
        self._texts: list[_Text | None] = [None] * slots

    def move(self, src: int, dst: int) -> None:
        self._texts[dst], self._texts[src] = self._texts[src], None

    def release(self, slot: int) -> None:
        text, self._texts[slot] = self._texts[slot], None
        if text is not None and self._drafter.remember:
            self._drafter.add(text.tokens[text.prompt :])

    def swap_out(self, slot: int, tokens: int) -> Any:
        text, self._texts[slot] = self._texts[slot], None
        return text

    def swap_in(self, slot: int, saved: Any) -> None:
        self._texts[slot] = saved

    def propose(self, round_: Round) -> Drafts:
        lens, limits = round_.lens.tolist(), round_.limits.tolist()
        drafts = [self._of(slot, round_.texts[slot], *pair) for slot, pair in enumerate(zip(lens, limits, strict=True))]
        most = max(map(len, drafts))
        if most == 0:
            return nothing(round_.lens)
        tokens = torch.tensor([draft + [0] * (most - len(draft)) for draft in drafts])
        return Drafts(tokens, torch.tensor([len(draft) for draft in drafts], dtype=torch.int32))

    def _of(self, slot: int, row: torch.Tensor, length: int, limit: int) -> list[int]:
        if limit == 0:
            return []
        text = self._texts[slot]
        if text is None:
            text = self._texts[slot] = _Text()
            text.prompt = length - 1  # the first round comes after the first token of the output
        for token in row[len(text.tokens) : length].tolist():
            text.tokens.append(token)
            text.automaton.add(token)
            text.shared = self._drafter._shared.follow(*text.shared, token)
        own, shared = text.automaton.repeated(), text.shared
        # The longer match, the text's own of equal ones.
        automaton, (state, matched) = (text.automaton, own) if own[1] >= shared[1] else (self._drafter._shared, shared)
        draft: list[int] = []
        confidence = 1.0
        while matched >= self._drafter.min_match and len(draft) < limit:
            found = automaton.likeliest(state)
            if found is None and state == automaton.last:  # the text's end: it goes on as its own repetition did
                found = automaton.likeliest(automaton.repeated()[0])
            if found is None:
                break
            token, state, share = found
            confidence *= share
            if confidence < self._drafter.min_confidence:
                break
            draft.append(token)
        return draft
