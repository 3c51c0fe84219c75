"""cos and sin of a pass as rewritten layers take them: made by the first layer that asks, kept with the pass for the others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_triton.fusion.structure import repeated
from specdec_triton.passes import Pass

_Tables = tuple[torch.Tensor, torch.Tensor]


def signed_tables(p: Pass, cos: torch.Tensor, sin: torch.Tensor) -> _Tables:
    """``[1,N,D]`` -> ``[N,1,D]``; sin with the sign that rotate-half gives the first half."""

    def make() -> _Tables:
        half = sin.shape[-1] // 2
        return cos[0, :, None], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]

    return _once(p, "signed", sin, make)


def unpacked_tables(p: Pass, cos: torch.Tensor, sin: torch.Tensor, rotation: str) -> _Tables:
    """``[1,N,R]`` -> ``[B,T,R]``, a factor for each lane."""

    def make() -> _Tables:
        tables = (repeated(x) if rotation == "repeated" else x for x in (cos[0], sin[0]))
        first, second = (p.unpack(x) for x in tables)
        return first, second

    return _once(p, rotation, sin, make)


def _once(p: Pass, kind: str, source: torch.Tensor, make: Callable[[], _Tables]) -> _Tables:
    """A model may have several tables, for local and global layers say."""
    key = kind, id(source)
    if key not in p.made:
        p.made[key] = source, make()  # with the source, whose id another tensor could get else
    tables: _Tables = p.made[key][1]
    return tables
