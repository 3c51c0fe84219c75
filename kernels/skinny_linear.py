"""``skinny_linear``: a linear layer in which a row's bits do not depend on how many rows there are, nor on its place.

    out[m, n] = sum_k x[m, k] weight[n, k] + bias[n] + residual[m, n]      in fp32, rounded once

Grid ``(row tiles, column tiles, splits)``. A program multiplies BLOCK_M rows by BLOCK_N rows of the weight and walks over K in
blocks. Passes of up to BLOCK_M rows, which decoding and verifying are made of, read the weight once; where there are more, the
row tiles of one block of the weight are neighbours in the grid, so that the chip's cache serves all but the first of them.

Where N has too few tiles to keep the chip busy and K is long, K is cut into SPLITS parts by N, K and the chip, never by M. Their fp32
sums are written, and a second kernel, one program for a row and up to 1024 of its columns, adds them in order.

Bits: one binary for every M, and in it a row meets the same tiles in the same order (kernels/README.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, chip_of, even_rows, linear_config, on_device, product_options
from specdec_triton.kernels._primitives import narrow, product, widen

_COLUMNS = 1024  # of an adding program


@triton.jit(do_not_specialize=["rows"])
def _skinny_linear_kernel(
    out_ptr,  # [M,N]; with several splits fp32 [splits,M,N]
    x_ptr,  # [M,K]
    weight_ptr,  # [N,K]
    bias_ptr,  # [N]; with several splits None
    residual_ptr,  # [M,N]; with several splits None
    rows,  # M
    columns,  # N
    width,  # K
    stride_x_row,
    stride_weight_column,
    stride_weight_lane,
    stride_residual_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    split = tl.program_id(2)
    blocks = tl.cdiv(width, BLOCK_K)
    share = tl.cdiv(blocks, SPLITS)
    inside = (row < rows) & (column < columns)
    # Asked for before the product, which does not wait for them.
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual_row + column, mask=inside, other=0.0)
    acc = product(
        x_ptr + row * stride_x_row, weight_ptr + column * stride_weight_column, row < rows, column < columns,
        split * share, tl.minimum(split * share + share, blocks), width, stride_weight_lane, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += widen(bias).to(tl.float32)
    if HAS_RESIDUAL:
        acc += widen(residual).to(tl.float32)
    out = out_ptr + (split.to(tl.int64) * rows + row) * columns + column
    tl.store(out, narrow(acc, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_splits_kernel(
    out_ptr,  # [M,N]
    partial_ptr,  # fp32 [splits,M,N]
    bias_ptr,  # [N]
    residual_ptr,  # [M,N]
    rows,  # M
    columns,  # N
    stride_residual_row,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < columns
    acc = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + (row + split * rows) * columns + column, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += widen(tl.load(bias_ptr + column, mask=mask, other=0.0)).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * stride_residual_row + column
        acc += widen(tl.load(residual, mask=mask, other=0.0)).to(tl.float32)
    tl.store(out_ptr + row * columns + column, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """``[M,N]`` in x's dtype; see ``specdec_triton.ops.skinny_linear``."""
    (rows, width), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    chip = chip_of(x.device)
    config = linear_config(columns, width, x.dtype, chip)
    x = even_rows(x)
    residual = None if residual is None else even_rows(residual)
    stride_residual_row = 0 if residual is None else residual.stride(0)
    whole = config.splits == 1
    sums = out if whole else torch.empty(config.splits, rows, columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _skinny_linear_kernel[(triton.cdiv(rows, config.block_m), triton.cdiv(columns, config.block_n), config.splits)](
            sums,
            x,
            weight,
            bias if whole else None,
            residual if whole else None,
            rows,
            columns,
            width,
            x.stride(0),
            *weight.stride(),
            stride_residual_row,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLITS=config.splits,
            HAS_BIAS=whole and bias is not None,
            HAS_RESIDUAL=whole and residual is not None,
            **product_options(config, x.dtype, chip),
        )
        if not whole:
            block_n = min(triton.next_power_of_2(columns), _COLUMNS)
            _add_splits_kernel[(rows, triton.cdiv(columns, block_n))](
                out,
                sums,
                bias,
                residual,
                rows,
                columns,
                stride_residual_row,
                BLOCK_N=block_n,
                SPLITS=config.splits,
                HAS_BIAS=bias is not None,
                HAS_RESIDUAL=residual is not None,
                num_warps=4,
                **EXACT,
            )
    return out
