"""Plain decoding through the same path: K = 0, the yardstick of every speed-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_triton.drafters.base import Drafter, Drafts, DraftSession, Round, SessionOptions, nothing

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter


class NoDraft(Drafter):
    """Never drafts."""

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        return _Session()


class _Session(DraftSession):
    silent = True

    def propose(self, round_: Round) -> Drafts:
        return nothing(round_.lens)
