"""cos and sin of a pass as rewritten layers take them: made by the first layer that asks, used by all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_triton.fusion.structure import repeated
from specdec_triton.passes import Pass

_Tables = tuple[torch.Tensor, torch.Tensor]


class RopeTables:
    """Of one model; layers may have tables of several kinds (local and global ones, say)."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[torch.Tensor, _Tables]] = {}

    def signed(self, cos: torch.Tensor, sin: torch.Tensor) -> _Tables:
        """``[1,N,D]`` -> ``[N,1,D]``; sin with the sign that rotate-half gives the first half."""

        def make() -> _Tables:
            half = sin.shape[-1] // 2
            return cos[0, :, None], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]

        return self._of("signed", sin, make)

    def unpacked(self, cos: torch.Tensor, sin: torch.Tensor, p: Pass, rotation: str) -> _Tables:
        """``[1,N,R]`` -> ``[B,T,R]``, a factor for each lane."""

        def make() -> _Tables:
            tables = (repeated(x) if rotation == "repeated" else x for x in (cos[0], sin[0]))
            first, second = (p.unpack(x) for x in tables)
            return first, second

        return self._of(rotation, sin, make)

    def _of(self, kind: str, source: torch.Tensor, make: Callable[[], _Tables]) -> _Tables:
        known = self._made.get(kind)
        if known is None or known[0] is not source:
            known = self._made[kind] = (source, make())
        return known[1]
