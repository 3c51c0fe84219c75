"""What passes cost: measured on a small grid (:mod:`~specdec_triton.engine.measuring`), and interpolated.

Passes of n requests with d drafts in all are timed for a few n and d. Between the points seconds are linear in both; beyond
them they go on as between the last two. They never fall as a pass grows: where a timing says so, it is noise.

Without measurements an extra row costs 5 % of a pass of one row (3 to 6 % measured on CPUs for 135M parameters), and a pass
of the drafter 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec_triton._upload import upload
from specdec_triton.sampling import MAX_DRAFT_TOKENS

ROW_COST, DRAFT_COST = 0.05, 0.1  # guesses: shares of a pass of one row
PROBING = 0.005  # of the time
_DOUBT = 2.0  # the next draft is less likely than those before it, and a pass is worth more than one token already
_SHORTEST_WAIT = 8.0  # a row that seems free may not be so on top of others


class Curve(NamedTuple):
    """What a round of n requests costs.

    Attributes:
        target: float32 ``[n*63+1]``, seconds of a pass of the target with 0, 1, ... rows beyond one a request.
        draft: float32 ``[]``, seconds of a drafting pass: one more draft for each request.
        wait: rounds between probes, drafts of one token to see whether drafting pays again, that spend ``PROBING`` of the
            time; infinite if not even drafts that are always right would pay.
        worth: the chance that a request's drafts are all right from which on one more is worth what it takes.
    """

    target: torch.Tensor
    draft: torch.Tensor
    wait: float
    worth: float = 0.0


class CostModel:
    """Seconds of passes; does not change.

    Args:
        target: seconds by (requests, drafts of all of them); empty: a guess, in passes of one row.
        draft: seconds of a drafting pass by number of requests; empty: drafts are free; None: a guess.
        device: of the curves.
    """

    def __init__(
        self,
        target: Mapping[tuple[int, int], float] | None = None,
        draft: Mapping[int, float] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.target = dict(sorted((target or {}).items()))
        self.draft = None if draft is None else dict(sorted(draft.items()))
        self._device = torch.device(device)
        self._curves: dict[int, Curve] = {}

    def covers(self, slots: int) -> bool:
        """Whether batches of that size have been measured."""
        return max((n for n, _ in self.target), default=0) >= slots

    def merged(self, other: CostModel | None) -> CostModel:
        """With what the other measured and this one did not."""
        if other is None:
            return self
        draft = None if self.draft is None else {**(other.draft or {}), **self.draft}
        return CostModel({**other.target, **self.target}, draft, device=self._device)

    def curve(self, n: int) -> Curve:
        """The costs of a round of n requests; made once for each n."""
        if n not in self._curves:
            target = self._target_seconds(n, np.arange(n * MAX_DRAFT_TOKENS + 1))
            draft = self._draft_seconds(n)
            self._curves[n] = Curve(
                upload(torch.from_numpy(target), torch.float32, self._device),
                upload(torch.tensor(draft), torch.float32, self._device),
                usual_wait(n, target, draft),
                float(_DOUBT * (draft + target[n] - target[0]) / target[0]),
            )
        return self._curves[n]

    def _target_seconds(self, n: int, drafts: np.ndarray) -> np.ndarray:
        """Seconds of passes of n requests with ``drafts`` ``[X]`` drafts in all, ascending."""
        if not self.target:
            return 1 + ROW_COST * (n + drafts - 1)
        batches = sorted({batch for batch, _ in self.target})
        by_batch = []
        for batch in batches:
            points = [(count, seconds) for (of, count), seconds in self.target.items() if of == batch]
            by_batch.append(_interpolate(drafts, *zip(*points, strict=True)))
        return _growing(_interpolate(n, batches, _growing(by_batch)))

    def _draft_seconds(self, n: int) -> float:
        if self.draft is None:
            return DRAFT_COST * float(self._target_seconds(1, np.zeros(1))[0])
        return float(_interpolate(n, list(self.draft), _growing(list(self.draft.values())))) if self.draft else 0.0


def usual_wait(n: int, target: np.ndarray, draft: float) -> float:
    """``Curve.wait``, if each of the n requests is probed by itself, in rounds of its own."""
    extra = np.arange(len(target))
    best = (n + extra) / (target + np.ceil(extra / n) * draft)  # tokens a second if every draft is right
    if best.max() <= best[0]:
        return math.inf
    return max(float((target[n] - target[0] + n * draft) / target[0]) / PROBING, _SHORTEST_WAIT)


def _growing(values: Any) -> np.ndarray:
    return np.maximum.accumulate(np.asarray(values), axis=0)


def _interpolate(at: Any, points: Sequence[float], values: Any) -> np.ndarray:
    """Piecewise linear through (points, values), beyond the ends as between the last two points.

    Args:
        at: a number or ``[X]``. points: P of them, ascending. values: ``[P]``, or for a number ``at`` also ``[P,X]``.
    """
    known, values = np.asarray(points), np.asarray(values)
    if len(known) == 1:
        return values[np.zeros_like(at, dtype=int)]
    right = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
    part = (at - known[right - 1]) / (known[right] - known[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])
