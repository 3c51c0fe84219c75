"""Costs of passes: interpolation, guesses, waits between probes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_triton.engine.costs import DRAFT_COST, PROBING, ROW_COST, CostModel, usual_wait

GRID = {(1, 0): 0.040, (1, 2): 0.044, (1, 4): 0.050, (4, 0): 0.050, (4, 2): 0.052, (4, 8): 0.064}


def seconds(model, n, d):
    """Of a pass of n requests with d drafts in all."""
    return float(model.curve(n).target[d])


@pytest.mark.parametrize(("n", "d"), GRID, ids=str)
def test_exact_at_the_points(n, d):
    assert seconds(CostModel(GRID), n, d) == pytest.approx(GRID[n, d])


@pytest.mark.parametrize(
    ("n", "d", "want"),
    [
        pytest.param(1, 1, 0.042, id="between-drafts"),
        pytest.param(2, 0, 0.040 + 0.010 / 3, id="between-batches"),
        pytest.param(2, 3, (2 * 0.047 + 0.054) / 3, id="between-both"),
        pytest.param(1, 8, 0.050 + 4 * 0.003, id="more-drafts"),
        pytest.param(7, 0, 0.060, id="larger-batch"),
        pytest.param(7, 4, 0.062, id="larger-batch-4-drafts"),
    ],
)
def test_linear_between_and_beyond(n, d, want):
    assert seconds(CostModel(GRID), n, d) == pytest.approx(want)


def test_the_first_draft_of_all_may_cost_a_jump():
    model = CostModel({(4, 0): 0.05, (4, 1): 0.07, (4, 4): 0.073, (8, 0): 0.06, (8, 1): 0.08, (8, 8): 0.087})
    assert [seconds(model, 6, d) for d in (0, 1, 2, 4)] == pytest.approx([0.055, 0.075, 0.076, 0.078])


def test_a_curve_goes_on_for_all_drafts_that_may_be_asked_for():
    target = CostModel(GRID).curve(4).target
    assert (target.shape, target.dtype) == ((4 * 63 + 1,), torch.float32)


def test_never_falls_as_a_pass_grows():
    """Whatever noise says; the last point is below the first."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        grid = {(n, d): 0.01 + float(torch.rand((), generator=generator)) for n in (1, 2, 4, 8) for d in (0, 1, 2, 4)}
        model = CostModel(grid)
        curves = [model.curve(n).target for n in range(1, 12)]
        assert all(bool((curve.diff() >= 0).all()) for curve in curves)
        for d in (0, 1, 3, 4):
            batches = [seconds(model, n, d) for n in range(1, 9)]
            assert all(a <= b * (1 + 1e-6) for a, b in itertools.pairwise(batches))


def test_batches_timed_at_other_numbers_of_drafts():
    """From a file of a decoder with another K."""
    model = CostModel(GRID | {(2, 0): 0.041, (2, 1): 0.045})
    assert seconds(model, 2, 1) == pytest.approx(0.045)
    assert seconds(model, 2, 2) == pytest.approx(0.049)
    assert seconds(model, 3, 2) == pytest.approx((0.049 + 0.052) / 2)


def test_a_single_point_says_that_all_passes_cost_the_same():
    curve = CostModel({(1, 0): 0.5}, {1: 0.1}).curve(3)
    assert set(curve.target.tolist()) == {0.5}
    assert curve.draft.item() == pytest.approx(0.1)


def test_drafting_passes():
    model = CostModel(GRID, {1: 0.002, 2: 0.003, 8: 0.006})
    assert [model.curve(n).draft.item() for n in (1, 2, 4, 8, 10)] == pytest.approx([0.002, 0.003, 0.004, 0.006, 0.007])
    assert CostModel(GRID, {}).curve(4).draft.item() == 0
    assert CostModel(GRID, {1: 0.004, 2: 0.003}).curve(2).draft.item() == pytest.approx(0.004)


@pytest.mark.parametrize("n", [1, 5])
def test_a_guess_without_measurements(n):
    curve = CostModel().curve(n)
    torch.testing.assert_close(curve.target, 1 + ROW_COST * (n - 1 + torch.arange(n * 63 + 1.0)))
    assert curve.draft.item() == pytest.approx(DRAFT_COST)
    assert CostModel(draft={}).curve(n).draft.item() == 0


def test_curves_are_made_once_and_lie_on_the_device():
    """Without a read that an instrument would take for one of the device."""

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func)
            return func(*args, **(kwargs or {}))

    model = CostModel(GRID, device="meta")
    with NoReads():
        model.curve(2)
    assert model.curve(2) is model.curve(2)
    assert {x.device.type for x in model.curve(2)[:2]} == {"meta"}
    assert 0 < model.curve(2).wait < math.inf


# Probes.


def test_the_wait_spends_a_fixed_part_of_the_time_on_probes():
    for n, draft in [(1, 0.0), (1, 0.1), (4, 0.3)]:
        target = 1 + 0.05 * np.arange(n * 4 + 1)
        probe = float(target[n]) - 1 + n * draft
        assert probe / usual_wait(n, target, draft) == pytest.approx(PROBING)
    assert usual_wait(1, np.ones(5), 0.0) == 8


@pytest.mark.parametrize(
    ("target", "draft", "pays"),
    [
        pytest.param([1, 1.9, 2.8], 0.0, True, id="rows-a-little-cheaper"),
        pytest.param([1, 2.0, 3.0], 0.0, False, id="rows-as-dear-as-passes"),
        pytest.param([1, 1.1, 1.2], 0.95, False, id="dear-drafts"),
        pytest.param([1, 2.2, 2.3], 0.2, True, id="only-many-rows-pay"),
    ],
)
def test_the_wait_is_infinite_where_certain_drafts_do_not_pay(target, draft, pays):
    assert math.isfinite(usual_wait(1, np.array(target), draft)) == pays
