"""``rms_norm``: at most twice as far from fp64 as PyTorch's operations one by one, sums equal, a row's bits its own."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

OP = "rms_norm"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
FORMS = ("alone", "before", "after")

# name: shape, dtype of the weight (None: x's)
CASES = {
    "one-element": ((1, 1), None),
    "one-row": ((1, 576), None),
    "odd": ((5, 97), torch.float32),
    "row-tiles": ((70, 64), torch.bfloat16),
    "one-dimension": ((40,), None),
    "heads": ((3, 5, 80), torch.float16),
    "batch": ((2, 3, 2, 16), None),
    "two-blocks": ((2, 9000), None),
    "three-blocks": ((1, 16385), torch.float32),
}


def problem(shape, dtype, weight_dtype=None, seed=0):
    """x with rows of different lengths, some so small that eps matters, a weight around 1, and a residual."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=generator) for _ in range(2))
    if len(shape) > 1:
        x *= torch.logspace(-3, 1, shape[-2])[:, None]
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4
    return x.to(dtype), weight.to(weight_dtype or dtype), residual.to(dtype)


def call(x, weight, residual, form, backend, **options):
    given = {} if form == "alone" else {"residual": residual, "residual_after": form == "after"}
    out = ops.rms_norm(x, weight, eps=EPS, backend=backend, **given, **options)
    return out if isinstance(out, tuple) else (out,)


def unfused(x, weight, residual, form, dtype=None, add_one=False):
    """The operations one by one, in x's dtype or another; a sum before the norm is always rounded to x's."""
    total = x + residual if form == "before" else x
    h, weight, residual = (t.to(dtype or x.dtype) for t in (total, weight, residual))
    weight = 1 + weight if add_one else weight
    out = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight
    return (residual + out if form == "after" else out), total


def assert_near(got, x, weight, residual, form, add_one=False):
    plain, total = unfused(x, weight, residual, form, add_one=add_one)
    truth, _ = unfused(x, weight, residual, form, torch.double, add_one)
    assert (got[0].shape, got[0].dtype) == (x.shape, x.dtype)
    allowed = max(2 * float((plain.double() - truth).abs().max()), 2 * torch.finfo(x.dtype).eps * 1e-3)
    assert float((got[0].double() - truth).abs().max()) <= allowed
    assert len(got) == 1 + (form == "before")
    if form == "before":
        assert torch.equal(got[1], total)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_fp64(case, dtype, form, backend):
    shape, weight_dtype = case
    x, weight, residual = problem(shape, dtype, weight_dtype)
    with poisoned_outputs():
        got = call(x, weight, residual, form, backend)
    assert_near(got, x, weight, residual, form)
    assert all(out.is_contiguous() for out in got)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_is_added_in_fp32(dtype, form, backend):
    """Gemma's weights lie around 0, where their own dtype has digits that it has not around 1."""
    x, weight, residual = problem((5, 128), dtype)
    weight = (weight.float() - 1).to(dtype)
    assert_near(call(x, weight, residual, form, backend, add_one=True), x, weight, residual, form, add_one=True)
    alone = call(x, weight, residual, form, backend, add_one=True)[0]
    assert torch.equal(alone, call(x, 1 + weight.float(), residual, form, backend)[0])


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(dtype, form):
    """Both compute in fp32 and round once: they differ where fp32's last bit decides the rounding, by one step."""
    x, weight, residual = problem((7, 200), dtype)
    ours, theirs = (call(x, weight, residual, form, backend) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        step = torch.finfo(dtype).eps * b.double().abs().clamp_min(residual.double().abs() if form == "after" else 0.0)
        assert bool(((a.double() - b.double()).abs() <= (4 if dtype == torch.float32 else 2) * step).all())


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_norm_and_sum_one_after_the_other(dtype, form, backend):
    """Bit for bit what two calls give, so that a fused layer may replace an unfused one."""
    x, weight, residual = problem((5, 97), dtype)
    got = call(x, weight, residual, form, backend)
    if form == "before":
        assert torch.equal(got[0], call(x + residual, weight, None, "alone", backend)[0])
    else:
        assert torch.equal(got[0], residual + call(x, weight, None, "alone", backend)[0])


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [33, 576, 9000])
def test_bits_do_not_depend_on_the_other_rows(width, dtype, form):
    last = 69 if width < 9000 else 5
    x, weight, residual = problem((last + 1, width), dtype)
    want = call(x, weight, residual, form, "triton")
    for rows in ([0], [last], [last - 1, 1], list(range(last, -1, -1)), slice(2, 5), slice(last - 1, last)):
        for a, b in zip(call(x[rows], weight, residual[rows], form, "triton"), want, strict=True):
            assert torch.equal(a, b[rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs(dtype, form, backend):
    """Rows apart and backwards in memory, a repeated row, a weight inside another; guards around all of them."""
    x, weight, residual = problem((5, 33), dtype)
    want = call(x, weight, residual, form, backend)
    views = guarded(x, padding=7), guarded(weight), guarded(residual, padding=2)
    with poisoned_outputs():
        got = call(*views, form, backend)
    assert_guards(*views)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    repeated = call(x[:1].expand(5, -1), weight, residual[:1].expand(5, -1), form, backend)
    assert all(torch.equal(a, b[:1].expand(5, -1)) for a, b in zip(repeated, want, strict=True))


@pytest.mark.parametrize("dim", [16, 80, 33], ids=str)
def test_heads_of_a_packed_product(dim, backend):
    """q and k lie in one row with v, and batches of them with gaps; a head's bits are those that it has alone."""
    q_heads, kv_heads = 4, 2
    packed = torch.randn(5, (q_heads + 2 * kv_heads) * dim).bfloat16()
    _, weight, _ = problem((1, dim), torch.bfloat16)
    heads = packed.view(5, -1, dim)
    for part in (heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[2:3, :q_heads], heads[:, 1:2]):
        want = ops.rms_norm(part.reshape(-1, dim), weight, backend=backend).view(part.shape)
        assert torch.equal(ops.rms_norm(part, weight, backend=backend), want)
        assert torch.equal(ops.rms_norm(part[None], weight, backend=backend)[0], want)
    flipped = heads.transpose(0, 1)  # heads first, as [Hq,T,D]
    want = ops.rms_norm(heads, weight, backend=backend).transpose(0, 1)
    assert torch.equal(ops.rms_norm(flipped, weight, backend=backend), want)


@needs_kernel
@pytest.mark.parametrize("dim", [16, 128])
def test_heads_are_not_copied(dim):
    """Whether one position or many; and what Triton compiles for is the same."""
    from specdec_triton.kernels.rms_norm import _groups_of_rows

    packed = torch.zeros(5, 8 * dim).bfloat16()
    for part in (packed.view(5, 8, dim)[:, 2:6], packed.view(5, 8, dim)[1:2, :1], packed.view(1, 5, 8, dim)):
        x, group, *strides = _groups_of_rows(part)
        assert x.data_ptr() == part.data_ptr()
        assert group == part.shape[-2]
        assert all(stride % 16 == 0 for stride in strides)
    off = torch.zeros(5, 8 * dim + 3).bfloat16()[:, 3:].unflatten(1, (8, dim))
    x, group, *strides = _groups_of_rows(off)
    assert x.data_ptr() % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)


@needs_kernel
@pytest.mark.parametrize("form", FORMS)
def test_reads_each_element_once(form):
    """And the weight once for each row; in one launch."""
    x, weight, residual = problem((70, 100), torch.float16, torch.float32)
    with counted() as traffic:
        call(x, weight, residual, form, "triton")
    assert list(traffic) == ["_rms_norm_kernel"]
    mine = traffic["_rms_norm_kernel"]
    assert (mine.launches, mine.loaded["x_ptr"], mine.distinct("x_ptr")) == (1, x.nbytes, x.nbytes)
    assert mine.loaded["residual_ptr"] == (0 if form == "alone" else residual.nbytes)
    assert mine.distinct("weight_ptr") == weight.nbytes
    assert mine.stored["out_ptr"] == x.nbytes
    assert mine.stored["sum_ptr"] == (x.nbytes if form == "before" else 0)


@needs_kernel
def test_long_rows_are_read_twice():
    x, weight, residual = problem((2, 8193), torch.float16)
    with counted() as traffic:
        call(x, weight, residual, "before", "triton")
    mine = traffic["_rms_norm_kernel"]
    assert (mine.loaded["x_ptr"], mine.loaded["residual_ptr"]) == (2 * x.nbytes, 2 * x.nbytes)
    assert (mine.stored["out_ptr"], mine.stored["sum_ptr"]) == (x.nbytes, x.nbytes)


def test_special_values(backend):
    """A row of zeros is zeros, a NaN stays in its row, and large numbers do not overflow in half precision."""
    x = torch.zeros(4, 40).half()
    x[1, 3], x[2], x[3] = float("nan"), 60000.0, 1.0
    out = ops.rms_norm(x, torch.ones(40), backend=backend)
    assert torch.equal(out[0], torch.zeros(40).half())
    assert bool(out[1].isnan().all())
    assert torch.equal(out[2:], torch.ones(2, 40).half())


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form, backend):
    for out in call(torch.zeros(0, 4), torch.ones(4), torch.zeros(0, 4), form, backend):
        assert out.shape == (0, 4)


def good():
    """Arguments that fit; each case below spoils one."""
    return {"x": torch.ones(5, 4), "weight": torch.ones(4), "residual": torch.ones(5, 4)}


BAD = {
    "x-not-a-tensor": ("x", {"x": [1.0]}),
    "x-scalar": ("x", {"x": torch.tensor(1.0)}),
    "x-integer": ("x", {"x": torch.ones(5, 4).int()}),
    "x-double": ("x", {"x": torch.ones(5, 4).double()}),
    "x-inner-stride": ("x", {"x": torch.ones(4, 5).t()}),
    "x-empty-rows": ("x", {"x": torch.ones(5, 0), "weight": torch.ones(0)}),
    "weight-size": ("weight", {"weight": torch.ones(5)}),
    "weight-rank": ("weight", {"weight": torch.ones(1, 4)}),
    "weight-integer": ("weight", {"weight": torch.ones(4).int()}),
    "weight-stride": ("weight", {"weight": torch.ones(8)[::2]}),
    "weight-device": ("weight", {"weight": torch.ones(4, device="meta")}),
    "residual-shape": ("residual", {"residual": torch.ones(1, 4)}),
    "residual-dtype": ("residual", {"residual": torch.ones(5, 4).half()}),
    "residual-inner-stride": ("residual", {"residual": torch.ones(4, 5).t()}),
    "residual-none": ("residual", {"residual": None, "residual_after": True}),
    "residual-after": ("residual_after", {"residual_after": 1}),
    "add-one": ("add_one", {"add_one": None}),
    "eps-negative": ("eps", {"eps": -1e-6}),
    "eps-nan": ("eps", {"eps": float("nan")}),
    "eps-tensor": ("eps", {"eps": torch.tensor(1e-6)}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.rms_norm(**{**good(), **changes})


def test_good_arguments_are_good():
    ops.rms_norm(**good())
    ops.rms_norm(**good(), residual_after=True, add_one=True, eps=0)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    x, weight, residual = problem((3, 5), torch.float32)
    given = (None if form == "alone" else residual, form == "after")
    torch.library.opcheck(torch.ops.specdec.rms_norm.default, (x, weight, EPS, True, *given, "torch"))


@pytest.mark.parametrize("form", FORMS)
def test_runs_on_meta(form):
    given = {name: x.to("meta").half() for name, x in good().items()}
    for out in call(given["x"], given["weight"].float(), given["residual"], form, None):
        assert (out.shape, out.dtype, out.device.type) == ((5, 4), torch.float16, "meta")


@pytest.mark.parametrize("after", [False, True])
def test_contiguous_whatever_the_strides(after, backend):
    x, residual = (torch.randn(4, 2, 8).transpose(0, 1) for _ in range(2))
    weight = torch.randn(8)
    for given in ({}, {"residual": residual, "residual_after": after}):
        got = ops.rms_norm(x, weight, **given, backend=backend)
        assert all(y.is_contiguous() for y in (got if isinstance(got, tuple) else (got,)))
    torch.library.opcheck(torch.ops.specdec.rms_norm.default, (x, weight, EPS, False, residual, after, "torch"))
