"""How far counts are from what is expected of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Text = tuple[int, ...]
_RARE = 5.0  # texts expected less often are counted together


def chi_square(counts: Mapping[Text, int], expected: Mapping[Text, float], slack: float = 0.0) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare texts counted together.

    Args:
        expected: of every text that can be written.
        slack: a count off by no more than this share of what is expected is taken for right.
    """
    cells: list[tuple[float, float]] = []
    rare_count = rare_expected = 0.0
    for text in sorted(expected, key=lambda text: expected[text]):
        if expected[text] < _RARE or 0 < rare_expected < _RARE:  # the rare ones together may need another one
            rare_count += counts.get(text, 0)
            rare_expected += expected[text]
        else:
            cells.append((counts.get(text, 0), expected[text]))
    if rare_expected > 0:
        cells.append((rare_count, rare_expected))
    off = ((max(abs(count - mean) - slack * mean, 0.0), mean) for count, mean in cells)
    return sum(distance**2 / mean for distance, mean in off), max(len(cells) - 1, 0)


def tail(statistic: float, degrees: int) -> float:
    """The probability that chi-square is at least this by chance."""
    if degrees == 0:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def two_sided(distance: float, variance: float) -> float:
    """The probability that a normal number is at least this far from its mean by chance, either way."""
    return math.erfc(distance / math.sqrt(2 * variance)) if variance > 0 else 1.0
