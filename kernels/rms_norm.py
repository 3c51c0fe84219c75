"""``rms_norm``: RMS norms of rows, with the sum that comes before one or after it in the same launch.

    out = x / sqrt(mean(x^2) + eps) * w         w: the weight, or 1 + the weight
    before: x is first replaced by x + residual, rounded, which is written too
    after:  out is rounded, and the residual added to it

Grid ``(R,)``: one program a row (in the interpreter for several). Lane j adds the squares of elements j, j + BLOCK_H, ... in fp32; then
the lanes are added by a tree whose shape is the binary's. A row of up to BLOCK_H elements stays in registers between its two
uses; a longer one is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, even_rows, norm_config, on_device
from specdec_triton.kernels._primitives import narrow, widen


@triton.jit
def _normed_input(
    x_row, residual_row, sum_row, inside, lane, dtype: tl.constexpr, BEFORE: tl.constexpr, STORES: tl.constexpr
):
    """A block of the rows that are normed, in fp32: of x, or of its rounded sum with the residual."""
    x = widen(tl.load(x_row + lane, mask=inside, other=0.0)).to(tl.float32)
    if BEFORE:
        residual = widen(tl.load(residual_row + lane, mask=inside, other=0.0)).to(tl.float32)
        total = narrow(x + residual, dtype)
        if STORES:
            tl.store(sum_row + lane, total, mask=inside)
        x = widen(total).to(tl.float32)
    return x


@triton.jit
def _store_normed(
    out_row, x, inverse, weight_ptr, residual_row, inside, lane, width,
    dtype: tl.constexpr, ADD_ONE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    weight = widen(tl.load(weight_ptr + lane, mask=lane < width, other=0.0)).to(tl.float32)
    if ADD_ONE:
        weight += 1.0
    out = narrow(x * inverse * weight, dtype)
    if AFTER:
        residual = widen(tl.load(residual_row + lane, mask=inside, other=0.0)).to(tl.float32)
        out = narrow(residual + widen(out).to(tl.float32), dtype)
    tl.store(out_row + lane, out, mask=inside)


@triton.jit(do_not_specialize=["rows", "group"])
def _rms_norm_kernel(
    out_ptr,  # [R,H]
    sum_ptr,  # [R,H] with BEFORE
    x_ptr,  # [R,H], row r at r // group * stride_x_group + r % group * stride_x_row
    weight_ptr,  # [H]
    residual_ptr,  # [R,H] with BEFORE or AFTER
    rows,  # R
    group,
    width,  # H
    eps,
    stride_x_group,
    stride_x_row,
    stride_residual_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK_H >= H
    ADD_ONE: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    lane = tl.arange(0, BLOCK_H)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x_row = x_ptr + row // group * stride_x_group + row % group * stride_x_row
    out_row, sum_row, residual_row = out_ptr + row * width, out_ptr, out_ptr
    if BEFORE:
        sum_row = sum_ptr + row * width
    if BEFORE or AFTER:
        residual_row = residual_ptr + row * stride_residual_row
    if WHOLE:
        inside = (row < rows) & (lane < width)
        x = _normed_input(x_row, residual_row, sum_row, inside, lane, dtype, BEFORE, True)
        squares = x * x
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
        for first in range(0, width, BLOCK_H):
            inside = (row < rows) & (first + lane < width)
            x = _normed_input(x_row, residual_row, sum_row, inside, first + lane, dtype, BEFORE, True)
            squares += x * x
    mean = tl.div_rn(tl.sum(squares, 1), tl.full([BLOCK_ROWS], width, tl.float32))
    inverse = tl.div_rn(tl.full([BLOCK_ROWS], 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
    if WHOLE:
        _store_normed(out_row, x, inverse, weight_ptr, residual_row, inside, lane, width, dtype, ADD_ONE, AFTER)
    else:
        for first in range(0, width, BLOCK_H):
            at = first + lane
            inside = (row < rows) & (at < width)
            x = _normed_input(x_row, residual_row, sum_row, inside, at, dtype, BEFORE, False)
            _store_normed(out_row, x, inverse, weight_ptr, residual_row, inside, at, width, dtype, ADD_ONE, AFTER)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add_one: bool,
    residual: torch.Tensor | None,
    residual_after: bool,
) -> list[torch.Tensor]:
    """The normed rows, and with a residual before the norm their sum; see ``specdec_triton.ops.rms_norm``."""
    width, before = x.shape[-1], residual is not None and not residual_after
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(1 + before)]
    rows = x.numel() // width
    if rows == 0:
        return out
    config = norm_config(width, chip_of(x.device))
    x, group, stride_group, stride_row = _groups_of_rows(x)
    if residual is not None:
        residual = even_rows(residual.reshape(-1, width))
    with on_device(x):
        _rms_norm_kernel[(triton.cdiv(rows, config.block_rows),)](
            out[0],
            out[-1] if before else None,
            x,
            weight,
            residual,
            rows,
            group,
            width,
            eps,
            stride_group,
            stride_row,
            0 if residual is None else residual.stride(0),
            BLOCK_ROWS=config.block_rows,
            BLOCK_H=config.block_d,
            WHOLE=config.block_d >= width,
            ADD_ONE=add_one,
            BEFORE=before,
            AFTER=residual_after,
            num_warps=config.num_warps,
            **EXACT,
        )
    return out


def _groups_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """``[...,H]`` as groups of rows: the tensor, rows of a group, strides of groups and of rows.

    The heads of a packed product lie so, and need no copy. As with ``even_rows``, H alone decides on the facts that Triton compiles for.
    """
    width = x.shape[-1]
    if x.dim() >= 3 and width % 16 == 0:
        x = x.flatten(0, -3)
        strides = [width if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
        if x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides):
            return x, x.shape[1], *strides
    x = even_rows(x.reshape(-1, width))
    return x, 1, x.stride(0), x.stride(0)
