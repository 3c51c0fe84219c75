"""Plans of a pass on the CPU: what they load is what the table says, run by run or gathered."""

from __future__ import annotations

import pytest
import torch

from specdec_triton.reference import paging
from specdec_triton.testing import FP8

TABLES = {
    "one-run": ([4, 5, 6, 7], 1),
    "shared-prefix": ([1, 2, 6, 7], 2),
    "backwards": ([9, 8, 7, 6], 4),
    "recycled": ([2, 3, 0, 9], 3),
}


@pytest.mark.parametrize("run_elements", [0, 1 << 40], ids=["slices", "gather"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize(("table", "runs"), TABLES.values(), ids=TABLES)
def test_plans_load_what_the_table_says(table, runs, strided, dtype, run_elements, monkeypatch):
    """Beside an idle request and a short one; with windows that leave 9 and 1 old keys, and without."""
    monkeypatch.setattr(paging, "RUN_ELEMENTS", run_elements)
    cache = torch.randn(10, 8 if strided else 5, 2, 16).to(dtype)[:, :5]
    plan = paging.Plan((tuple(table), (), (3, 5, -1)), (14, 0, 6), (5, 0, 1), 5, 5)
    for below in (None, -9, -1):
        first, length, reads = plan.reads(below, 4)
        assert [read.b for read in reads] == [0, 2]
        out = torch.zeros(3, 2, length, 16)
        factor = torch.tensor([0.5, 3.0])
        for read in reads:
            by_slices = not strided and (run_elements == 0 or len(read.runs) == 1)
            unused = {"pages": None} if by_slices else {"runs": (None,) * len(read.runs)}
            paging.load(cache, factor, out, [read._replace(**unused)])
        want = torch.zeros_like(out)
        for b, pages, context, n in ((0, table, 14, 5), (2, (3, 5), 6, 1)):
            for position in range(0 if below is None else max(context + below, 0), context + n):
                row = cache[pages[position // 5], position % 5].float()
                want[b, :, position - first] = row * factor[:, None]
        assert torch.equal(out, want)
    assert len(plan.reads(None, 4)[2][0].runs) == runs
