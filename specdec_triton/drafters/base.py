"""The drafter protocol. A drafter is a recipe; ``bind`` makes the session that serves one decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdec_triton.sampling import SamplingBatch

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter


@dataclass
class Round:
    """What a drafter may look at.

    Attributes:
        slots: the B requests' places in the decoder.
        texts: int64 ``[B,L]``, prompt and output so far. lens: their lengths, on the host.
        limits: the most tokens that may be drafted for each request.
        params: the requests' sampling parameters; ``position`` is that of the first draft.
        method: the accept/reject method that will judge the drafts.
    """

    slots: Sequence[int]
    texts: torch.Tensor
    lens: Sequence[int]
    limits: Sequence[int]
    params: SamplingBatch
    method: str


@dataclass
class Drafts:
    """Proposals: tokens int64 ``[B,K]`` (-1 past a request's length), lengths, and how they were drawn.

    Attributes:
        logits: ``[B,K,V]`` raw draft logits, and lse ``[B,K]`` (see ``ops.sample``); None: the drafts were certain.
    """

    tokens: torch.Tensor
    lens: list[int]
    logits: torch.Tensor | None = None
    lse: torch.Tensor | None = None


class DraftSession(ABC):
    """A drafter at work for one decoder, with what it remembers of each slot's request."""

    def admit(self, slot: int, prompt: Sequence[int], capacity: int) -> None:
        """A request enters the slot; its text will never be longer than ``capacity``."""

    @abstractmethod
    def propose(self, round_: Round) -> Drafts:
        """Draft up to ``limits[b]`` tokens for each request; fewer, or none, is fine."""

    def judge(self, slot: int, drafted: int, accepted: int) -> None:
        """How the slot's drafts fared."""

    def release(self, slot: int) -> None:
        """The slot's request has ended."""


class Drafter(ABC):
    """A source of drafts."""

    @abstractmethod
    def bind(self, target: ModelAdapter, *, slots: int, page_size: int, backend: str | None) -> DraftSession:
        """Start a session for a decoder of ``target``.

        Raises:
            ValueError: the drafter does not fit the target.
        """


def nothing(batch: int, device: torch.device) -> Drafts:
    """No drafts for anyone."""
    return Drafts(torch.empty(batch, 0, dtype=torch.int64, device=device), [0] * batch)
