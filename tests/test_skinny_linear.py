"""``skinny_linear``: at most twice as far from fp64 as PyTorch's own layer, and a row's bits are its own for every M."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

OP = "skinny_linear"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# name: M, N, K, bias
CASES = {
    "one-row": (1, 64, 64, False),
    "odd": (5, 97, 33, True),
    "row-tiles": (70, 65, 40, True),
    "column-tiles": (3, 200, 64, False),
    "blocks-of-k": (4, 33, 300, True),
    "one-output": (3, 1, 40, True),
    "one-input": (3, 17, 1, False),
    "splits-on-a-chip": (5, 20, 8300, True),
}
LAYOUTS = {"linear": lambda weight: weight, "conv1d": lambda weight: weight.t().contiguous().t()}


def problem(rows, columns, width, has_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (columns, width), (columns,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias if has_bias else None


def residual_of(x, weight):
    """As large as the product."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(len(x), len(weight), generator=generator) * x.shape[1] ** 0.5).to(x.dtype)


def as_on(chip):
    """The configuration of a chip of the table; None: the interpreter's own."""
    if chip is None:
        return nullcontext()
    from specdec_triton.kernels._config import CHIPS, pretend

    return pretend(CHIPS[chip])


def plain_layer(x, weight, bias, residual):
    out = torch.nn.functional.linear(x, weight, bias)
    return out if residual is None else out + residual


def assert_near(out, *given):
    """``given``: x, weight, bias and a residual or none."""
    given = given if len(given) == 4 else (*given, None)
    plain, truth = plain_layer(*given), plain_layer(*(None if t is None else t.double() for t in given))
    assert (out.shape, out.dtype) == (plain.shape, plain.dtype)
    allowed = 2 * float((plain.double() - truth).abs().max())
    assert float((out.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_fp64(case, dtype, layout, backend):
    x, weight, bias = problem(*case, dtype)
    weight = layout(weight)
    with poisoned_outputs():
        out = ops.skinny_linear(x, weight, bias, backend=backend)
    assert_near(out, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_residual_matches_fp64(case, dtype, backend):
    """Added before the one rounding, so that it is nearer than a product and a sum; strided, with guards."""
    x, weight, bias = problem(*case, dtype)
    residual = guarded(residual_of(x, weight), padding=3)
    with poisoned_outputs():
        out = ops.skinny_linear(x, weight, bias, residual=residual, backend=backend)
    assert_near(out, x, weight, bias, residual)
    assert_guards(residual)


@needs_kernel
@pytest.mark.parametrize("chip", ["sm_86", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["odd", "splits-on-a-chip"])
def test_tiles_of_chips(name, dtype, chip):
    """Chips cut a long K where N is small; the splits are added in order, the bias and the residual once."""
    x, weight, bias = problem(*CASES[name], dtype)
    residual = residual_of(x, weight)
    with as_on(chip), poisoned_outputs(), counted() as traffic:
        out = ops.skinny_linear(x, weight, bias, residual=residual, backend="triton")
    assert_near(out, x, weight, bias, residual)
    splits = traffic["_skinny_linear_kernel"].grid[2]
    assert splits == (1 if name == "odd" else 8300 * dtype.itemsize // 8192)
    assert ("_add_splits_kernel" in traffic) is (splits > 1)
    read = sum(x.loaded["residual_ptr"] for x in traffic.values())
    assert read == residual.nbytes


@needs_kernel
@pytest.mark.parametrize(
    ("chip", "columns", "width", "dtype"),
    [
        (None, 66, 1100, torch.float32), (None, 66, 1100, torch.bfloat16), ("sm_90", 18, 1100, torch.float32),
        ("sm_90", 18, 1100, torch.bfloat16), ("sm_90", 5, 4100, torch.float32),
    ],
    ids=["fp32", "bf16", "sm_90-fp32", "sm_90-bf16", "sm_90-fp32-split"],
)  # fmt: skip
def test_bits_do_not_depend_on_the_other_rows(chip, columns, width, dtype):
    """One row, two, a row tile and more, in any order; N beyond a column tile, a long K in two splits."""
    x, weight, bias = problem(70, columns, width, True, dtype)
    residual = residual_of(x, weight)

    def layer(rows):
        return ops.skinny_linear(x[rows], weight, bias, residual=residual[rows], backend="triton")

    with as_on(chip):
        want = layer(slice(None))
        for rows in ([0], [69], [3, 65], [64, 1, 63, 0, 2], list(range(69, 52, -1)), list(range(69, -1, -1))):
            assert torch.equal(layer(rows), want[rows]), rows
        for first, last in ((0, 1), (65, 66), (1, 6), (5, 70)):  # where the row lies in memory does not matter either
            assert torch.equal(layer(slice(first, last)), want[first:last]), (first, last)


@needs_kernel
@pytest.mark.parametrize("case", [(5, 97, 33, True), (40, 130, 200, False)], ids=["odd", "tiles"])
def test_reads_the_weight_once(case):
    """For a pass of up to a row tile; x once for each column tile; nothing outside the arguments."""
    x, weight, bias = problem(*case, torch.bfloat16)
    with counted() as traffic:
        ops.skinny_linear(x, weight, bias, backend="triton")
    mine = traffic["_skinny_linear_kernel"]
    assert mine.launches == 1
    assert mine.loaded["weight_ptr"] == mine.distinct("weight_ptr") == weight.nbytes
    assert mine.loaded["x_ptr"] == x.nbytes * mine.grid[1]
    assert mine.stored["out_ptr"] == case[0] * case[1] * 2


@needs_kernel
def test_row_tiles_are_neighbours():
    """The first axis of the grid, along which a chip starts its programs."""
    x, weight, _ = problem(150, 130, 16, False, torch.bfloat16)
    with as_on("sm_90"), counted() as traffic:
        ops.skinny_linear(x, weight, backend="triton")
    assert traffic["_skinny_linear_kernel"].grid == (3, 9, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(dtype, backend):
    """Rows apart, out of line and backwards in memory, a weight and a bias inside others; guards around all of them."""
    x, weight, bias = problem(5, 40, 33, True, dtype)
    want = ops.skinny_linear(x, weight, bias, backend=backend)
    views = guarded(x, padding=7), guarded(weight, padding=2), guarded(bias)
    with poisoned_outputs():
        assert torch.equal(ops.skinny_linear(*views, backend=backend), want)
    assert_guards(*views)
    repeated = x[:1].expand(3, -1)
    assert torch.equal(
        ops.skinny_linear(repeated, weight, bias, backend=backend),
        ops.skinny_linear(repeated.contiguous(), weight, bias, backend=backend),
    )


@needs_kernel
def test_rows_as_a_new_tensor_has_them():
    """Triton compiles for what is divisible by 16: alone, in a batch or cut from one, rows of K share it."""
    from specdec_triton.kernels._config import even_rows

    base = torch.arange(40.0 * 40).view(40, 40)
    for width in (32, 33, 1, 8):
        new = torch.empty(5, width)
        for x in (base[:5, :width], base[3:8, 3 : 3 + width], base[7:8, :width], base[:, :width].repeat(1, 3)[1:9]):
            x = x[:, :width]
            rows = even_rows(x)
            assert torch.equal(rows, x)
            assert rows.data_ptr() % 16 == 0
            assert (rows.stride(0) % 16 == 0, rows.stride(0) == 1) == (new.stride(0) % 16 == 0, new.stride(0) == 1)
    wide = torch.zeros(6, 64)
    off = wide[1:, 3:35]  # of a fitting stride, but not at an address that fits
    assert off.data_ptr() % 16
    assert torch.equal(even_rows(off), off)
    assert even_rows(off).data_ptr() % 16 == 0
    for free in (wide, wide[2:3], wide[:, :32], wide[1:, 32:]):  # as a batch's rows usually lie
        assert even_rows(free).data_ptr() == free.data_ptr()


@pytest.mark.parametrize("layout", ["linear", "conv1d"])
def test_weight_beyond_2_to_the_31_elements(layout, backend):
    """Offsets are 64-bit (faults.md F1): rows 2^27 elements apart, of which only the pages that are touched take memory."""
    weight = torch.empty(20, 1 << 27, dtype=torch.float16)[:, :20]
    weight.copy_(torch.randn(20, 20))
    if layout == "conv1d":
        weight = weight.t()
    x = torch.randn(3, 20).half()
    assert_near(ops.skinny_linear(x, weight, backend=backend), x, weight, None)


def test_no_rows(backend):
    assert ops.skinny_linear(torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(3), backend=backend).shape == (0, 3)


def good():
    """Arguments that fit; each case below spoils one."""
    return {"x": torch.ones(5, 4), "weight": torch.ones(3, 4), "bias": torch.ones(3), "residual": torch.ones(5, 3)}


BAD = {
    "x-not-a-tensor": ("x", {"x": [[1.0]]}),
    "x-rank": ("x", {"x": torch.ones(1, 5, 4)}),
    "x-integer": ("x", {"x": torch.ones(5, 4).int()}),
    "x-double": ("x", {"x": torch.ones(5, 4).double()}),
    "x-inner-stride": ("x", {"x": torch.ones(4, 5).t()}),
    "x-no-inputs": ("x", {"x": torch.ones(5, 0), "weight": torch.ones(3, 0)}),
    "weight-width": ("weight", {"weight": torch.ones(3, 5)}),
    "weight-dtype": ("weight", {"weight": torch.ones(3, 4).half()}),
    "weight-device": ("weight", {"weight": torch.ones(3, 4, device="meta")}),
    "weight-strides": ("weight", {"weight": torch.ones(6, 8)[::2, ::2]}),
    "weight-no-outputs": ("weight", {"weight": torch.ones(0, 4), "bias": torch.ones(0), "residual": torch.ones(5, 0)}),
    "bias-size": ("bias", {"bias": torch.ones(4)}),
    "bias-rank": ("bias", {"bias": torch.ones(1, 3)}),
    "bias-dtype": ("bias", {"bias": torch.ones(3).half()}),
    "bias-stride": ("bias", {"bias": torch.ones(6)[::2]}),
    "residual-rows": ("residual", {"residual": torch.ones(1, 3)}),
    "residual-columns": ("residual", {"residual": torch.ones(5, 4)}),
    "residual-dtype": ("residual", {"residual": torch.ones(5, 3).half()}),
    "residual-device": ("residual", {"residual": torch.ones(5, 3, device="meta")}),
    "residual-inner-stride": ("residual", {"residual": torch.ones(3, 5).t()}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.skinny_linear(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.skinny_linear(**good())
    ops.skinny_linear(**{**good(), "bias": None, "residual": None, "weight": torch.ones(4, 3).t()})


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_opcheck(has_bias):
    x, weight, bias = problem(3, 5, 4, has_bias, torch.float32)
    for residual in (None, residual_of(x, weight)):
        torch.library.opcheck(torch.ops.specdec.skinny_linear.default, (x, weight, bias, residual, "torch"))


def test_runs_on_meta():
    out = ops.skinny_linear(**{name: x.to("meta").half() for name, x in good().items()})
    assert (out.shape, out.dtype, out.device.type) == ((5, 3), torch.float16, "meta")
