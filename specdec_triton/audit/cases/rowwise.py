"""What lies between a layer's products: norms with their sums, gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import Case, Size, meta, name_of
from specdec_triton.audit.cases.products import PASSES, ROWS
from specdec_triton.audit.traffic import Traffic

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip


def cases() -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        *(_norm(width, bf16, form) for width in (576, 4096) for form in ("", "before", "after")),
        *(_norm(width, fp32, "before") for width in (576, 8192)),
        *(_norm(5376, fp16, form, weight=fp32, add_one=True) for form in ("before", "after")),
        *(_norm(16384, dtype, "before") for dtype in (bf16, fp32)),
        *(_heads(dim, bf16) for dim in (64, 128, 256)),
        *(_activation(outputs, dtype, "silu") for outputs in (1536, 14336) for dtype in (bf16, fp32)),
        *(_activation(10240, bf16, activation) for activation in ("gelu_tanh", "gelu")),
    ]


def _norm(
    width: int, dtype: torch.dtype, form: str, *, weight: torch.dtype | None = None, add_one: bool = False
) -> Case:
    weight = weight or dtype
    after = form == "after"

    def call(size: Size) -> None:
        x, other = (meta(size.batch * size.steps, width, dtype=dtype) for _ in range(2))
        residual = other if form else None
        ops.rms_norm(
            x, meta(width, dtype=weight), add_one=add_one, residual=residual, residual_after=after, backend="triton"
        )

    def moved(chip: Chip) -> Traffic:
        from specdec_triton.kernels._config import norm_config

        block = norm_config(width, chip).block_d
        sums = {"residual": bool(form), "after": after}
        return traffic.rms_norm(ROWS, width, dtype.itemsize, weight.itemsize, block=block, **sums)

    name = f"H = {width} {name_of(dtype)}" + (f", sum {form}" if form else "")
    return Case("rms_norm", name, call, moved, PASSES, quick=(width, form) == (4096, "before"))


def _heads(dim: int, dtype: torch.dtype) -> Case:
    """The 32 query heads beside 8 keys and 8 values in a packed product."""

    def call(size: Size) -> None:
        heads = meta(size.batch * size.steps, 48, dim, dtype=dtype)[:, :32]
        ops.rms_norm(heads, meta(dim, dtype=dtype), backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.rms_norm(32 * ROWS, dim, dtype.itemsize, dtype.itemsize, block=dim)

    return Case("rms_norm", f"heads, D = {dim} {name_of(dtype)}", call, moved, PASSES)


def _activation(outputs: int, dtype: torch.dtype, activation: str) -> Case:
    def call(size: Size) -> None:
        gate_up = meta(size.batch * size.steps, 2 * outputs, dtype=dtype)
        ops.gated_mlp_activation(gate_up, activation=activation, backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.gated_mlp_activation(ROWS, outputs, dtype.itemsize)

    quick = outputs == 14336 and dtype == torch.bfloat16
    name = f"I = {outputs} {activation} {name_of(dtype)}"
    return Case("gated_mlp_activation", name, call, moved, PASSES, quick=quick)
