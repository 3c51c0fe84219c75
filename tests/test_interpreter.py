"""The tools that catch a kernel's faults must catch them: each is shown a kernel that has one."""

from __future__ import annotations

import os

import pytest
import torch

from specdec_triton.interpreter import counted
from specdec_triton.testing import assert_guards, guarded, poisoned_outputs

if os.environ.get("TRITON_INTERPRET") == "1":
    triton = pytest.importorskip("triton")
    tl = triton.language
else:
    pytest.skip("the interpreter is off (TRITON_INTERPRET=1 turns it on)", allow_module_level=True)


@triton.jit
def _copy_kernel(out_ptr, x_ptr, first, count, stride, BLOCK: tl.constexpr):
    """Elements first, first + stride, ... of x to the elements from 0 on of out."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + first + at * stride, mask=at < count, other=0)
    tl.store(out_ptr + at, x, mask=at < count)


@triton.jit
def _count_kernel(hits_ptr, seen_ptr):
    tl.atomic_add(hits_ptr, 1)
    tl.atomic_cas(seen_ptr, 0, 1)


def copy(x, out, first=0, count=None, stride=1, grid=1):
    _copy_kernel[(grid,)](out, x, first, out.numel() if count is None else count, stride, BLOCK=16)


def test_counts_bytes_of_unmasked_lanes():
    x, out = torch.arange(10.0).half(), torch.zeros(4, dtype=torch.float16)
    with counted() as traffic:
        copy(x, out, stride=3, grid=3)
        copy(x, out, count=2)
    assert out.tolist() == [0, 1, 6, 9]
    mine = traffic["_copy_kernel"]
    assert (mine.launches, mine.grid) == (2, (1, 1, 1))
    assert (mine.loaded, mine.stored) == ({"x_ptr": 3 * 8 + 4}, {"out_ptr": 3 * 8 + 4})
    assert mine.distinct("x_ptr") == 2 * len({0, 3, 6, 9, 1})
    assert mine.distinct("out_ptr") == 0


def test_counts_atomics_both_ways():
    hits, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with counted() as traffic:
        _count_kernel[(3, 2)](hits, seen)
    assert (hits.item(), seen.item()) == (6, 1)
    mine = traffic["_count_kernel"]
    assert mine.grid == (3, 2, 1)
    assert mine.loaded == mine.stored == {"hits_ptr": 24, "seen_ptr": 48}


@pytest.mark.parametrize(
    ("first", "count", "stride", "verb"),
    [(-1, 4, 1, "reads"), (6, 4, 1, "reads"), (0, 2, 4, "reads"), (0, 5, 0, "writes")],
    ids=["before", "after", "between-rows", "store"],
)
def test_raises_outside_the_arguments(first, count, stride, verb):
    """Before it happens: the output is as it was."""
    x, out = torch.ones(10).view(2, 5)[:, :4], torch.zeros(6)[:4]  # rows 0..3 and 5..8
    with counted(), pytest.raises(Exception, match=f"_copy_kernel {verb} 1 elements outside"):
        copy(x, out, first, count, stride)
    assert not out.as_strided((6,), (1,)).any()


def test_leaves_the_interpreter_as_it_was():
    x, out = torch.ones(4), torch.zeros(4)
    with counted() as traffic:
        pass
    copy(x, out)
    assert (out.tolist(), traffic) == ([1.0] * 4, {})


def test_guards_show_a_write():
    x = guarded(torch.ones(2, 3), padding=2)
    assert x.stride() == (5, 1)
    assert_guards(x)
    copy(torch.ones(4), x, count=4)
    with pytest.raises(AssertionError, match=r"shape \[2, 3\], at elements \[3\] from its first"):
        assert_guards(x)


def test_poison_shows_what_was_not_written():
    with poisoned_outputs():
        out = torch.empty(4)
        copy(torch.ones(3), out, count=3)
    assert out.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8], ids=str
)
def test_guards_of_every_type(dtype):
    x = guarded(torch.ones(2, 3).to(dtype), padding=1)
    assert (x.float() == 1).all()
    assert_guards(x)
    beside = x.as_strided((1,), (1,), x.storage_offset() + 3)
    assert beside.float().isnan() if dtype.is_floating_point else beside > 100
    beside.copy_(x[0, :1])
    with pytest.raises(AssertionError):
        assert_guards(x)
