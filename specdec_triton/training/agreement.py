"""How often a drafter in training says what the target says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Agreement:
    """At one step of feeding on its own outputs.

    Attributes:
        same, total: places where the likeliest tokens are the same, and all. prefix: where they were the same at the steps before, too.
    """

    same: int = 0
    total: int = 0
    prefix: int = 0

    def add(self, other: Agreement) -> None:
        self.same += other.same
        self.total += other.total
        self.prefix += other.prefix


def shares(steps: Sequence[Agreement]) -> list[float]:
    """The share that is the same, by step."""
    return [round(x.same / max(x.total, 1), 4) for x in steps]


def tokens_per_pass(steps: Sequence[Agreement]) -> float:
    """What chains of as many drafts as there are steps would bring in greedy text: 1 and the drafts that are kept."""
    return round(1 + sum(x.prefix / max(x.total, 1) for x in steps), 3)
