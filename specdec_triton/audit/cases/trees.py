"""Judging drafted trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import INT, Case, Size, meta, name_of, parameters
from specdec_triton.audit.traffic import Traffic

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

_SMALL = (Size(8, 8, 0, 128256), Size(1, 2, 0, 151936), Size(16, 6, 0, 49152))
_LARGE = (Size(4, 64, 0, 128256), Size(1, 33, 0, 151936), Size(8, 60, 0, 49152))


def cases() -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        *(_accept(method, bf16, sizes) for method in ops.TREE_METHODS for sizes in (_SMALL, _LARGE)),
        *(_accept("rejection", dtype, sizes, drawn=True) for dtype in (bf16, fp32) for sizes in (_SMALL, _LARGE)),
        _accept("coupled", bf16, _SMALL, filters=True),
        _accept("rejection", bf16, _LARGE, drawn=True, filters=True),
        _accept("typical", fp32, _SMALL, filters=True),
    ]


def _accept(
    method: str, dtype: torch.dtype, sizes: tuple[Size, ...], *, drawn: bool = False, filters: bool = False
) -> Case:
    def call(size: Size) -> None:
        shape = (size.batch, size.steps, size.vocab)
        ops.accept_tree(
            meta(*shape[:2], dtype=torch.int64),
            meta(*shape, dtype=dtype),
            meta(*shape[:2], dtype=torch.int64),
            meta(*shape, dtype=dtype) if drawn else None,
            node_lens=meta(size.batch, dtype=INT),
            params=parameters(size.batch, has_filters=filters),
            method=method,
            backend="triton",
        )

    def moved(chip: Chip) -> Traffic:
        size = sizes[0]
        return traffic.accept_tree(
            size.batch,
            size.steps,
            size.vocab,
            dtype.itemsize,
            drawn=drawn and method == "rejection",
            filters=filters and method != "greedy",
        )

    kind = f"{name_of(dtype)} {method} N <= {8 if sizes is _SMALL else 64}" + ", drawn" * drawn + ", filters" * filters
    quick = kind in ("bf16 coupled N <= 64", "bf16 rejection N <= 64, drawn, filters")
    return Case("accept_tree", kind, call, moved, sizes, quick=quick)
