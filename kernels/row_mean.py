"""``row_mean``: the mean of each row, its lanes added in an order that no other row changes.

Grid ``(R,)``: one program a row (in the interpreter for several). Lane j of the program adds the elements j, j + BLOCK_D, ... in
fp32; then the lanes are added by a tree whose shape is the binary's. PyTorch's own reduction shapes its tree by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, even_rows, mean_config, on_device
from specdec_triton.kernels._primitives import narrow, widen


@triton.jit(do_not_specialize=["rows"])
def _row_mean_kernel(
    out_ptr,  # [R]
    x_ptr,  # [R,D]
    rows,  # R
    width,  # D
    stride_x_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lane = tl.arange(0, BLOCK_D)[None, :]
    inside = row < rows
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for first in range(0, width, BLOCK_D):
        mask = inside[:, None] & (first + lane < width)
        x = tl.load(x_ptr + row[:, None] * stride_x_row + first + lane, mask=mask, other=0.0)
        total += widen(x).to(tl.float32)
    mean = tl.div_rn(tl.sum(total, 1), width.to(tl.float32))
    tl.store(out_ptr + row, narrow(mean, out_ptr.dtype.element_ty), mask=inside)


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """``[R]`` in x's dtype; see ``specdec_triton.ops.row_mean``."""
    rows, width = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    config = mean_config(width, chip_of(x.device))
    x = even_rows(x)
    with on_device(x):
        _row_mean_kernel[(triton.cdiv(rows, config.block_rows),)](
            out,
            x,
            rows,
            width,
            x.stride(0),
            BLOCK_ROWS=config.block_rows,
            BLOCK_D=config.block_d,
            num_warps=config.num_warps,
            **EXACT,
        )
    return out
