"""A drafter at work for one decoder, as the decoder may rely on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from specdec_triton._checks import require
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, DraftSession, SessionOptions
from specdec_triton.errors import OutOfPagesError


class Drafting:
    """Keeps a session's slots; what the session raises is passed on once, and from then on it is left out: texts do not need it.

    That there are too few pages is no failure (:class:`OutOfPagesError` is raised). Only :meth:`DraftSession.propose` is not
    called here.

    Args:
        failed: is told what the session raised.

    Attributes:
        session: the drafter's. on: whether requests may draft.

    Raises:
        ValueError: the drafter does not fit the target, or does not give a session.
    """

    def __init__(
        self, drafter: Drafter, target: ModelAdapter, options: SessionOptions, failed: Callable[[BaseException], None]
    ) -> None:
        self.session = drafter.bind(target, options)
        given = type(self.session).__name__
        require(
            isinstance(self.session, DraftSession), f"{type(drafter).__name__}.bind's result", "a DraftSession", given
        )
        self.on = not self.session.silent
        self._failed = failed

    def fail(self, error: BaseException) -> None:
        """Leave the session out from now on."""
        self.on = False
        self._failed(error)

    def reserve(self, slot: int, tokens: int) -> None:
        self._call(self.session.reserve, slot, tokens)

    def see(self, first: int, states: torch.Tensor, start: torch.Tensor) -> None:
        self._call(self.session.see, first, states, start, None)

    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> bool:
        """Whether it was done."""
        self._call(self.session.extend, slot, text, start, stop)
        return self.on

    def move(self, src: int, dst: int) -> None:
        self._call(self.session.move, src, dst)

    def swap_out(self, slot: int, tokens: int) -> Any:
        return self._call(self.session.swap_out, slot, tokens)

    def swap_in(self, slot: int, saved: Any) -> None:
        self._call(self.session.swap_in, slot, saved)

    def release(self, slot: int) -> None:
        if self.on:
            self._call(self.session.release, slot)
        else:  # it may still hold pages
            with suppress(Exception):
                self.session.release(slot)

    def _call(self, hook: Callable[..., Any], *args: Any) -> Any:
        if not self.on:
            return None
        try:
            return hook(*args)
        except OutOfPagesError:
            raise
        except Exception as error:
            self.fail(error)
            return None
