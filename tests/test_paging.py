"""Plans of a pass on the CPU: what they place, load and store is what the table says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_triton.reference import paging
from specdec_triton.testing import FP8, SENTINEL

PAGES, SIZE, GARBAGE = 10, 5, -(2**31)
TABLES = {
    "one-run": [4, 5, 6, 7],
    "shared-prefix": [1, 2, 6, 7],
    "backwards": [9, 8, 7, 6],
    "recycled": [2, 3, 0, 9],
}
# name: old and new tokens of three requests, T
BATCHES = {
    "ragged": ((14, 0, 3), (5, 1, 2), 5),
    "idle-between": ((14, 6, 9), (2, 0, 1), 2),
    "full": ((4, 5, 6), (3, 3, 3), 3),
    "all-idle": ((4, 5, 6), (0, 0, 0), 3),
    "page-edges": ((5, 9, 10), (5, 1, 5), 5),
}


def cache_of(dtype, strided):
    """Each slot holds its own content; strided: the pages' slots do not follow one another."""
    content = torch.randn(PAGES, SIZE + 3 if strided else SIZE, 2, 16).to(dtype)
    return content[:, :SIZE]


def plan_of(contexts, counts, count, table):
    """All requests on the same table; garbage where it needs no page."""
    needed = [-(-(context + n) // SIZE) if n else 0 for context, n in zip(contexts, counts, strict=True)]
    tables = tuple(tuple(table[:n]) + (GARBAGE,) * (5 - n) for n in needed)
    return paging.Plan(np.array(tables), contexts, counts, count, SIZE)


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize(("contexts", "counts", "count"), BATCHES.values(), ids=BATCHES)
def test_new_tokens_lie_where_the_table_says(contexts, counts, count, table):
    take, slots = plan_of(contexts, counts, count, table).new()
    tokens = [(b, t) for b, n in enumerate(counts) for t in range(n)]
    positions = [(b, contexts[b] + t) for b, t in tokens]
    assert slots.tolist() == [table[i // SIZE] * SIZE + i % SIZE for _, i in positions]
    if 0 < len(tokens) < len(counts) * count:
        assert take.tolist() == [b * count + t for b, t in tokens]
    else:
        assert take is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_loads_what_the_table_says(table, strided, dtype):
    """Some positions twice, in no order."""
    cache, positions = cache_of(dtype, strided), [0, 4, 5, 19, 18, 7, 7, 0, 12]
    plan = paging.Plan(np.array([table]), (20,), (0,), 1, SIZE)
    slots = plan.slots(np.array([0]), np.array(positions))
    out = torch.full((len(positions), 2, 16), SENTINEL).to(dtype)
    paging.load(cache, slots, out)
    assert same_bytes(out, torch.stack([cache[table[i // SIZE], i % SIZE] for i in positions]))


def test_a_strided_cache_is_not_copied_to_load_from_it():
    """2^40 pages that are one: as a dense tensor they would not fit."""
    page = torch.randn(SIZE, 2, 16)
    out = torch.full((2, 2, 16), SENTINEL)
    paging.load(page.expand(2**40, SIZE, 2, 16), torch.tensor([SIZE * 2**39 + 1, 4]), out)
    assert torch.equal(out, page[[1, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_stores_there_and_nowhere_else(strided, dtype):
    cache, rows = cache_of(dtype, strided), torch.randn(3, 2, 16).to(dtype)
    want = cache.clone()
    for i, (page, slot) in enumerate([(9, 0), (0, 4), (3, 2)]):
        want[page, slot] = rows[i]
    paging.store(cache, torch.tensor([9 * SIZE, 4, 3 * SIZE + 2]), rows)
    assert same_bytes(cache, want)


def test_layers_of_a_pass_share_a_plan():
    args = torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2])
    plan = paging.make_plan(*args, 2, SIZE)
    assert paging.make_plan(*args, 2, SIZE) is plan
    assert plan.new() is plan.new()
    assert paging.make_plan(*args, 3, SIZE) is not plan
    assert paging.make_plan(args[0], args[1] + 1, args[2], 2, SIZE) is not plan
