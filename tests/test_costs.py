"""Costs of passes: interpolation, what is timed in which time, files, and the command that shows them. No clock but a fake one."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_triton.cli import tune
from specdec_triton.cli.common import Parser, UsageError
from specdec_triton.engine import costs as module
from specdec_triton.engine.costs import (
    DRAFT_COST,
    PROBING,
    ROW_COST,
    CostModel,
    fingerprint,
    load,
    measure,
    save,
    usual_wait,
)

GRID = {(1, 1): 0.040, (1, 3): 0.044, (1, 5): 0.050, (4, 1): 0.050, (4, 3): 0.060, (4, 5): 0.090}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def seconds(model, n, t):
    """Of a pass of n requests with t new tokens each."""
    return float(model.curve(n).target[n * (t - 1)])


# Interpolation.


@pytest.mark.parametrize(("n", "t"), GRID, ids=str)
def test_exact_at_the_points(n, t):
    assert seconds(CostModel(GRID), n, t) == pytest.approx(GRID[n, t])


@pytest.mark.parametrize(
    ("n", "t", "want"),
    [
        pytest.param(1, 2, 0.042, id="between-tokens"),
        pytest.param(2, 1, 0.040 + 0.010 / 3, id="between-batches"),
        pytest.param(2, 4, (2 * 0.047 + 0.075) / 3, id="between-both"),
        pytest.param(1, 9, 0.050 + 4 * 0.003, id="more-tokens"),
        pytest.param(7, 1, 0.060, id="larger-batch"),
        pytest.param(7, 5, 0.130, id="larger-batch-5-tokens"),
    ],
)
def test_linear_between_and_beyond(n, t, want):
    assert seconds(CostModel(GRID), n, t) == pytest.approx(want)


def test_rows_that_are_no_whole_number_for_each_request():
    target = CostModel(GRID).curve(4).target
    assert target[2].item() == pytest.approx(0.0525)  # half of the requests with a draft: 1.5 new tokens each
    assert (target.shape, target.dtype) == ((4 * 63 + 1,), torch.float32)


def test_never_falls_as_a_pass_grows():
    """Whatever noise says; the last point is below the first."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        grid = {(n, t): 0.01 + float(torch.rand((), generator=generator)) for n in (1, 2, 4, 8) for t in (1, 2, 3, 5)}
        model = CostModel(grid)
        curves = [model.curve(n).target for n in range(1, 12)]
        assert all(bool((curve.diff() >= 0).all()) for curve in curves)
        for t in (1, 2, 4, 5):
            batches = [seconds(model, n, t) for n in range(1, 9)]
            assert all(a <= b * (1 + 1e-6) for a, b in itertools.pairwise(batches))


def test_batches_timed_at_other_numbers_of_tokens():
    """From a file of a decoder with another K."""
    model = CostModel(GRID | {(2, 1): 0.041, (2, 2): 0.045})
    assert seconds(model, 2, 2) == pytest.approx(0.045)
    assert seconds(model, 2, 3) == pytest.approx(0.049)
    assert seconds(model, 3, 3) == pytest.approx((0.049 + 0.060) / 2)


def test_a_single_point_says_that_all_passes_cost_the_same():
    curve = CostModel({(1, 1): 0.5}, {1: 0.1}).curve(3)
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


# Measuring.


class FakeCache:
    def __init__(self, slots):
        self.block_table = torch.zeros(slots, 1, dtype=torch.int32)
        self.reserved = [0] * slots

    def reserve(self, slot, tokens):
        self.reserved[slot] = tokens


class FakeMachine:
    """Adapter, drafter and clock in one: a pass takes what ``cost`` says, the first of a shape three times as long.

    Attributes:
        calls: (n, t) of each pass, in their order; t = 0: a drafting pass.
    """

    device, vocab_size, max_len, fixed_shapes = torch.device("cpu"), 50, None, False

    def __init__(self, cost=None, *, free=False):
        self.calls, self.rows, self.now, self.free = [], [], 100.0, free
        self.cost = cost or (lambda n, t: 0.01 + 0.002 * n * t if t else 0.001 * n)
        self.cache = None

    def new_cache(self, *, slots, page_size, num_pages):
        cache = FakeCache(slots)
        cache.room = num_pages * page_size
        self.cache = weakref.ref(cache)
        return cache

    def forward(self, tokens, cache, block_table, context_lens, query_lens=None, *, rows=None, packed=False):
        n, t = tokens.shape
        if query_lens is not None:  # the drafts of few requests
            assert packed
            assert not self.fixed_shapes
            drafting = query_lens[query_lens > 1]
            assert query_lens.tolist() == sorted(query_lens.tolist(), reverse=True)
            assert int((drafting < t).sum()) <= 1
            assert 0 < len(drafting) <= n
            t = int(query_lens.sum()) // n
        assert 0 <= tokens.min() <= tokens.max() < self.vocab_size
        assert len(block_table) == len(context_lens) == n
        assert all(int(context_lens[b]) + t <= cache.reserved[b] for b in range(n))
        assert sum(cache.reserved) <= cache.room
        self.context = int(context_lens[0])
        self.rows.append((n * t, rows))
        self.take(n, t)

    def drafting(self, n):
        return None if self.free else lambda: self.take(n, 0)

    def take(self, n, t):
        self.now += self.cost(n, t) * (1 if (n, t) in self.calls else 3)
        self.calls.append((n, t))

    def clock(self):
        return self.now

    def measure(self, slots=4, max_k=4, **options):
        options = {"rows_of": lambda rows: None, "seconds": 1e9} | options
        return measure(self, self.drafting, slots=slots, max_k=max_k, clock=self.clock, **options)


def test_times_every_point_of_the_grid():
    machine = FakeMachine()
    model = machine.measure(slots=6, max_k=5)
    assert list(model.target) == [(n, t) for n in (1, 2, 4, 6) for t in (1, 2, 3, 5, 6)]
    assert list(model.draft) == [1, 2, 4, 6]
    for (n, t), timed in model.target.items():
        assert timed == pytest.approx(machine.cost(n, t))
    assert list(model.draft.values()) == pytest.approx([0.001, 0.002, 0.004, 0.006])
    assert machine.context == 128


@pytest.mark.parametrize(
    ("slots", "max_k", "points"), [(1, 1, [(1, 1), (1, 2)]), (1, 0, [(1, 1)]), (2, 0, [(1, 1), (2, 1)])]
)
def test_small_grids(slots, max_k, points):
    assert list(FakeMachine().measure(slots, max_k).target) == points


def test_free_drafts_are_not_timed():
    machine = FakeMachine(free=True)
    model = machine.measure()
    assert model.draft == {}
    assert model.curve(2).draft.item() == 0
    assert all(t > 0 for _, t in machine.calls)


@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0, 2.0, 5.0, 10.0])
def test_keeps_to_the_time_it_is_given(budget):
    """Fewer repeats or points rather than more time. Twice the corners take 1.0 s, of which only they may be too much."""
    machine = FakeMachine()
    model = machine.measure(slots=8, max_k=8, seconds=budget)
    corners = [(1, 1), (1, 9), (8, 1), (8, 9), (1, 0), (8, 0)]
    needed, longest = (4 * f(machine.cost(*point) for point in corners) for f in (sum, max))
    assert set(corners) <= {*model.target, *((n, 0) for n in model.draft)}
    assert machine.now - 100 <= max(budget, needed, budget / 2 + longest) + 1e-9
    if budget > 2 * needed:
        assert machine.now - 100 > 0.7 * budget
        assert min(machine.calls.count(point) for point in corners) >= 3
    assert (len(model.target) == 4 * 5) == (budget == 10)


def test_a_budget_of_nothing_leaves_the_corners_run_once():
    machine = FakeMachine()
    model = machine.measure(slots=8, max_k=8, seconds=0.0)
    assert list(model.target) == [(1, 1), (1, 9), (8, 1), (8, 9)]
    assert list(model.draft) == [1, 8]
    assert len(machine.calls) == 6


def test_repeats_are_interleaved_and_outliers_do_no_harm():
    machine = FakeMachine()
    usual, busy = machine.cost, iter([0, 0, 3, 0, 0, 0, 0] * 10000)
    machine.cost = lambda n, t: usual(n, t) + next(busy)
    model = machine.measure(seconds=1e9)
    assert all(timed == pytest.approx(usual(*point)) for point, timed in model.target.items())
    calls = machine.calls[2 * len(set(machine.calls)) :]
    assert len(calls) > 5 * len(set(calls))
    assert all(a != b for a, b in itertools.pairwise(calls))


def test_known_points_are_not_timed_again():
    machine, known = FakeMachine(), CostModel({(1, 1): 7.0, (4, 3): 8.0, (32, 2): 9.0}, {1: 0.5})
    model = machine.measure(known=known)
    assert {(1, 1), (4, 3), (1, 0)}.isdisjoint(machine.calls)
    assert (model.target[1, 1], model.target[4, 3], model.target[32, 2], model.draft[1]) == (7, 8, 9, 0.5)
    assert model.target[1, 3] == pytest.approx(machine.cost(1, 3))
    assert known.target == {(1, 1): 7.0, (4, 3): 8.0, (32, 2): 9.0}
    machine.calls.clear()
    assert machine.measure(known=model).target == model.target
    assert machine.calls == []


def test_passes_are_padded_as_the_decoder_pads_them():
    machine = FakeMachine()
    machine.measure(rows_of=lambda rows: -(-rows // 8) * 8)
    assert set(machine.rows) == {(n * t, -(-n * t // 8) * 8) for n in (1, 2, 4) for t in (1, 2, 3, 5)}


@pytest.mark.parametrize(("max_len", "context", "longest"), [(300, 128, 5), (100, 95, 5), (5, 0, 5), (4, 1, 3)])
def test_stays_inside_the_models_context(max_len, context, longest):
    machine = FakeMachine()
    machine.max_len = max_len
    assert max(t for _, t in machine.measure().target) == longest
    assert machine.context == context


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


# Files.

KEY = {"target": {"sizes": {"hidden_size": 64}}, "threads": 2}


def test_what_is_saved_is_loaded(cache_folder):
    model = CostModel(GRID, {1: 0.001, 4: 0.002})
    assert load(KEY) is None
    save(model, KEY)
    loaded = load(KEY, device="meta")
    assert (loaded.target, loaded.draft) == (model.target, model.draft)
    assert loaded.curve(2).target.device.type == "meta"
    assert load(KEY | {"threads": 1}) is None
    save(CostModel({(1, 1): 0.5}, {}), KEY)
    assert (load(KEY).target, load(KEY).draft) == ({(1, 1): 0.5}, {})
    (path,) = cache_folder.rglob("*.*")
    assert json.loads(path.read_text())["key"] == KEY


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"target": [[1, 1, 0.5]', id="cut-off"),
        pytest.param(b"\xff\xfe\x00", id="no-text"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b'{"target": []}', id="no-draft"),
        pytest.param(b'{"target": [[1, 0.5]], "draft": []}', id="short-row"),
        pytest.param(b'{"target": [[1, 1, "fast"]], "draft": []}', id="a-word"),
        pytest.param(b'{"target": [[1, 1, -0.5]], "draft": []}', id="negative"),
        pytest.param(b'{"target": [[1, 1, NaN]], "draft": []}', id="nan"),
        pytest.param(b'{"target": [[0, 1, 0.5]], "draft": []}', id="no-requests"),
        pytest.param(b'{"target": [[1.5, 1, 0.5]], "draft": []}', id="half-a-request"),
        pytest.param(b'{"target": [[[1], 1, 0.5]], "draft": []}', id="nested"),
        pytest.param(b'{"target": [[1, 1, 0.5]], "draft": [[1, Infinity]]}', id="infinite-draft"),
        pytest.param(b'{"target": [[1, 1, 0.5]], "draft": null}', id="null"),
    ],
)
def test_a_broken_file_is_no_file(content, cache_folder):
    save(CostModel(GRID, {}), KEY)
    (path,) = cache_folder.rglob("*.json")
    path.write_bytes(content)
    assert load(KEY) is None
    save(CostModel(GRID, {}), KEY)
    assert load(KEY).target == GRID


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    save(CostModel(GRID, {}), KEY)
    assert load(KEY) is None


def test_an_interrupted_write_leaves_the_old_file(monkeypatch):
    save(CostModel(GRID, {}), KEY)

    def fail(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    save(CostModel({(1, 1): 0.5}, {}), KEY)
    assert load(KEY).target == GRID


def fake_adapter(hidden=64, dtype=torch.float32, optimized=False):
    from transformers import LlamaConfig

    model = torch.nn.Linear(hidden, 8, dtype=dtype)
    model._specdec_optimized = optimized
    return SimpleNamespace(model=model, config=LlamaConfig(hidden_size=hidden), dtype=dtype, device=torch.device("cpu"))


def test_the_fingerprint_tells_apart_what_costs_differently(monkeypatch):
    keys = [
        fingerprint(fake_adapter(), exact=True),
        fingerprint(fake_adapter(128), exact=True),
        fingerprint(fake_adapter(dtype=torch.bfloat16), exact=True),
        fingerprint(fake_adapter(optimized=True), exact=True),
        fingerprint(fake_adapter(), exact=False),
        fingerprint(fake_adapter(), fake_adapter(32), exact=True),
        fingerprint(fake_adapter(), fake_adapter(96), exact=True),
        fingerprint(fake_adapter(), "heads", exact=True),
    ]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    keys.append(fingerprint(fake_adapter(), exact=True))
    monkeypatch.undo()
    monkeypatch.setattr(module, "device_name", lambda device: "another")
    keys.append(fingerprint(fake_adapter(), exact=True))
    monkeypatch.undo()
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(texts)
    assert json.dumps(fingerprint(fake_adapter(), exact=True), sort_keys=True) == texts[0]


# The command.


def arguments(*argv):
    parser = Parser()
    tune.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture
def no_models(monkeypatch):
    """The command without models: the costs are given."""
    costs = CostModel({(n, t): 0.04 + 0.002 * n * t for n in (1, 2) for t in (1, 2, 5)}, {1: 0.004, 2: 0.005})

    class Decoder:
        def __init__(self, target, drafter, *, num_draft_tokens, max_batch_size):
            assert (target, drafter) == ("target", "drafter")
            if max_batch_size > 8:
                raise ValueError("the drafter does not fit")
            self.target = SimpleNamespace(fixed_shapes=False)

        def tune(self):
            print("library noise")
            return costs

    for name in ("check_models", "quiet_transformers"):
        monkeypatch.setattr(tune, name, lambda *args: None)
    monkeypatch.setattr(tune, "load_target", lambda args, device: "target")
    monkeypatch.setattr(tune, "load_drafter", lambda args, device, target: "drafter")
    monkeypatch.setattr("specdec_triton.engine.SpeculativeDecoder", Decoder)
    return costs


def test_tune_prints_tables(no_models, capsys):
    assert tune.run(arguments("--device", "cpu")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["batch", "1", "token", "2", "tokens", "5", "tokens", "a", "draft"],
        ["1", "42.0", "44.0", "50.0", "4.0"],
        ["2", "44.0", "48.0", "60.0", "5.0"],
    ]
    assert lines[6] == ["batch", "30%", "50%", "70%", "90%"]
    assert [line[0] for line in lines[7:]] == ["1", "2"]
    drafts = [int(cell.split("-")[-1]) for cell in lines[7][1:]]
    assert drafts == sorted(drafts)
    assert drafts[-1] == 4


def test_tune_prints_json(no_models, capsys):
    assert tune.run(arguments("--json", "--device", "cpu", "-k", "6")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passes"][1] == {"batch_size": 1, "tokens": 2, "seconds": 0.044}
    assert result["drafting_passes"] == [{"batch_size": 1, "seconds": 0.004}, {"batch_size": 2, "seconds": 0.005}]
    assert (result["target"], result["k"], result["max_batch_size"]) == ("smollm2", 6, 8)
    for choice in result["choices"]:
        n, rate = choice["batch_size"], choice["acceptance"]
        curve = no_models.curve(n)
        value = [
            (n * sum(rate**j for j in range(k + 1))) / (float(curve.target[n * k]) + k * float(curve.draft))
            for k in range(7)
        ]
        assert choice["k"] == [value.index(max(value))] * n
    assert [(choice["batch_size"], choice["acceptance"]) for choice in result["choices"]] == [
        (n, rate) for n in (1, 2) for rate in (0.3, 0.5, 0.7, 0.9)
    ]


def test_tune_shows_a_spread_and_what_was_not_timed():
    text = tune.as_text(
        CostModel({(1, 1): 0.01, (1, 2): 0.02, (2, 1): 0.03}, {}),
        [{"batch_size": n, "acceptance": 0.5, "k": k} for n, k in ((1, [2]), (2, [1, 2])) for _ in tune.ACCEPTANCE],
    )
    lines = [line.split() for line in text.splitlines()]
    assert lines[1:4] == [["batch", "1", "token", "2", "tokens"], ["1", "10.0", "20.0"], ["2", "30.0", "-"]]
    assert lines[7:] == [["1", *["2"] * 4], ["2", *["1-2"] * 4]]


def test_tune_passes_on_that_the_drafter_does_not_fit(no_models):
    with pytest.raises(UsageError, match="does not fit"):
        tune.run(arguments("--max-batch-size", "9", "--device", "cpu"))


@pytest.mark.parametrize("argv", [["--draft", "none"], ["-k", "0"], ["--max-batch-size", "0"]], ids=" ".join)
def test_tune_refuses(argv):
    with pytest.raises(UsageError):
        tune.run(arguments(*argv))
