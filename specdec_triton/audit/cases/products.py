"""Linear layers, and means of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import INT, LAYERS, Case, Size, meta, name_of, parameters
from specdec_triton.audit.traffic import Traffic

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

# Rows of a product are B * T.
PASSES = (Size(8, 5, 0), Size(1, 1, 0), Size(1, 5, 0), Size(1, 8, 0), Size(3, 1, 0), Size(64, 8, 0), Size(4, 600, 0))
ROWS = PASSES[0].batch * PASSES[0].steps  # whose traffic is shown

# B requests with T positions; T - 1 <= 7, up to which one binary decides.
_HEAD_PASSES = (Size(8, 5, 0), Size(1, 1, 0), Size(1, 5, 0), Size(1, 8, 0), Size(3, 1, 0), Size(64, 8, 0))


def cases() -> list[Case]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        *(_linear(model, layer, bf16) for model in LAYERS for layer in LAYERS[model] if model != "gpt2"),
        *(_linear("llama3-8b", layer, dtype) for dtype in (fp16, fp32) for layer in ("kv", "gate", "down", "head")),
        *(_linear("smollm2-135m", layer, dtype) for dtype in (fp16, fp32) for layer in LAYERS["smollm2-135m"]),
        *(_linear("qwen3-0.6b", layer, bf16, has_bias=True) for layer in ("q", "o")),
        *(_linear("gpt2", "qkv", dtype, has_bias=True, transposed=True) for dtype in (bf16, fp32)),
        *(_linear("gpt2", "head", dtype) for dtype in (bf16, fp16, fp32)),
        *(_linear("llama3-8b", "down", dtype, has_residual=True) for dtype in (bf16, fp32)),
        _linear("smollm2-135m", "down", bf16, has_residual=True),
        _linear("qwen3-0.6b", "o", fp16, has_bias=True, has_residual=True),
        *(_gated(model, bf16, "silu") for model in ("llama3-8b", "qwen3-0.6b", "smollm2-135m")),
        *(_gated("gemma3-4b", dtype, "gelu_tanh") for dtype in (bf16, fp16, fp32)),
        *(_gated("smollm2-135m", dtype, "gelu", has_bias=True) for dtype in (fp16, fp32)),
        *(_head("llama3-8b", bf16, method) for method in ("greedy", "coupled", "rejection")),
        *(_head(model, bf16, "rejection") for model in ("qwen3-0.6b", "gemma3-4b", "smollm2-135m", "gpt2")),
        _head("gemma3-4b", bf16, "greedy", softcap=30.0, scale=0.5),
        _head("gpt2", bf16, "coupled", has_bias=True, softcap=30.0, scale=0.5),
        _head("llama3-8b", fp16, "rejection", has_bias=True),
        *(_head("smollm2-135m", fp32, method) for method in ("greedy", "rejection")),
        _sample_head("llama3-8b", bf16, None),
        _sample_head("smollm2-135m", fp16, 0),
        *(_mean(width, bf16) for width in (128, 576, 4096)),
        *(_mean(width, fp32) for width in (128, 576, 4096, 14336)),
    ]


def _linear(
    model: str,
    layer: str,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    has_residual: bool = False,
    transposed: bool = False,
) -> Case:
    n, k = LAYERS[model][layer]

    def call(size: Size) -> None:
        rows = size.batch * size.steps
        weight = meta(k, n, dtype=dtype).t() if transposed else meta(n, k, dtype=dtype)
        bias, residual = (
            meta(n, dtype=dtype) if has_bias else None,
            meta(rows, n, dtype=dtype) if has_residual else None,
        )
        ops.skinny_linear(meta(rows, k, dtype=dtype), weight, bias, residual=residual, backend="triton")

    def moved(chip: Chip) -> Traffic:
        given = {"bias": has_bias, "residual": has_residual}
        return traffic.skinny_linear(ROWS, n, k, dtype.itemsize, _tiles(n, k, dtype, chip), **given)

    marks = {" bias": has_bias, " residual": has_residual, " transposed": transposed}
    kind = name_of(dtype) + "".join(mark for mark, holds in marks.items() if holds)
    quick = model == "llama3-8b" and layer in ("kv", "gate") and dtype == torch.bfloat16
    return Case("skinny_linear", f"{model} {layer} {kind}", call, moved, PASSES, dtype != torch.float32, quick)


def _gated(model: str, dtype: torch.dtype, activation: str, *, has_bias: bool = False) -> Case:
    outputs, k = LAYERS[model]["gate"]

    def call(size: Size) -> None:
        x, weight = meta(size.batch * size.steps, k, dtype=dtype), meta(2 * outputs, k, dtype=dtype)
        bias = meta(2 * outputs, dtype=dtype) if has_bias else None
        ops.gated_linear(x, weight, bias, activation=activation, backend="triton")

    def moved(chip: Chip) -> Traffic:
        tiles = _tiles(2 * outputs, k, dtype, chip)
        return traffic.gated_linear(ROWS, outputs, k, dtype.itemsize, tiles, bias=has_bias)

    quick = model == "llama3-8b"
    name = f"{model} {activation} {name_of(dtype)}" + (" bias" if has_bias else "")
    return Case("gated_linear", name, call, moved, PASSES, dtype != torch.float32, quick)


def _tiles(n: int, k: int, dtype: torch.dtype, chip: Chip) -> traffic.LinearTiles:
    from specdec_triton.kernels._config import linear_config

    config = linear_config(n, k, dtype, chip)
    return traffic.LinearTiles(config.block_m, config.block_n, config.splits)


def _head(
    model: str,
    dtype: torch.dtype,
    method: str,
    *,
    has_bias: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Case:
    n, k = LAYERS[model]["head"]

    def call(size: Size) -> None:
        bias = meta(n, dtype=dtype) if has_bias else None
        drafts = meta(size.batch, size.steps - 1, dtype=torch.int64)
        ops.verify_head(
            meta(size.batch, size.steps, k, dtype=dtype), meta(n, k, dtype=dtype), drafts, bias=bias, scale=scale, softcap=softcap,
            draft_lens=meta(size.batch, dtype=INT), params=parameters(size.batch), method=method, backend="triton",
        )  # fmt: skip

    steps = (scale is not None) + (softcap is not None)
    kind = f"{name_of(dtype)} {method}" + (" bias" if has_bias else "") + (" scale, softcap" if steps else "")
    quick = model == "llama3-8b" and method == "rejection" and dtype == torch.bfloat16
    moved = _moved_by_head(_HEAD_PASSES[0].batch, _HEAD_PASSES[0].steps, n, k, dtype, has_bias, method)
    return Case("verify_head", f"{model} {kind}", call, moved, _HEAD_PASSES, dtype != torch.float32, quick)


def _sample_head(model: str, dtype: torch.dtype, node: int | None) -> Case:
    n, k = LAYERS[model]["head"]

    def call(size: Size) -> None:
        x, weight = meta(size.batch, k, dtype=dtype), meta(n, k, dtype=dtype)
        ops.sample_head(x, weight, params=parameters(size.batch), node=node, return_lse=True, backend="triton")

    kind = f"{name_of(dtype)} {'race' if node is None else 'draft'}"
    moved = _moved_by_head(_HEAD_PASSES[0].batch, 1, n, k, dtype, False, "coupled")
    return Case("sample_head", f"{model} {kind}", call, moved, _HEAD_PASSES)


def _moved_by_head(
    batch: int, steps: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, method: str
) -> Callable[[Chip], Traffic]:
    def moved(chip: Chip) -> Traffic:
        from specdec_triton.kernels._config import head_config, head_part

        config = head_config(n, k, dtype, chip, races=method != "greedy")
        tiles = traffic.HeadTiles(config.block_m, config.block_n, head_part(n))
        return traffic.verify_head(batch * steps, n, k, dtype.itemsize, tiles, bias=has_bias)

    return moved


def _mean(width: int, dtype: torch.dtype) -> Case:
    def call(size: Size) -> None:
        ops.row_mean(meta(size.batch * size.steps, width, dtype=dtype), backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.row_mean(ROWS, width, dtype.itemsize)

    quick = width == 4096 and dtype == torch.float32
    return Case("row_mean", f"D = {width} {name_of(dtype)}", call, moved, PASSES, quick=quick)
