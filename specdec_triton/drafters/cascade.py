"""Several drafters, of which the first that has something to say is heard."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec_triton._checks import require
from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions, nothing
from specdec_triton.drafters.suffix import SuffixDrafter
from specdec_triton.trees import chain_parents

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter

MIN_MATCH = 3  # tokens that must repeat before a model is not asked


class Cascade(Drafter):
    """Free drafts first, else those of a model, for each request by itself.

    Args:
        drafters: in the order in which they are asked; only the last may cost something, or look at the target's hidden states.

    Raises:
        ValueError: no drafters, or what is none among them; once bound, drafters in another order.

    Example:
        >>> drafter = Cascade([PromptLookup(), DraftModel(small)])
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        listed = isinstance(drafters, (list, tuple)) and len(drafters) > 0
        require(listed, "drafters", "a list of drafters", type(drafters).__name__)
        for drafter in drafters:
            require(isinstance(drafter, Drafter), "drafters", "a list of drafters", f"a {type(drafter).__name__} in it")
        self.drafters = tuple(drafters)
        self.trees = any(drafter.trees for drafter in drafters)

    @classmethod
    def after_suffix(cls, drafter: Drafter, min_match: int = MIN_MATCH) -> Cascade:
        """``drafter`` behind suffix lookup, as the command's ``--draft cascade:DRAFTER`` has it.

        Args:
            min_match: so many tokens must have occurred before, in the request's own text, for ``drafter`` not to be asked.
        """
        return cls([SuffixDrafter(min_match=min_match), drafter])

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        sessions = [drafter.bind(target, options) for drafter in self.drafters]
        for drafter, session in zip(self.drafters[:-1], sessions, strict=False):
            first = session.free and session.seen is None and not session.taps
            require(
                first, "drafters", "ordered so that only the last costs something", f"{type(drafter).__name__} earlier"
            )
        session = _Session(sessions, target.vocab_size)
        if not sessions[-1].free and len(sessions) > 1:
            free = sessions[0] if len(sessions) == 2 else _Session(sessions[:-1], target.vocab_size)
            session.parts = (free, sessions[-1])
        return session


class _Session(DraftSession):
    """Its last session decides what it costs, remembers and is shown; the others are free and need nothing."""

    def __init__(self, sessions: list[DraftSession], vocab_size: int) -> None:
        self._sessions = sessions
        self._vocab_size = vocab_size
        last = sessions[-1]
        self.silent = all(session.silent for session in sessions)
        self.free, self.adapter, self.costs_like = last.free, last.adapter, last.costs_like
        self.taps, self.reach, self.memory = last.taps, last.reach, last.memory
        self.trees, self.level = last.trees, last.level
        self.seen = last.seen
        # The last may have a limit that the free ones do not; it keeps to that by itself.
        self.max_len = last.max_len if len(sessions) == 1 else None

    @property
    def version(self) -> int:
        return sum(session.version for session in self._sessions)

    @property
    def key(self) -> Hashable:
        return tuple(session.key for session in self._sessions)

    def reserve(self, slot: int, tokens: int) -> None:
        for session in self._sessions:
            session.reserve(slot, tokens)

    def see(self, first: int, states: torch.Tensor, start: torch.Tensor, counts: torch.Tensor | None) -> None:
        self._sessions[-1].see(first, states, start, counts)

    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> None:
        self._sessions[-1].extend(slot, text, start, stop)

    def move(self, src: int, dst: int) -> None:
        for session in self._sessions:
            session.move(src, dst)

    def release(self, slot: int) -> None:
        for session in self._sessions:
            session.release(slot)

    def swap_out(self, slot: int, tokens: int) -> Any:
        return [session.swap_out(slot, tokens) for session in self._sessions]

    def swap_in(self, slot: int, saved: Any) -> None:
        for session, of_session in zip(self._sessions, saved, strict=True):
            session.swap_in(slot, of_session)

    def drafting(self, n: int) -> Callable[[], object]:
        return self._sessions[-1].drafting(n)

    def propose(self, round_: Round) -> Drafts:
        chosen, left = nothing(round_.lens), round_.limits
        for session in self._sessions:
            if round_.reads and not bool(left.any()):
                break
            k = min(round_.k, int(left.max())) if round_.reads else round_.k
            found = session.propose(replace(round_, k=k, lens=round_.lens.clone(), limits=left.clone()))
            chosen = joined(chosen, found, self._vocab_size, needs_logits=round_.needs_logits)
            left = torch.where(chosen.lens > 0, 0, left)
        return chosen


def joined(first: Drafts, second: Drafts, vocab_size: int, *, needs_logits: bool) -> Drafts:
    """The drafts of both; nobody has some of each."""
    if first.tokens.shape[1] == 0:
        return second
    needs_logits = needs_logits and second.parents is None
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    a, b = (_widened(drafts, width, vocab_size, needs_logits) for drafts in (first, second))
    mine = a.lens > 0
    tokens, lens = torch.where(mine[:, None], a.tokens, b.tokens), torch.where(mine, a.lens, b.lens)
    both = Drafts(tokens, lens, failed=b.failed, foreign=_either(a.foreign, b.foreign))
    if b.parents is not None:
        both.parents = torch.where(mine[:, None], chain_parents(tokens), b.parents)
    elif needs_logits:
        assert a.logits is not None
        assert b.logits is not None
        assert a.lse is not None
        assert b.lse is not None
        both.logits = torch.where(mine[:, None, None], a.logits, b.logits)
        both.lse = torch.where(mine[:, None], a.lse, b.lse)
    return both


def _either(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a | b


def _widened(drafts: Drafts, width: int, vocab_size: int, needs_logits: bool) -> Drafts:
    """In so many columns; with logits where they are needed: a certain draft has all of the probability."""
    pad = torch.nn.functional.pad
    missing = width - drafts.tokens.shape[1]
    tokens, logits, lse = pad(drafts.tokens, (0, missing)), drafts.logits, drafts.lse
    parents = None if drafts.parents is None else pad(drafts.parents, (0, missing))
    if needs_logits:
        if logits is None:
            logits = torch.full((*tokens.shape, vocab_size), float("-inf"), device=tokens.device)
            logits.scatter_(2, tokens.clamp(0, vocab_size - 1)[..., None], 0.0)
            lse = torch.zeros(tokens.shape, device=tokens.device)
        else:
            assert lse is not None
            logits, lse = pad(logits, (0, 0, 0, missing)).float(), pad(lse, (0, missing))
    return replace(drafts, tokens=tokens, logits=logits, lse=lse, parents=parents)
