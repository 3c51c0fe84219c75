"""The page pool: every page is free or owned by one slot at all times (faults.md E9), and nothing moves by accident."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_triton.errors import OutOfPagesError
from specdec_triton.kv_cache import UNUSED, KVCache, LayerShape
from specdec_triton.testing import assert_pages_add_up


def pool(num_pages=8, slots=3, page_size=4, growable=False, layers=((2, 16), (1, 24))):
    return KVCache(
        [LayerShape(*shape) for shape in layers],
        slots=slots,
        page_size=page_size,
        num_pages=num_pages,
        dtype=torch.float32,
        device=torch.device("cpu"),
        growable=growable,
    )


def test_shapes_by_layer():
    cache = pool()
    assert [x.shape for x in cache.layer(0)] == [(8, 4, 2, 16)] * 2
    assert [x.shape for x in cache.layer(1)] == [(8, 4, 1, 24)] * 2
    assert (cache.num_pages, cache.free_pages) == (8, 8)


@pytest.mark.parametrize(
    ("page_size", "tokens", "pages"), [(4, 0, 0), (4, 1, 1), (4, 4, 1), (4, 5, 2), (1, 7, 7), (48, 49, 2)]
)
def test_pages_for(page_size, tokens, pages):
    cache = pool(num_pages=10, page_size=page_size)
    assert cache.pages_for(tokens) == pages
    cache.reserve(1, tokens)
    assert cache.capacity(1) == pages * page_size
    assert cache.free_pages == 10 - pages


def test_reserve_is_idempotent_and_never_shrinks():
    cache = pool()
    cache.reserve(0, 5)
    pages = cache.block_table[0].tolist()
    cache.reserve(0, 5)
    cache.reserve(0, 1)
    assert cache.block_table[0].tolist() == pages
    assert_pages_add_up(cache)


def test_pages_of_one_request_lie_side_by_side():
    """So that a pass on the CPU reads them as one slice."""
    cache = pool()
    cache.reserve(0, 12)
    assert cache.block_table[0].tolist() == [0, 1, 2]


def test_unused_entries_are_minus_1():
    cache = pool()
    cache.reserve(0, 9)
    cache.reserve(2, 2)
    assert cache.block_table.tolist() == [[0, 1, 2], [UNUSED] * 3, [3, UNUSED, UNUSED]]
    assert cache.block_table.dtype == torch.int32


def test_out_of_pages_changes_nothing():
    cache = pool(num_pages=4)
    cache.reserve(0, 9)
    before = cache.block_table.clone()
    assert not cache.can_reserve(1, 5)
    assert cache.can_reserve(1, 4)
    with pytest.raises(OutOfPagesError, match="num_pages"):
        cache.reserve(1, 5)
    with pytest.raises(OutOfPagesError):
        cache.reserve(0, 40)
    assert torch.equal(cache.block_table, before)
    assert_pages_add_up(cache)


def test_trim_and_release():
    cache = pool()
    cache.reserve(0, 12)
    cache.trim(0, 12)
    cache.trim(0, 20)  # nothing beyond: nothing to do
    assert cache.capacity(0) == 12
    cache.trim(0, 5)
    assert cache.block_table[0].tolist() == [0, 1, UNUSED]
    assert_pages_add_up(cache)
    cache.release(0)
    cache.release(0)
    assert cache.free_pages == 8
    assert_pages_add_up(cache)
    cache.reserve(1, 12)
    assert cache.block_table[1].tolist() == [0, 1, 2]  # low pages first again


def test_growth_keeps_what_is_stored():
    cache = pool(num_pages=1, growable=True)
    cache.reserve(0, 4)
    for layer in range(2):
        for x in cache.layer(layer):
            x[0] = 5.0 + layer
    assert cache.can_reserve(1, 10**6)
    cache.reserve(1, 30)
    assert cache.num_pages == 9
    for layer in range(2):
        for x in cache.layer(layer):
            assert x.shape[0] == 9
            assert (x[0] == 5.0 + layer).all()
            assert (x[1:] == 0).all()
    assert_pages_add_up(cache)


def test_growth_from_nothing_is_geometric():
    """Many small reservations copy the pool a few times, not each time."""
    cache = pool(num_pages=0, growable=True)
    sizes = set()
    for tokens in range(1, 400):
        cache.reserve(0, tokens)
        sizes.add(cache.num_pages)
        assert_pages_add_up(cache)
    assert len(sizes) < 15


@pytest.mark.parametrize("growable", [False, True])
def test_random_use(growable):
    rng = random.Random(0)
    cache = pool(num_pages=10, slots=4, page_size=3, growable=growable)
    for _ in range(500):
        slot, tokens = rng.randrange(4), rng.randrange(20)
        action = rng.choice(["reserve", "reserve", "trim", "release"])
        if action == "reserve":
            could = cache.can_reserve(slot, tokens)
            try:
                cache.reserve(slot, tokens)
                assert could
                assert cache.capacity(slot) >= tokens
            except OutOfPagesError:
                assert not could
        elif action == "trim":
            cache.trim(slot, tokens)
            assert cache.capacity(slot) < tokens + 3
        else:
            cache.release(slot)
            assert cache.capacity(slot) == 0
        assert_pages_add_up(cache)


@pytest.mark.parametrize(("changes", "named"), [({"page_size": 0}, "page_size"), ({"num_pages": -1}, "num_pages")])
def test_refuses(changes, named):
    with pytest.raises(ValueError, match=f"{named} must be at least"):
        pool(**changes)


def test_changes_inside_inference_mode_can_be_undone_outside():
    """A decoder steps in inference mode, and is cancelled from outside it."""
    cache = pool(num_pages=0, growable=True)
    with torch.inference_mode():
        cache.reserve(0, 30)
    cache.release(0)
    cache.reserve(1, 50)
    assert_pages_add_up(cache)
