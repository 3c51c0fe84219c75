"""What is trained: a drafter that learns the target's own distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec_triton.training.agreement import Agreement
from specdec_triton.training.features import Example

_DECAY = 0.8  # of a step's weight against the one before
Predictions = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


class Student(ABC):
    """A drafter in training, in fp32, on the target's device.

    Args:
        model: the untouched target. ids: int64 ``[V']``, what it drafts, in order.

    Attributes:
        module: its parameters; those that need no gradient are not trained.
    """

    module: nn.Module

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        weight = model.get_output_embeddings().weight.detach()
        self.device: torch.device = weight.device
        self.ids = ids.to(self.device)
        self.taught_by = weight.float()[self.ids]

    @abstractmethod
    def predict(self, example: Example, steps: int) -> Iterator[Predictions]:
        """At each step, for each of the text's places i = 0, 1, ...: behind which token it says what follows, int64 ``[M]``; and
        ``logits(chosen)``, ``[R,V']`` of R of them, bool ``[M]``."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """As the drafter loads it."""

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that change, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def losses(self, example: Example, steps: int) -> tuple[torch.Tensor, int, list[Agreement]]:
        """The weighted sum of cross-entropies over all steps and places to learn from, how many of these there are, and how often drafter
        and target agree at each step of the answers."""
        example = example.to(self.device)
        total, found = torch.zeros((), device=self.device), []
        known = example.best >= 0
        answers = torch.cat((example.learnt[1:], example.learnt[-1:])) & known  # behind which an answer goes on
        row, probs = known.cumsum(0) - 1, self._taught(example.last[known])
        right_so_far = torch.ones_like(known)
        for step, (at, logits_of) in enumerate(self.predict(example, steps)):
            chosen = known[at]
            right_so_far = right_so_far[: len(at)]
            if not bool(chosen.any()):
                found.append(Agreement())
                continue
            at, logits = at[chosen], logits_of(chosen)
            total = total - _DECAY**step * (probs[row[at]] * logits.log_softmax(-1)).sum()
            same = self.ids[logits.detach().argmax(-1)] == example.best[at]
            right_so_far[chosen] &= same
            judged = answers[at]
            prefix = int((right_so_far[chosen] & judged).sum())
            found.append(Agreement(int((same & judged).sum()), int(judged.sum()), prefix))
        return total, int(known.sum()), found

    @torch.no_grad()
    def _taught(self, states: torch.Tensor) -> torch.Tensor:
        """The target's distribution over the draft ids ``[N,V']`` for what its head is given, ``[N,H]``."""
        return (states.float() @ self.taught_by.T).softmax(-1)
