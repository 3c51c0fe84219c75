"""``gated_mlp_activation``: ``act(gate) * up`` of rows that hold both halves, in fp32, rounded once.

Grid ``(rows, column blocks)``: element by element, so that no row knows of another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_triton.kernels._config import EXACT, activation_config, chip_of, even_rows, on_device
from specdec_triton.kernels._primitives import gated, narrow, widen


@triton.jit(do_not_specialize=["rows"])
def _gated_mlp_activation_kernel(
    out_ptr,  # [R,I]
    gate_up_ptr,  # [R,2I]
    rows,  # R
    columns,  # I
    stride_row,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    inside = (row < rows) & (column < columns)
    gate_row = gate_up_ptr + row * stride_row
    gate = widen(tl.load(gate_row + column, mask=inside, other=0.0)).to(tl.float32)
    up = widen(tl.load(gate_row + columns + column, mask=inside, other=0.0)).to(tl.float32)
    out = narrow(gated(gate, up, ACTIVATION), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + column, out, mask=inside)


def gated_mlp_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``[...,I]``; see ``specdec_triton.ops.gated_mlp_activation``."""
    columns = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], columns, dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // columns
    if rows == 0:
        return out
    config = activation_config(columns, chip_of(gate_up.device))
    gate_up = even_rows(gate_up.reshape(-1, 2 * columns))
    with on_device(gate_up):
        _gated_mlp_activation_kernel[(triton.cdiv(rows, config.block_rows), triton.cdiv(columns, config.block_d))](
            out,
            gate_up,
            rows,
            columns,
            gate_up.stride(0),
            ACTIVATION=activation,
            BLOCK_ROWS=config.block_rows,
            BLOCK_I=config.block_d,
            num_warps=config.num_warps,
            **EXACT,
        )
    return out
