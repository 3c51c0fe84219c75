"""``row_mean``: at most twice as far from fp64 as PyTorch's own mean, and a row's bits are its own for every R."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import ops
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

OP = "row_mean"
needs_kernel = pytest.mark.skipif(why_not_triton(OP, "cpu") is not None, reason=str(why_not_triton(OP, "cpu")))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 64), (2, 576), (3, 5000)], ids=str)
def test_matches_fp64(shape, dtype, backend):
    """The largest width takes two rounds of lanes."""
    x = guarded((torch.randn(shape) + 0.5).to(dtype), padding=3)
    with poisoned_outputs():
        out = ops.row_mean(x, backend=backend)
    assert_guards(x)
    truth, plain = x.double().mean(1), x.mean(1)
    assert (out.shape, out.dtype) == (plain.shape, dtype)
    allowed = max(2 * float((plain.double() - truth).abs().max()), 2e-7 if dtype == torch.float32 else 0.0)
    assert float((out.double() - truth).abs().max()) <= allowed


@needs_kernel
def test_bits_do_not_depend_on_the_other_rows():
    x = torch.randn(150, 100)
    want = ops.row_mean(x, backend="triton")
    for rows in ([0], [149], [64, 1], list(range(149, -1, -1))):
        assert torch.equal(ops.row_mean(x[rows], backend="triton"), want[rows])
    assert torch.equal(ops.row_mean(x[3:9], backend="triton"), want[3:9])


@needs_kernel
def test_reads_each_element_once():
    x = torch.randn(70, 100).half()
    with counted() as traffic:
        ops.row_mean(x, backend="triton")
    mine = traffic["_row_mean_kernel"]
    assert (mine.launches, mine.loaded["x_ptr"], mine.distinct("x_ptr")) == (1, x.nbytes, x.nbytes)
    assert mine.stored["out_ptr"] == 70 * 2


def test_no_rows(backend):
    assert ops.row_mean(torch.zeros(0, 4), backend=backend).shape == (0,)


BAD = {
    "not-a-tensor": [[1.0]],
    "rank": torch.ones(4),
    "integer": torch.ones(5, 4).int(),
    "double": torch.ones(5, 4).double(),
    "inner-stride": torch.ones(4, 5).t(),
    "empty-rows": torch.ones(5, 0),
}


@pytest.mark.parametrize("x", BAD.values(), ids=BAD)
def test_refuses(x):
    with pytest.raises(ValueError, match=r"^x must be"):
        ops.row_mean(x)


def test_opcheck():
    torch.library.opcheck(torch.ops.specdec.row_mean.default, (torch.randn(3, 5), "torch"))


def test_runs_on_meta():
    out = ops.row_mean(torch.ones(3, 5, device="meta").bfloat16())
    assert (out.shape, out.dtype, out.device.type) == ((3,), torch.bfloat16, "meta")
