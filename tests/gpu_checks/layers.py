"""A layer's products, norms and means; a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_checks.common import DTYPES, add, call, no_host_reads, on_gpu
from specdec_triton import ops
from specdec_triton.testing import poisoned_outputs

# M, N, K, bias, whether the weight lies transposed
LINEAR = {
    "odd": (5, 97, 33, True, False),
    "conv1d": (8, 2304, 768, True, True),
    "splits": (40, 1024, 4096, False, False),
    "wide": (3, 50257, 768, False, False),
    "rows": (700, 1536, 576, True, False),
}
# M, outputs, K, bias
GATED = {"odd": (5, 49, 33, True), "wide": (5, 14336, 512, False), "rows": (70, 1536, 576, True)}


def layer(rows: int, n: int, k: int, has_bias: bool, transposed: bool, dtype: torch.dtype) -> tuple:
    x, weight, bias = (on_gpu(torch.randn(shape).to(dtype)) for shape in ((rows, k), (n, k), (n,)))
    return x, weight.t().contiguous().t() if transposed else weight, bias if has_bias else None


def check_rows_alone(op: Callable, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What ``op`` gives for the rows of the inputs; each row's bits are those of the row alone, wherever it was."""

    def rows_of(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with no_host_reads(), poisoned_outputs():
            out = op(*given)
        return out if isinstance(out, tuple) else (out,)

    whole, count = rows_of(inputs), len(inputs[0])
    for first, last in ((0, 1), (count - 1, count), (1, 3), (0, count // 2 + 1)):
        part = rows_of(tuple(x[first:last] for x in inputs))
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True)), (first, last)
    for copies in (8, 70):
        many = rows_of(tuple(x.repeat(copies, *[1] * (x.dim() - 1)).flip(0) for x in inputs))
        assert all(torch.equal(a[-count:].flip(0), b) for a, b in zip(many, whole, strict=True)), copies
    return whole


def assert_near(out: torch.Tensor, plain: Callable, *given: torch.Tensor | None, floor: float = 0.0) -> None:
    """At most twice as far from fp64 as ``plain`` in the inputs' dtypes, on the CPU."""
    cpu = [None if x is None else x.cpu() for x in given]
    truth = plain(*(None if x is None else x.double() for x in cpu))
    allowed = max(2 * float((plain(*cpu).double() - truth).abs().max()), floor)
    assert float((out.cpu().double() - truth).abs().max()) <= allowed


def check_linear(shape: tuple, dtype: torch.dtype) -> None:
    """With and without a residual."""
    x, weight, bias = layer(*shape, dtype)
    linear = torch.nn.functional.linear
    [out] = check_rows_alone(lambda x: ops.skinny_linear(x, weight, bias, backend="triton"), (x,))
    assert_near(out, linear, x, weight, bias)
    residual = on_gpu(torch.randn(out.shape).to(dtype) * shape[2] ** 0.5)
    [out] = check_rows_alone(
        lambda x, r: ops.skinny_linear(x, weight, bias, residual=r, backend="triton"), (x, residual)
    )
    assert_near(out, lambda x, w, b, r: linear(x, w, b) + r, x, weight, bias, residual)


def act(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def check_gated(shape: tuple, activation: str, dtype: torch.dtype) -> None:
    """In one launch the bits of product, then activation, as on every chip where ``skinny_linear`` does not split K."""
    rows, outputs, k, has_bias = shape
    x, weight, bias = layer(rows, 2 * outputs, k, has_bias, False, dtype)
    weight = (weight / k**0.5).to(dtype)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, -1)
        return act(gate, activation) * up

    given = {"activation": activation, "backend": "triton"}
    [out] = check_rows_alone(lambda x: ops.gated_linear(x, weight, bias, **given), (x,))
    assert_near(out, plain, x, weight, bias)
    gate_up = ops.skinny_linear(x, weight, bias, backend="triton")
    [two] = check_rows_alone(lambda y: ops.gated_mlp_activation(y, **given), (gate_up,))
    assert torch.equal(out, two)


def check_norm(width: int, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Alone, with a sum before it and after it; as heads of a packed product."""
    weight = on_gpu((1 + torch.randn(width) / 4).to(weight_dtype))
    x, residual = (on_gpu(torch.randn(40, width).to(dtype)) for _ in range(2))

    def plain(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight

    def norm(x: torch.Tensor, r: torch.Tensor | None = None, after: bool = False) -> Any:
        return ops.rms_norm(x, weight, residual=r, residual_after=after, backend="triton")

    floor = 1e-6 if dtype == torch.float32 else 0.0
    [out] = check_rows_alone(norm, (x,))
    assert_near(out, plain, x, weight, floor=floor)
    [summed] = check_rows_alone(lambda x, r: norm(x, r, True), (x, residual))
    assert torch.equal(summed, residual + out)
    normed, total = check_rows_alone(norm, (x, residual))
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))
    packed = on_gpu(torch.randn(6, 5, width).to(dtype))
    heads = call(ops.rms_norm, packed[:, 1:4], weight)
    assert torch.equal(heads, norm(packed[:, 1:4].reshape(-1, width)).view(heads.shape))


def check_mean(width: int, dtype: torch.dtype) -> None:
    x = on_gpu((torch.randn(200, width) + 0.5).to(dtype))
    out = call(ops.row_mean, x)
    truth = x.cpu().double().mean(1)
    allowed = max(2 * float((x.cpu().mean(1).double() - truth).abs().max()), 1e-6 if dtype == torch.float32 else 0.0)
    assert float((out.cpu().double() - truth).abs().max()) <= allowed
    for first, last in ((0, 1), (199, 200), (7, 12)):
        assert torch.equal(call(ops.row_mean, x[first:last]), out[first:last])


for _dtype, _type in DTYPES.items():
    for _name, _shape in LINEAR.items():
        add(f"linear-{_dtype}-{_name}", check_linear, _shape, _type)
    for _name, _gated in GATED.items():
        for _activation in ("silu", "gelu_tanh", "gelu"):
            add(f"gated-{_dtype}-{_name}-{_activation}", check_gated, _gated, _activation, _type)
    for _width in (1, 97, 128, 4096, 9000):
        add(f"norm-{_dtype}-{_width}", check_norm, _width, _type, _type)
        if _type != torch.float32:
            add(f"norm-{_dtype}-{_width}-fp32-weight", check_norm, _width, torch.float32, _type)
    for _width in (5, 128, 576, 5000):
        add(f"mean-{_dtype}-{_width}", check_mean, _width, _type)
