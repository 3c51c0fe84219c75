"""Grammars: which tokens may come next, by a matcher such as those of xgrammar.

The decoder builds no grammars. It takes a matcher of another library, asks it for the mask of every drafted position, and winds it
back to the text that was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch


@runtime_checkable
class GrammarMatcher(Protocol):
    """The state of a grammar after some text; what xgrammar's ``GrammarMatcher`` is.

    ``SamplingParams(grammar=lambda: xgrammar.GrammarMatcher(compiled))``, compiled for the model's tokenizer with
    ``vocab_size=model.config.vocab_size``.
    """

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write which tokens may come next into row ``index`` of int32 ``[R,ceil(V/32)]`` (bit ``v % 32`` of word ``v // 32``).

        False: all may.
        """

    def accept_token(self, token_id: int) -> bool:
        """Go on by a token; False, and no change, if it may not come."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""

    def is_terminated(self) -> bool:
        """Whether the text is complete, so that nothing may come next."""


_TAKEN: WeakSet[Any] = WeakSet()  # matchers of requests


class Matcher:
    """A request's matcher: it has accepted the committed text, nothing more and nothing less.

    Raises:
        TypeError: what was given is no :class:`GrammarMatcher`.
        ValueError: another request has it, or had it.
    """

    def __init__(self, matcher: Any) -> None:
        if not isinstance(matcher, GrammarMatcher):
            needed = "fill_next_token_bitmask, accept_token, rollback and is_terminated"
            raise TypeError(f"a matcher needs {needed}; {type(matcher).__name__} lacks some of them")
        with suppress(TypeError):  # an object to which there are no weak references, or that has no hash
            if matcher in _TAKEN:
                raise ValueError("it gave a matcher that another request has: make a new one in each call")
            _TAKEN.add(matcher)
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        return self._matcher.is_terminated()

    def walk(self, drafts: Sequence[int], masks: torch.Tensor) -> None:
        """Fill the masks of the row before each draft and of the one after the last.

        Behind a draft that may not come, or that completes the text, no row will count: those keep what they hold. Where the
        matcher fails behind a draft, nothing may come.

        Args:
            masks: int32 ``[K+1,ceil(V/32)]``.
        """
        known = taken = 0  # rows that are filled, drafts that are accepted
        try:
            while not self._matcher.is_terminated():
                if not self._matcher.fill_next_token_bitmask(masks, known):
                    masks[known] = -1
                known += 1
                if known > len(drafts) or not self._matcher.accept_token(drafts[taken]):
                    break
                taken += 1
        except Exception:
            if known == 0:
                raise
            masks[known:] = 0
        finally:
            if taken:
                self._matcher.rollback(taken)

    def accept(self, token: int) -> bool:
        return self._matcher.accept_token(token)
