"""``gated_linear``: the first half of a gated MLP, product and activation in one launch.

    out[m, i] = act(gate) * up,   gate = x[m] weight[i] + bias[i],   up = x[m] weight[I + i] + bias[I + i],   both rounded

Grid ``(row tiles, column tiles)``. It is ``skinny_linear``'s product, with the columns in another order: the tile of a program
holds the gate's and the up's column of BLOCK_N / 2 outputs side by side (gate i, up i, gate i + 1, ...), which the accumulator
of a matrix instruction has in one thread. x is read once for both.

Bits: those of ``skinny_linear`` (where that does not split K) and ``gated_mlp_activation`` after it: the same tile, the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import chip_of, even_rows, linear_config, on_device, product_options
from specdec_triton.kernels._primitives import gated, narrow, product, widen


@triton.jit(do_not_specialize=["rows"])
def _gated_linear_kernel(
    out_ptr,  # [M,I]
    x_ptr,  # [M,K]
    weight_ptr,  # [2I,K]
    bias_ptr,  # [2I]
    rows,  # M
    columns,  # I
    width,  # K
    stride_x_row,
    stride_weight_column,
    stride_weight_lane,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    first = tl.program_id(1) * (BLOCK_N // 2)
    lane = tl.arange(0, BLOCK_N)
    output = first + lane // 2
    column = (output + lane % 2 * columns).to(tl.int64)[None, :]
    exists = (output < columns)[None, :]
    x_row, weight_column = x_ptr + row * stride_x_row, weight_ptr + column * stride_weight_column
    acc = product(
        x_row, weight_column, row < rows, exists, 0, tl.cdiv(width, BLOCK_K), width, stride_weight_lane,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += widen(tl.load(bias_ptr + column, mask=exists, other=0.0)).to(tl.float32)
    rounded = widen(narrow(acc, out_ptr.dtype.element_ty)).to(tl.float32)
    gate, up = tl.split(tl.reshape(rounded, [BLOCK_M, BLOCK_N // 2, 2]))
    output = first + tl.arange(0, BLOCK_N // 2)[None, :]
    out = narrow(gated(gate, up, ACTIVATION), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + output, out, mask=(row < rows) & (output < columns))


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``[M,I]`` in x's dtype; see ``specdec_triton.ops.gated_linear``."""
    (rows, width), columns = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    chip = chip_of(x.device)
    config = linear_config(2 * columns, width, x.dtype, chip)
    x = even_rows(x)
    with on_device(x):
        _gated_linear_kernel[(triton.cdiv(rows, config.block_m), triton.cdiv(2 * columns, config.block_n))](
            out,
            x,
            weight,
            bias,
            rows,
            columns,
            width,
            x.stride(0),
            *weight.stride(),
            ACTIVATION=activation,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            HAS_BIAS=bias is not None,
            **product_options(config, x.dtype, chip),
        )
    return out
