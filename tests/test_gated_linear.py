"""``gated_linear``: bit for bit a product and then an activation, in one launch, with a row's bits its own for every M."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

OP = "gated_linear"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}

# name: M, I, K, bias
CASES = {
    "one-row": (1, 32, 64, False),
    "odd": (5, 49, 33, True),
    "row-tiles": (70, 33, 40, True),
    "column-tiles": (3, 100, 64, False),
    "blocks-of-k": (4, 17, 300, True),
    "one-output": (20, 1, 40, True),
    "one-input": (3, 9, 1, False),
}
LAYOUTS = {"linear": lambda weight: weight, "conv1d": lambda weight: weight.t().contiguous().t()}


def problem(rows, outputs, width, has_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(2 * outputs, width, generator=generator) * width**-0.5
    bias = torch.randn(2 * outputs, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None


def as_on(chip):
    """The configuration of a chip of the table; None: the interpreter's own."""
    if chip is None:
        return nullcontext()
    from specdec_triton.kernels._config import CHIPS, pretend

    return pretend(CHIPS[chip])


def one_after_the_other(x, weight, bias, activation, backend):
    return ops.gated_mlp_activation(
        ops.skinny_linear(x, weight, bias, backend=backend), activation=activation, backend=backend
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_product_and_activation(case, dtype, layout, backend):
    """Bit for bit; and at most twice as far from fp64 as PyTorch in the same dtype."""
    x, weight, bias = problem(*case, dtype)
    weight = layout(weight)
    with poisoned_outputs():
        out = ops.gated_linear(x, weight, bias, backend=backend)
    assert torch.equal(out, one_after_the_other(x, weight, bias, "silu", backend))
    wide = (None if t is None else t.double() for t in (x, weight, bias))
    (gate, up), (wide_gate, wide_up) = F.linear(x, weight, bias).chunk(2, -1), F.linear(*wide).chunk(2, -1)
    plain, truth = F.silu(gate) * up, F.silu(wide_gate) * wide_up
    assert (out.shape, out.dtype) == (plain.shape, dtype)
    allowed = 2 * float((plain.double() - truth).abs().max())
    assert float((out.double() - truth).abs().max()) <= allowed


@needs_kernel
@pytest.mark.parametrize("chip", ["sm_86", "sm_90", "gfx942"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_chips(dtype, activation, chip):
    """Narrow tiles, of eight gates and eight ups."""
    x, weight, bias = problem(*CASES["odd"], dtype)
    with as_on(chip), poisoned_outputs(), counted() as traffic:
        out = ops.gated_linear(x, weight, bias, activation=activation, backend="triton")
        want = one_after_the_other(x, weight, bias, activation, "triton")
    assert torch.equal(out, want)
    assert traffic["_gated_linear_kernel"].grid == (1, 7, 1)


@needs_kernel
def test_long_inputs_are_not_split():
    """Where ``skinny_linear`` would: one launch, and the sum in K's order."""
    x, weight, bias = problem(2, 5, 4200, True, torch.float32)
    with as_on("sm_90"), counted() as traffic:
        out = ops.gated_linear(x, weight, bias, backend="triton")
        one_after_the_other(x, weight, bias, "silu", "triton")
    assert traffic["_skinny_linear_kernel"].grid[2] == 2
    assert (traffic["_gated_linear_kernel"].launches, traffic["_gated_linear_kernel"].grid) == (1, (1, 1, 1))
    assert torch.equal(out, ops.gated_linear(x, weight, bias, backend="triton"))  # in wider tiles too


@needs_kernel
@pytest.mark.parametrize("chip", [None, "sm_90"], ids=["interpreter", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_other_rows(dtype, chip):
    """One row, two, a row tile and more, in any order; I beyond a column tile."""
    x, weight, bias = problem(70, 37 if chip is None else 9, 200, True, dtype)
    with as_on(chip):
        want = ops.gated_linear(x, weight, bias, backend="triton")
        for rows in ([0], [69], [64, 1, 63, 0, 2], list(range(69, -1, -1)), slice(0, 1), slice(65, 66), slice(5, 70)):
            assert torch.equal(ops.gated_linear(x[rows], weight, bias, backend="triton"), want[rows]), rows


@needs_kernel
@pytest.mark.parametrize("case", [(5, 49, 33, True), (40, 65, 200, False)], ids=["odd", "tiles"])
def test_reads_the_weight_once(case):
    """x once for each tile of gates and ups; nothing but the outputs is written."""
    x, weight, bias = problem(*case, torch.bfloat16)
    with counted() as traffic:
        ops.gated_linear(x, weight, bias, backend="triton")
    assert list(traffic) == ["_gated_linear_kernel"]
    mine = traffic["_gated_linear_kernel"]
    assert mine.launches == 1
    assert mine.loaded["weight_ptr"] == mine.distinct("weight_ptr") == weight.nbytes
    assert mine.loaded["bias_ptr"] == (0 if bias is None else bias.nbytes)
    assert mine.loaded["x_ptr"] == x.nbytes * mine.grid[1]
    assert mine.grid[1] == -(-2 * case[1] // 64)
    assert mine.stored["out_ptr"] == case[0] * case[1] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(dtype, backend):
    """Rows apart, a weight and a bias inside others; guards around all of them."""
    x, weight, bias = problem(5, 20, 33, True, dtype)
    want = ops.gated_linear(x, weight, bias, backend=backend)
    views = guarded(x, padding=7), guarded(weight, padding=2), guarded(bias)
    with poisoned_outputs():
        assert torch.equal(ops.gated_linear(*views, backend=backend), want)
    assert_guards(*views)


def test_weight_beyond_2_to_the_31_elements(backend):
    """Offsets are 64-bit (faults.md F1): rows 2^27 elements apart, of which only the pages that are touched take memory."""
    weight = torch.empty(20, 1 << 27, dtype=torch.float16)[:, :20]
    weight.copy_(torch.randn(20, 20))
    x = torch.randn(3, 20).half()
    out = ops.gated_linear(x, weight, backend=backend)
    assert torch.equal(out, ops.gated_linear(x, weight.contiguous(), backend=backend))


def test_no_rows(backend):
    assert ops.gated_linear(torch.zeros(0, 4), torch.zeros(6, 4), torch.zeros(6), backend=backend).shape == (0, 3)


def good():
    """Arguments that fit; each case below spoils one."""
    return {"x": torch.ones(5, 4), "weight": torch.ones(6, 4), "bias": torch.ones(6)}


BAD = {
    "x-rank": ("x", {"x": torch.ones(1, 5, 4)}),
    "x-integer": ("x", {"x": torch.ones(5, 4).int()}),
    "x-no-inputs": ("x", {"x": torch.ones(5, 0), "weight": torch.ones(6, 0)}),
    "weight-width": ("weight", {"weight": torch.ones(6, 5)}),
    "weight-odd": ("weight", {"weight": torch.ones(5, 4), "bias": torch.ones(5)}),
    "weight-dtype": ("weight", {"weight": torch.ones(6, 4).half()}),
    "weight-strides": ("weight", {"weight": torch.ones(12, 8)[::2, ::2]}),
    "weight-no-outputs": ("weight", {"weight": torch.ones(0, 4), "bias": torch.ones(0)}),
    "bias-size": ("bias", {"bias": torch.ones(3)}),
    "bias-dtype": ("bias", {"bias": torch.ones(6).half()}),
    "activation": ("activation", {"activation": "relu"}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.gated_linear(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.gated_linear(**good())
    ops.gated_linear(**{**good(), "bias": None, "weight": torch.ones(4, 6).t()}, activation="gelu")


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_opcheck(has_bias):
    x, weight, bias = problem(3, 5, 4, has_bias, torch.float32)
    torch.library.opcheck(torch.ops.specdec.gated_linear.default, (x, weight, bias, "gelu_tanh", "torch"))


def test_runs_on_meta():
    out = ops.gated_linear(**{name: x.to("meta").half() for name, x in good().items()})
    assert (out.shape, out.dtype, out.device.type) == ((5, 3), torch.float16, "meta")
