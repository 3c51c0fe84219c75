"""Captured steps and the ring of results, on pretended graphs and devices; with real ops: test_recorded_graph.py."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specdec_triton.engine.graphs import CudaGraph, GraphPool, StepGraphs, graphs_for
from specdec_triton.engine.results import ResultRing

CPU = torch.device("cpu")


# StepGraphs.


class FakeGraph:
    bytes = 100

    def __init__(self, error=None):
        self.error = error

    def capture(self, step):
        if self.error:
            raise self.error
        self.step = step

    def replay(self):
        self.step()


class Counting:
    """A step that counts its runs and fails when told to."""

    runs, error = 0, None

    def __call__(self):
        if self.error:
            raise self.error
        self.runs += 1


def test_first_step_of_a_key_is_eager_the_others_replay():
    graphs, steps = StepGraphs(FakeGraph), {key: Counting() for key in ("a", "b")}
    for key in ("a", "a", "b", "a"):
        graphs.run(key, steps[key])
    assert [step.runs for step in steps.values()] == [3, 1]
    assert (graphs.captured, graphs.replays, graphs.bytes) == (2, 2, 200)


@pytest.mark.parametrize("graphs", [StepGraphs(None), graphs_for(CPU)], ids=["none", "cpu"])
def test_eager_without_graphs(graphs):
    step = Counting()
    for _ in range(3):
        graphs.run("a", step)
    assert (step.runs, graphs.captured, graphs.replays, graphs.bytes) == (3, 0, 0, 0)


def test_invalidate_drops_all_graphs():
    graphs, old, new = StepGraphs(FakeGraph), Counting(), Counting()
    graphs.run("a", old)
    graphs.invalidate()
    assert (graphs.captured, graphs.bytes) == (0, 0)
    for _ in range(2):
        graphs.run("a", new)
    assert (old.runs, new.runs, graphs.captured, graphs.replays) == (1, 2, 1, 1)


def test_least_recently_used_graph_is_dropped():
    graphs = StepGraphs(FakeGraph, limit=2)
    for key in ("a", "b", "a", "c"):
        graphs.run(key, Counting())
    assert (graphs.captured, graphs.replays) == (2, 1)
    for key, replayed in (("a", 2), ("c", 3), ("b", 3)):  # b went
        graphs.run(key, Counting())
        assert graphs.replays == replayed, key
    with pytest.raises(ValueError, match="limit"):
        StepGraphs(FakeGraph, limit=0)


def test_failed_capture_warns_once_and_then_all_is_eager():
    made = [FakeGraph(), FakeGraph(RuntimeError("no capture here\nsecond line"))]
    graphs, step = StepGraphs(lambda: made.pop(0)), Counting()
    graphs.run("a", step)
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: no capture here$") as caught:
        graphs.run("b", step)
    assert len(caught) == 1
    assert step.runs == 2  # the step whose capture failed has run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("a", "b", "c"):
            graphs.run(key, step)
    assert (step.runs, graphs.captured, graphs.replays) == (5, 0, 0)


def test_failed_step_raises_and_leaves_no_graph():
    graphs, step = StepGraphs(FakeGraph), Counting()
    step.error = ValueError("bad step")
    with pytest.raises(ValueError, match="bad step"):
        graphs.run("a", step)
    assert graphs.captured == 0
    step.error = None
    for _ in range(2):
        graphs.run("a", step)
    assert (step.runs, graphs.captured, graphs.replays) == (2, 1, 1)


# CudaGraph, on a pretended device.


class FakeCuda:
    """Of torch.cuda what a capture uses: the current stream, reserved memory, pools."""

    def __init__(self, monkeypatch):
        self.current, self.reserved, self.pools, self.captures, self.ended = "main", 1000, 0, [], []
        self.breaks = False  # ending a capture fails
        names = ("CUDAGraph", "Stream", "current_stream", "device", "graph", "graph_pool_handle", "memory_reserved")
        for name in (*names, "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: self.ended.append(args), raising=False)

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.captures.append("replay"))

    def Stream(self, device):
        return SimpleNamespace(device=torch.device("cuda", device.index or 0))

    def current_stream(self, device):
        return self.current

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.captures.append((pool, stream, capture_error_mode))
        self.current, self.reserved = stream, 700  # the cache is emptied
        try:
            yield
        finally:
            if self.breaks:
                raise RuntimeError("operation failed due to a previous error during capture")
        self.current = "main"

    def graph_pool_handle(self):
        self.pools += 1
        return 0, self.pools

    def memory_reserved(self):
        return self.reserved


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def allocating(cuda, size):
    def step():
        cuda.reserved += size

    return step


def test_cuda_graphs_share_stream_and_pool(cuda):
    graphs = graphs_for(torch.device("cuda", 1))
    for key, size in (("a", 32), ("b", 0)):
        graphs.run(key, allocating(cuda, size))
    first, second = cuda.captures
    assert first == second
    assert first[1].device == torch.device("cuda", 1)
    assert first[2] == "thread_local"
    assert (graphs.bytes, graphs.captured, cuda.current) == (32, 2, "main")
    graphs.run("a", Counting())
    assert cuda.captures[-1] == "replay"
    graphs.invalidate()  # the allocator fails on a pool that has lost all its graphs
    for key in ("a", "b"):
        graphs.run(key, Counting())
    assert [capture[0] for capture in cuda.captures if capture != "replay"] == [(0, 1), (0, 1), (0, 2), (0, 2)]


@pytest.mark.parametrize("breaks", [False, True], ids=["error-in-python", "capture-broken"])
def test_failed_cuda_capture_names_its_cause_and_restores(cuda, breaks):
    step = Counting()
    step.error, cuda.breaks = ValueError("reads a value"), breaks
    with pytest.raises(ValueError, match="reads a value"):
        CudaGraph(GraphPool(torch.device("cuda"))).capture(step)
    assert cuda.current == "main"
    assert cuda.ended == [(0, (0, 1))]


def test_failed_end_of_a_cuda_capture_raises(cuda):
    cuda.breaks = True
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraph(GraphPool(torch.device("cuda"))).capture(Counting())
    assert cuda.current == "main"


# ResultRing.


class FakeDevice:
    """Does its work in order, and only when told to; as ``Copies``, its copies are such work."""

    def __init__(self):
        self.work, self.done = [], 0

    def enqueue(self, work):
        self.work.append(work)

    def advance(self, to):
        while self.done < to:
            self.work[self.done]()
            self.done += 1

    def allocate(self, size):
        return torch.full((size,), -7)

    def start(self, source, target):
        self.enqueue(lambda: target.copy_(source))
        at = len(self.work)
        return SimpleNamespace(query=lambda: self.done >= at, synchronize=lambda: self.advance(at))


def pipeline(capacity, rows=2, columns=3):
    """A device whose steps fill a static report with their number, and the function that enqueues the next one."""
    device, report = FakeDevice(), torch.zeros(rows, columns, dtype=torch.int64)
    ring = ResultRing(CPU, capacity, rows, columns, copies=device)
    numbers = iter(range(100))

    def step(rows=rows, columns=columns):
        number = next(numbers)
        device.enqueue(lambda: report.fill_(number))
        return ring.push(report[:rows, :columns])

    return device, step


def test_results_come_behind_their_events_in_order():
    device, step = pipeline(capacity=3)
    tickets = [step(), step(), step()]
    assert [ticket.ready() for ticket in tickets] == [False] * 3
    device.advance(3)  # step 0, its copy, and step 1, which has written over the report
    assert [ticket.ready() for ticket in tickets] == [True, False, False]
    assert tickets[0].wait().tolist() == [[0] * 3] * 2
    assert device.done == 3  # waited for no more than that
    assert tickets[2].wait().tolist() == [[2] * 3] * 2
    assert device.done == 6
    assert [ticket.waited for ticket in tickets] == [True, False, True]
    assert tickets[1].wait().tolist() == [[1] * 3] * 2


def test_steps_are_pushed_ahead_of_the_results_read():
    _, step = pipeline(capacity=2)
    before, results = step(), []
    for _ in range(10):
        following = step()
        results.append(before.wait())
        before = following
    assert [result.unique().tolist() for result in results] == [[i] for i in range(10)]


def test_buffers_are_not_reused_before_their_ticket_was_waited_for():
    device, step = pipeline(capacity=2)
    first, second = step(), step()
    second.wait()
    with pytest.raises(RuntimeError, match="2 reports are under way"):
        step()  # its turn is the first one's buffer
    result = first.wait()
    third = step()
    device.advance(len(device.work))
    assert third.ready()
    assert result.tolist() == first.wait().tolist() == [[0] * 3] * 2
    assert third.wait().tolist() == [[3] * 3] * 2


def test_shapes_of_reports_vary():
    _, step = pipeline(capacity=3)
    tickets = [step(rows, columns) for rows, columns in ((1, 3), (2, 1), (0, 2))]
    assert [ticket.wait().tolist() for ticket in tickets] == [[[0, 0, 0]], [[1], [1]], []]


@pytest.mark.parametrize("copies", [None, FakeDevice()], ids=["clones", "copies"])
def test_bad_reports_and_capacities(copies):
    ring = ResultRing(CPU, 1, 2, 3, copies=copies)
    for report in (torch.zeros(3, 3).long(), torch.zeros(2, 4).long(), torch.zeros(2, 3), torch.zeros(2).long()):
        with pytest.raises(ValueError, match=r"int64 of a shape up to \[2, 3\]"):
            ring.push(report)
    with pytest.raises(ValueError, match="capacity"):
        ResultRing(CPU, 0, 2, 3, copies=copies)


def test_on_the_cpu_reports_are_cloned_and_ready():
    ring, report = ResultRing(CPU, 1, 2, 3), torch.zeros(2, 3, dtype=torch.int64)
    tickets = []
    for i in range(3):  # never full
        report.fill_(i)
        tickets.append(ring.push(report))
    assert all(ticket.ready() for ticket in tickets)
    assert [ticket.wait()[0, 0].item() for ticket in tickets] == [0, 1, 2]
