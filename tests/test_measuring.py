"""What is timed, how often, and in which time. No clock but a fake one."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.measuring import measure


class FakeCache:
    def __init__(self, slots):
        self.block_table = torch.zeros(slots, 1, dtype=torch.int32)
        self.reserved = [0] * slots

    def reserve(self, slot, tokens):
        self.reserved[slot] = tokens


class FakeMachine:
    """Adapter, verification, drafter and clock in one: a pass takes what ``cost`` says, the first of a shape three times that.

    Attributes:
        calls: (n, d) of each pass, in their order; d = -1: a drafting pass.
    """

    device, vocab_size, max_len = torch.device("cpu"), 50, None

    def __init__(self, cost=None, *, free=False, fixed_shapes=False):
        self.calls, self.now, self.free, self.fixed_shapes = [], 100.0, free, fixed_shapes
        self.contexts = set()
        self.cost = cost or (lambda n, d: 0.01 + 0.002 * (n + d) if d >= 0 else 0.001 * n)
        self.cache = None

    def new_cache(self, *, slots, page_size, num_pages):
        cache = FakeCache(slots)
        cache.room = num_pages * page_size
        self.cache = weakref.ref(cache)
        return cache

    def verify(self, tokens, cache, context, counts):
        n, t = tokens.shape
        assert counts.dtype == torch.int32
        assert counts.tolist() == sorted(counts.tolist(), reverse=True)
        assert (int(counts.min()), int(counts.max())) >= (1, t)
        if self.fixed_shapes:
            assert set(counts.tolist()) == {t}
        else:  # the drafts of few requests
            assert sum(1 < count < t for count in counts.tolist()) <= 1
        assert 0 <= tokens.min() <= tokens.max() < self.vocab_size
        assert len(context) == len(counts) == n <= len(cache.block_table)
        assert all(int(context[b]) + t <= cache.reserved[b] for b in range(n))
        assert sum(cache.reserved) <= cache.room
        assert set(context.tolist()) == {int(context[0])}
        self.contexts.add(int(context[0]))
        self.take(n, int(counts.sum()) - n)

    def drafting(self, n):
        return lambda: self.take(n, -1)

    def take(self, n, d):
        self.now += self.cost(n, d) * (1 if (n, d) in self.calls else 3)
        self.calls.append((n, d))

    def clock(self):
        return self.now

    def measure(self, slots=4, max_k=4, **options):
        options = {"seconds": 1e9} | options
        drafting = None if self.free else self.drafting
        return measure(self, self.verify, drafting, slots=slots, max_k=max_k, clock=self.clock, **options)


def test_times_every_point_of_the_grid():
    machine = FakeMachine()
    model = machine.measure(slots=6, max_k=5)
    drafts = {1: [0, 1, 2, 4, 5], 2: [0, 1, 5, 10], 4: [0, 1, 5, 10, 20], 6: [0, 1, 5, 10, 20, 30]}
    assert list(model.target) == [(n, d) for n in drafts for d in drafts[n]]
    assert list(model.draft) == [1, 2, 4, 6]
    for point, timed in model.target.items():
        assert timed == pytest.approx(machine.cost(*point))
    assert list(model.draft.values()) == pytest.approx([0.001, 0.002, 0.004, 0.006])
    assert len(machine.contexts) > 4  # passes over the same texts would share what is made for each
    assert (min(machine.contexts) > 120, max(machine.contexts)) == (True, 128)


def test_where_shapes_are_fixed_all_requests_draft_alike():
    machine = FakeMachine(fixed_shapes=True)
    model = machine.measure(slots=6, max_k=5)
    assert machine.contexts == {128}  # a captured pass reads one buffer
    assert list(model.target) == [(n, n * k) for n in (1, 2, 4, 6) for k in (0, 1, 2, 4, 5)]


@pytest.mark.parametrize(
    ("slots", "max_k", "points"), [(1, 1, [(1, 0), (1, 1)]), (1, 0, [(1, 0)]), (2, 0, [(1, 0), (2, 0)])]
)
def test_small_grids(slots, max_k, points):
    assert list(FakeMachine().measure(slots, max_k).target) == points


def test_free_drafts_are_not_timed():
    machine = FakeMachine(free=True)
    model = machine.measure()
    assert model.draft == {}
    assert model.curve(2).draft.item() == 0
    assert all(d >= 0 for _, d in machine.calls)


@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0, 2.0, 5.0, 10.0])
def test_keeps_to_the_time_it_is_given(budget):
    """Fewer repeats or points rather than more time. Twice the corners take 1.0 s, of which only they may be too much."""
    machine = FakeMachine()
    model = machine.measure(slots=8, max_k=8, seconds=budget)
    corners = [(1, 0), (1, 1), (1, 8), (8, 0), (8, 1), (8, 64), (1, -1), (8, -1)]
    needed, longest = (4 * f(machine.cost(*point) for point in corners) for f in (sum, max))
    assert set(corners) <= {*model.target, *((n, -1) for n in model.draft)}
    assert machine.now - 100 <= max(budget, needed, budget / 2 + longest) + 1e-9
    if budget > 2 * needed:
        assert machine.now - 100 > 0.7 * budget
        assert min(machine.calls.count(point) for point in corners) >= 3
    assert (len(model.target) == 5 + 4 + 5 + 6) == (budget == 10)


def test_a_budget_of_nothing_leaves_the_corners_run_once():
    machine = FakeMachine()
    model = machine.measure(slots=8, max_k=8, seconds=0.0)
    assert list(model.target) == [(1, 0), (1, 1), (1, 8), (8, 0), (8, 1), (8, 64)]
    assert list(model.draft) == [1, 8]
    assert len(machine.calls) == 8


def test_repeats_are_interleaved_and_outliers_do_no_harm():
    machine = FakeMachine()
    usual, busy = machine.cost, iter([0, 0, 3, 0, 0, 0, 0] * 10000)
    machine.cost = lambda n, d: usual(n, d) + next(busy)
    model = machine.measure(seconds=1e9)
    assert all(timed == pytest.approx(usual(*point)) for point, timed in model.target.items())
    calls = machine.calls[2 * len(set(machine.calls)) :]
    assert len(calls) > 5 * len(set(calls))
    assert all(a != b for a, b in itertools.pairwise(calls))


def test_known_points_are_not_timed_again():
    machine, known = FakeMachine(), CostModel({(1, 0): 7.0, (4, 8): 8.0, (32, 2): 9.0}, {1: 0.5})
    model = machine.measure(known=known)
    assert {(1, 0), (4, 8), (1, -1)}.isdisjoint(machine.calls)
    assert (model.target[1, 0], model.target[4, 8], model.target[32, 2], model.draft[1]) == (7, 8, 9, 0.5)
    assert model.target[1, 2] == pytest.approx(machine.cost(1, 2))
    assert known.target == {(1, 0): 7.0, (4, 8): 8.0, (32, 2): 9.0}
    machine.calls.clear()
    assert machine.measure(known=model).target == model.target
    assert machine.calls == []


@pytest.mark.parametrize(("max_len", "context", "longest"), [(300, 128, 5), (100, 95, 5), (5, 0, 5), (4, 0, 4)])
def test_stays_inside_the_models_context(max_len, context, longest):
    machine = FakeMachine()
    machine.max_len = max_len
    assert max(d for n, d in machine.measure().target if n == 1) == longest - 1
    assert max(machine.contexts) == context
    assert min(machine.contexts) >= 0


def test_times_what_the_decoder_will_run():
    """Such as a captured graph of the pass."""
    machine, replays = FakeMachine(), []

    def replay(run):
        def replayed():
            replays.append(run)
            machine.now += 0.25

        return replayed

    model = machine.measure(replay=replay)
    assert set(model.target.values()) == {0.25} == set(model.draft.values())
    assert machine.calls == []
    assert len(replays) > 15


def test_the_cache_is_freed():
    machine = FakeMachine()
    machine.measure()
    gc.collect()
    assert machine.cache() is None
