"""The semantics of a CUDA graph on a CPU: a replay must leave every tensor bit for bit as the step itself does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specdec_triton import ops
from specdec_triton.engine.graphs import StepGraphs
from specdec_triton.recorded_graph import RecordedGraph
from specdec_triton.reference.accept_reject import METHODS
from specdec_triton.testing import batch_of, paged_case, toy_model
from specdec_triton.tracing import HostSyncError

_library = torch.library.Library("specdec_test", "DEF")
_library.define("peek(Tensor(a!) out, Tensor x) -> ()")


def _peek(out, x):
    """A custom op whose body reads values in several ways."""
    out.fill_(float(x[0]) + x.tolist()[1] + len(x.nonzero()) + x[x > 0].sum().item())


_library.impl("peek", _peek, "CPU")


class State:
    """Static tensors that a step works on, filled anew for each seed."""

    def __init__(self):
        self.x, self.y, self.out = (torch.zeros(4, 6) for _ in range(3))
        self.rows, self.columns, self.lens = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
        self.case = paged_case([33, 7], 3, page_size=7)
        self.k, self.v = torch.zeros(2, 2, 3, 2, 16)
        self.attended = torch.zeros_like(self.case.q)
        self.drafts, self.logits = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, 20)
        self.params, self.accepted = batch_of(2), torch.zeros(2, 5, dtype=torch.int64)

    def fill(self, seed):
        torch.manual_seed(seed)
        for x in (self.x, self.y, self.out, self.k, self.v, self.logits):
            x.normal_()
        self.rows.copy_(torch.randperm(4))
        self.columns.random_(6)
        self.lens.random_(1, 7)
        self.drafts.copy_(self.logits[:, :3].argmax(-1))
        self.params.position.fill_(seed)
        self.case.context_lens.random_(0, 8)
        return self

    def tensors(self):
        paged = (self.case.k_cache, self.case.v_cache)
        return [*(x for x in vars(self).values() if isinstance(x, torch.Tensor)), *paged]


def in_place(s):
    s.x.mul_(2).add_(s.y)
    s.out += s.x


def views(s):
    s.x.t()[2].add_(1)
    s.out.view(-1)[3:9].copy_(s.x.reshape(-1)[:6])
    first, second = (s.x @ s.y.t()).chunk(2)
    s.out[:2, :4] = first + second


def copies_that_look_like_views(s):
    s.out.copy_(s.x.t().reshape(4, 6).contiguous().flatten().view(4, 6))


def intermediate_in_place(s):
    h = s.x.clone()
    h[0] += 1
    h.t_()
    h[:, 1].zero_()
    s.out.copy_(h.t())


def allocated_and_filled(s):
    h = torch.empty_like(s.x)
    torch.add(s.x, s.y, out=h)
    torch.mul(h, 2, out=s.out)


def objects_given_other_memory(s):
    h = s.x * 2
    row = h[0]
    h.data = s.y * 3
    s.out.copy_(h + row)


def indices(s):
    s.out[s.rows, s.columns] = s.x[:, 0]
    s.x.index_put_((s.rows, s.columns), s.y[0, 0], accumulate=True)
    s.out[0] = 3.0


def scatter(s):
    s.out.scatter_(1, s.columns[:, None], s.x)
    s.x.index_copy_(0, s.rows, s.y)


def masks(s):
    inside = torch.arange(6) < s.lens[:, None]
    s.out.copy_(torch.where(inside, s.x, -1.0).masked_fill(~inside, 0.5))


def carried(s):
    s.lens += 1
    s.rows.copy_(s.rows.flip(0))
    s.x.copy_(s.x.gather(1, s.columns[:, None].expand(4, 6)))


@torch.inference_mode()
def model_like(s):
    h = F.rms_norm(s.x, (6,), s.y[0])
    h = F.silu(F.linear(h, s.y, s.y[:, 0])).softmax(-1)
    s.out[:, :4] = h


def append_and_attend(s):
    c = s.case
    ops.append_kv(s.k, s.v, c.k_cache, c.v_cache, c.block_table, c.context_lens)
    s.attended.copy_(ops.verify_attention(*c.args, sliding_window=5))


def accept_reject(method):
    def step(s):
        result = ops.accept_reject(s.drafts, s.logits, params=s.params, method=method)
        s.accepted[:, :4] = result.tokens
        s.accepted[:, 4] = result.num_accepted
        s.params.position += result.num_accepted

    step.__name__ = f"accept_reject-{method}"
    return step


STEPS = {
    step.__name__: step
    for step in (
        in_place, views, copies_that_look_like_views, intermediate_in_place, allocated_and_filled,
        objects_given_other_memory, indices, scatter, masks, carried, model_like, append_and_attend,
        *map(accept_reject, METHODS),
    )
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_replay_is_the_step(step):
    """faults.md G2: for ten other inputs and lengths; the capture changes nothing."""
    graph, state = RecordedGraph(), State().fill(0)
    before = copy.deepcopy(state)
    graph.capture(lambda: step(state))
    assert_same(state, before)
    changed = set()
    for seed in range(10):
        eager = copy.deepcopy(state.fill(seed))
        filled = copy.deepcopy(eager)
        step(eager)
        graph.replay()
        assert_same(state, eager)
        changed.update(
            i for i, (a, b) in enumerate(zip(eager.tensors(), filled.tensors(), strict=True)) if differ(a, b)
        )
    assert changed  # the step does something


def assert_same(state, other):
    assert [i for i, (a, b) in enumerate(zip(state.tensors(), other.tensors(), strict=True)) if differ(a, b)] == []


def differ(a, b):
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_whole_model_replays_as_it_runs():
    model, ids = toy_model(num_hidden_layers=2), torch.randint(0, 50, (2, 7))
    out = torch.zeros(2, 7, model.config.vocab_size)
    causal = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)  # to make one, transformers reads a value

    @torch.inference_mode()
    def step():
        out.copy_(model(input_ids=ids, attention_mask=causal, use_cache=False).logits)

    graph = RecordedGraph()
    graph.capture(step)
    assert out.eq(0).all()
    ids.random_(50)
    graph.replay()
    replayed = out.clone()
    step()
    assert torch.equal(replayed, out)


def test_python_values_are_frozen():
    """faults.md G2: lengths on the host at the time of the capture."""
    state, length, graph = State().fill(0), 2, RecordedGraph()

    def step():
        state.out[:length] = state.x[:length]

    graph.capture(step)
    length = 4
    state.out.zero_()
    graph.replay()
    assert state.out.any(1).tolist() == [True, True, False, False]


def test_replaced_tensors_are_not_seen():
    state, graph = State().fill(0), RecordedGraph()
    graph.capture(lambda: state.out.copy_(state.x))
    old, state.x = state.x, state.x + 1
    graph.replay()
    assert torch.equal(state.out, old)


def test_a_capture_does_not_run():
    """What the step allocated holds nothing yet, and random numbers are not used up; each replay draws its own."""
    made, state, graph = [], State().fill(0), RecordedGraph()

    def step():
        made[:] = torch.rand(3), torch.arange(3), torch.empty(3)
        state.out[0, :3] = made[0]

    before = torch.get_rng_state()
    graph.capture(step)
    assert torch.equal(torch.get_rng_state(), before)
    assert made[0].isnan().all()
    assert (made[1] > 2**60).all()
    assert made[2].isnan().all()
    torch.manual_seed(3)
    want = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(3)
    for numbers in want:
        graph.replay()
        assert torch.equal(state.out[0, :3], numbers)
    assert made[1].tolist() == [0, 1, 2]


def test_what_a_graph_reads_and_runs():
    state, graph = State().fill(0), RecordedGraph()

    def step():
        unused = state.columns[1:]
        h = torch.empty_like(state.x)
        h.copy_(state.x.t()[0:1].expand(6, 4).t())
        state.out[1:].add_(h[1:])
        state.out[0] = 2.0
        return unused

    graph.capture(step)
    assert graph.ops == ["aten.copy_", "aten.add_", "aten.fill_"]
    used = [x.untyped_storage() for x in (state.x, state.out)]
    assert graph.reads == {(storage.data_ptr(), storage.nbytes()) for storage in used}
    assert graph.bytes == 4 * 6 * 4


READS = {
    "item": ("_local_scalar_dense", lambda s: s.x[0, 0].item()),
    "int": ("_local_scalar_dense", lambda s: int(s.lens[0])),
    "bool": ("_local_scalar_dense", lambda s: bool(s.x[0, 0] > 0)),
    "range": ("_local_scalar_dense", lambda s: range(s.lens[0])),
    "index-by-a-scalar": ("_local_scalar_dense", lambda s: s.x[s.rows[0]]),
    "allclose": ("allclose", lambda s: torch.allclose(s.x, s.y)),
    "equal": ("equal", lambda s: torch.equal(s.x, s.y)),
    "tolist": ("tolist", lambda s: s.lens.tolist()),
    "cpu": ("cpu", lambda s: s.lens.cpu()),
    "numpy": ("numpy", lambda s: s.lens.numpy()),
    "asarray": ("__array__", lambda s: np.asarray(s.lens)),
    "format": ("__format__", lambda s: f"{s.lens}"),
    "nonzero": ("nonzero", lambda s: s.x.nonzero()),
    "where": ("nonzero", lambda s: torch.where(s.x > 0)),
    "mask": ("index", lambda s: s.x[s.x > 0]),
    "mask-assignment": ("index_put_", lambda s: s.x.__setitem__(s.x > 0, 1.0)),
    "masked-select": ("masked_select", lambda s: s.x.masked_select(s.x > 0)),
    "unique": ("_unique2", lambda s: s.lens.unique()),
    "repeat-interleave": ("repeat_interleave", lambda s: s.rows.repeat_interleave(s.lens)),
    "tensor-of-a-list": ("torch.tensor", lambda s: torch.tensor([1, 2])),
    "list-as-an-index": ("torch.tensor", lambda s: s.x[[0, 1]]),
}


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
@pytest.mark.parametrize(("name", "read"), READS.values(), ids=READS)
def test_host_reads_are_refused_in_a_capture(name, read, inference):
    state, graph = State().fill(0), RecordedGraph()

    def step():
        with torch.inference_mode(inference):
            state.x.add_(1)
            read(state)

    before = copy.deepcopy(state)
    with pytest.raises(HostSyncError, match=rf"(?:^|\.){name}\b.* makes the host wait"):
        graph.capture(step)
    assert_same(state, before)


def test_bodies_of_custom_ops_may_read():
    state, graph = State().fill(0), RecordedGraph()
    graph.capture(lambda: torch.ops.specdec_test.peek(state.out, state.x[0]))
    assert graph.ops == ["specdec_test.peek"]
    state.x[0] = torch.arange(6.0)
    graph.replay()
    assert state.out.unique().tolist() == [0 + 1 + 5 + 15]


def test_steps_replay_from_recorded_graphs():
    """With state carried from step to step, and a graph for each key."""
    state = State().fill(0)
    eager, graphs = copy.deepcopy(state), StepGraphs(RecordedGraph)
    for key in ("carried", "views", "carried", "carried", "views"):
        STEPS[key](eager)
        graphs.run(key, lambda key=key: STEPS[key](state))
        assert_same(state, eager)
    assert (graphs.captured, graphs.replays) == (2, 3)
    assert graphs.bytes > 0


def test_a_step_that_reads_stays_eager():
    graphs, state = StepGraphs(RecordedGraph), State().fill(0)
    with pytest.warns(RuntimeWarning, match=r"HostSyncError: aten\._local_scalar_dense\.default makes the host wait"):
        graphs.run("a", lambda: state.x.add_(float(state.y[0, 0])))
    assert graphs.captured == 0
